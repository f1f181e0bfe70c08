"""A decoder that nobody here wrote, cut by the class name of its layers."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    FSDPConfig,
    ParallelismConfig,
)
from parallel_engine import Engine, unwrap
from parallel_testing.ranks import run_ranks

STEPS, ROWS, LENGTH, VOCABULARY = 20, 4, 12, 61


def decoder(*, tied):
    """A Llama of two layers with random weights; sizes that two ranks do not divide evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def next_token_loss(model, batch):
    return model(**batch, labels=batch["input_ids"], use_cache=False).loss


def train(degrees, tied):
    """(units, sharded parameters, losses and norms)."""
    model = decoder(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = Engine(
        parallelism=ParallelismConfig(**degrees),
        accelerator=AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("LlamaDecoderLayer",))),
        device="cpu",
    )
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    world, numbers = engine.topology.dp_world_size, []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        mine = ids.chunk(world)[engine.rank]
        batch = {"input_ids": mine, "attention_mask": torch.ones_like(mine)}
        report = engine.step(model, optimizer, None, [batch], next_token_loss, clip_norm=1.0)
        numbers.append((report.loss, report.grad_norm))
    units = {name for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    return units, [isinstance(p, DTensor) for p in model.parameters()], numbers


def train_both(degrees):
    return {tied: train(degrees, tied) for tied in (False, True)}


@pytest.fixture(scope="module")
def results():
    return (
        run_ranks(train_both, 1, {}, init=False, timeout_s=240)[0],
        run_ranks(train_both, 2, {"dp_shard": -1}, init=False, timeout_s=240),
    )


@pytest.mark.parametrize("tied", [False, True], ids=["two_embeddings", "tied_embeddings"])
def test_fsdp_equals_one_process(results, tied):
    one, ranks = results
    _, _, wanted = one[tied]
    assert wanted[-1][0] < wanted[0][0]
    for found in ranks:
        units, sharded, numbers = found[tied]
        assert {"model.layers.0", "model.layers.1"} <= units
        assert all(sharded)
        for pair, expected in zip(numbers, wanted, strict=True):
            assert pair == pytest.approx(expected, rel=1e-5)


def _recomputed(model, mode):
    engine = Engine(
        accelerator=AcceleratorConfig(
            fsdp=FSDPConfig(wrap_modules=("LlamaDecoderLayer",)),
            activation_checkpointing=ActivationCheckpointingConfig(mode=mode),
        ),
        device="cpu",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    ids = torch.arange(24).reshape(2, 12)
    # Padding at the left needs a mask, whose size is that of the keys: those of a cache that has
    # grown do not fit it. Without padding the keys that are too many happen to be masked.
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    report = engine.step(
        model,
        optimizer,
        None,
        [ids],
        lambda m, ids: m(input_ids=ids, labels=ids, attention_mask=mask).loss,
    )
    return model, (report.loss, report.grad_norm)


def test_recomputed_layers_do_not_grow_the_cache_of_a_decoder(caplog):
    wanted = _recomputed(decoder(tied=False), "none")[1]
    for mode, lines in (("none", 0), ("full", 1), ("selective", 1)):
        caplog.clear()
        model, numbers = _recomputed(decoder(tied=False), mode)
        assert numbers == pytest.approx(wanted, rel=1e-6)
        assert unwrap(model).config.use_cache is (mode == "none")
        said = [r.getMessage() for r in caplog.records if "use_cache" in r.getMessage()]
        assert len(said) == lines
        assert all("LlamaForCausalLM" in text for text in said)
