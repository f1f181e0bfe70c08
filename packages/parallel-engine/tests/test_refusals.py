"""What cannot train is refused before it starts, with the name and the way out."""

import ast
import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import parallel_config
import parallel_engine
from parallel_config import (
    AcceleratorConfig,
    CompileConfig,
    ConfigError,
    DDPConfig,
    EMAConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    ParallelismConfig,
    Topology,
)
from parallel_config.options import option as config_option
from parallel_engine import Engine, preflight
from parallel_engine.options import option
from parallel_testing.ranks import rank_outcomes, run_ranks

CPU = torch.device("cpu")
SHARDED = Topology(dp_shard=2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def refusal(model, optimizer=None, topology=SHARDED, **config):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError) as caught:
        preflight.check(model, optimizer, AcceleratorConfig(**config), topology, CPU)
    return str(caught.value)


def test_fp16_on_shards_and_on_cpu():
    assert (
        refusal(Net(), mixed_precision="fp16")
        == "accelerator.mixed_precision = fp16 with parallelism.dp_shard > 1: the loss scaler does "
        "not work on shards. Use --accelerator.mixed_precision bf16 "
        "(AcceleratorConfig.mixed_precision)."
    )
    text = refusal(Net(), topology=Topology(), mixed_precision="fp16")
    assert "= fp16 on CPU" in text


def test_a_parameter_that_is_not_the_models():
    model = Net()
    groups = [{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(3, 7))]}]
    text = refusal(model, torch.optim.AdamW(groups))
    assert text.startswith("optimizer.param_groups[1] holds a parameter of shape [3, 7] that does")


def test_a_trainable_parameter_that_nobody_optimizes():
    model = Net()
    text = refusal(model, torch.optim.AdamW(model.blocks.parameters()))
    assert "does not hold 2 trainable parameters: head.weight, head.bias." in text


def test_state_from_the_constructor_would_stay_with_the_whole_parameters():
    model = Net()
    text = refusal(model, torch.optim.Adagrad(model.parameters()))
    assert text.startswith("optimizer (Adagrad) has state for 6 parameters before the first step")
    assert "lambda model: Adagrad(model.parameters(), ...)" in text
    preflight.check(
        model,
        torch.optim.Adagrad(model.parameters()),
        AcceleratorConfig(),
        Topology(dp_replicate=2),
        CPU,
    )


def tied(one, other):
    model = Net()
    model.get_submodule(other).weight = model.get_submodule(one).weight
    return model


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (
            "blocks.0.linear",
            "blocks.1.linear",
            "blocks.0.linear.weight in blocks.0, blocks.1.linear.weight in blocks.1",
        ),
        ("head", "blocks.1.linear", "blocks.1.linear.weight in blocks.1, head.weight in the root"),
    ],
)
def test_a_parameter_tied_across_units(one, other, shown):
    text = refusal(tied(one, other))
    assert f"model ties one parameter across wrap units ({shown})" in text
    assert "--accelerator.fsdp.ignored_modules" in text


class Views(Net):
    """Two parameters cut from one tensor."""

    def __init__(self):
        super().__init__()
        both = torch.zeros(8, 4)
        self.whole, self.upper = nn.Parameter(both), nn.Parameter(both[:4])


def test_parameters_that_share_memory():
    text = refusal(Views())
    assert text.startswith("model.upper lies at the same address as whole: sharding would make two")
    model = Views()
    model.upper = nn.Parameter(model.upper.detach().clone())
    preflight.check(model, torch.optim.SGD(model.parameters()), AcceleratorConfig(), SHARDED, CPU)


def test_a_misspelt_module_to_ignore():
    text = refusal(Net(), fsdp=FSDPConfig(ignored_modules=("hed",)))
    assert text == (
        "accelerator.fsdp.ignored_modules = ['hed'], but 'hed' is not a module of the model. "
        "Did you mean 'head'?"
    )


def test_every_problem_is_told_at_once():
    fsdp = FSDPConfig(wrap_modules=("Blok",), ignored_modules=("hed",))
    text = refusal(
        Net(), torch.optim.Adagrad(Net().parameters()), mixed_precision="fp16", fsdp=fsdp
    )
    for field in (
        "optimizer.param_groups[0]",
        "optimizer does not hold",
        "accelerator.mixed_precision",
        "accelerator.fsdp.ignored_modules",
        "accelerator.fsdp.wrap_modules",
    ):
        assert field in text
    assert "Did you mean 'Block'?" in text
    assert "Did you mean 'head'?" in text


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def start(model, degrees=None, *, late=False, **config):
    engine = Engine(
        parallelism=ParallelismConfig(**({"dp_shard": -1} if degrees is None else degrees)),
        accelerator=AcceleratorConfig(**config),
        device="cpu",
    )
    model, optimizer, _, _ = engine.prepare(model, sgd if late else sgd(model), None, None)
    return engine, model, optimizer


def trains_what_was_tied():
    """The remedies that the refusal names; returns the losses by remedy."""
    found = {}
    for name, fsdp in [
        ("whole", FSDPConfig(ignored_modules=("blocks.0.linear",))),
        ("together", FSDPConfig(wrap_modules=("Pair",))),
    ]:
        torch.manual_seed(0)
        model = tied("blocks.0.linear", "blocks.1.linear")
        if name == "together":
            model = nn.Sequential(Pair(), model.head)
        engine, model, optimizer = start(model, fsdp=fsdp)
        x = torch.ones(2, 4) * (1 + engine.rank)
        found[name] = [
            engine.step(model, optimizer, None, [x], lambda m, b: m(b).square().mean()).loss
            for _ in range(3)
        ]
    return found


class Pair(nn.Module):
    """Both blocks, as one unit."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.linear.weight = self.first.linear.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_the_remedies_for_a_tie_work():
    for found in run_ranks(trains_what_was_tied, 2, init=False):
        for losses in found.values():
            assert losses[2] < losses[1] < losses[0]


OTHER = [
    ({"mixed_precision": "bf16"}, "accelerator.mixed_precision = 'no'", "'bf16'"),
    (
        {"gradient_accumulation": GradientAccumulationConfig(steps=2)},
        "accelerator.gradient_accumulation.steps = 1",
        "steps = 2",
    ),
    ({"degrees": {"dp_replicate": 2}}, "topology.dp_replicate = 1", "dp_replicate = 2"),
]


def other_configs():
    """Rank 1 starts with something else, one thing after another."""
    found = []
    for options, _, _ in OTHER:
        mine = options if os.environ["RANK"] == "1" else {}
        with pytest.raises(ConfigError) as caught:
            start(Net(), **mine)
        found.append(str(caught.value))
    return found


def test_ranks_with_other_configs_are_told_the_first_difference():
    for found in run_ranks(other_configs, 2, init=False):
        for text, (_, first, other) in zip(found, OTHER, strict=True):
            assert text.startswith(
                f"config differs between ranks: where rank 0 has {first}, rank 1"
            )
            assert other in text


def other_models(degrees):
    """Rank 1 builds another head, then the same one frozen, then without memory."""
    found = []
    for change in (
        lambda model: setattr(model, "head", nn.Linear(4, 5)),
        lambda model: model.head.requires_grad_(False),
        lambda model: model.head.to("meta"),
    )[: 3 if degrees else 2]:  # DDP gives what is on meta the values of rank 0
        model = Net()
        if os.environ["RANK"] == "1":
            change(model)
        with pytest.raises(ConfigError) as caught:
            start(model, degrees, late=True)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("degrees", [{}, {"dp_shard": -1}], ids=["ddp", "fsdp"])
def test_ranks_that_built_other_models_are_told_the_first_difference(degrees):
    for found in run_ranks(other_models, 2, degrees, init=False):
        assert len(found) == (3 if degrees else 2)
        for text, other in zip(
            found,
            ("[5, 4] float32", "[4, 4] float32, fixed", "[4, 4] float32, on meta"),
            strict=False,
        ):
            assert text.startswith(
                "model differs between ranks: where rank 0 has head.weight [4, 4] float32, "
                f"rank 1 has head.weight {other}."
            )


class Skipping(Net):
    """Leaves its head out for batches below zero."""

    def forward(self, x):
        hidden = self.blocks[0](x)
        return hidden if x.sum() < 0 else self.head(self.blocks[1](hidden))


def a_branch_on_rank_1(allowed):
    """In the second step only, so that the first one tells nothing."""
    torch.manual_seed(0)
    ddp = DDPConfig(find_unused_parameters=allowed)
    engine, model, optimizer = start(Skipping(), {"dp_replicate": -1}, ddp=ddp)
    x = torch.ones(2, 4)
    for batch in (x, -x if engine.rank else x, x):
        loss = engine.step(model, optimizer, None, [batch], lambda m, b: m(b).square().mean()).loss
    return loss


def test_a_branch_that_one_rank_takes_ends_on_both_or_works():
    outcomes = rank_outcomes(a_branch_on_rank_1, 2, False, init=False)
    assert [o.error_type for o in outcomes] == ["PeerError", "UnusedParametersError"]
    for outcome in outcomes:
        assert "4 trainable parameters did not take part in the loss" in outcome.error
        assert ": blocks.1.linear.weight, " in outcome.error
        assert "--accelerator.ddp.find_unused_parameters" in outcome.error
    losses = run_ranks(a_branch_on_rank_1, 2, True, init=False)
    assert losses[0] == losses[1]


def test_dtypes_that_a_wrap_unit_cannot_hold_together():
    model = Net()
    model.blocks[1].linear.bias.data = model.blocks[1].linear.bias.data.bfloat16()
    assert refusal(model) == (
        "model.blocks.1 holds trainable parameters of 2 dtypes in one wrap unit: "
        "blocks.1.linear.weight is float32, blocks.1.linear.bias is bfloat16. Give them one dtype "
        "(model.float()) and compute in another one with --accelerator.mixed_precision "
        "(AcceleratorConfig.mixed_precision); or make the other module a wrap unit with "
        "--accelerator.fsdp.wrap_modules (FSDPConfig.wrap_modules) or leave it whole with "
        "--accelerator.fsdp.ignored_modules (FSDPConfig.ignored_modules)."
    )
    root = Net()
    root.head.double()
    root.register_parameter("code", nn.Parameter(torch.ones(4)))
    assert "model holds trainable parameters of 2 dtypes in one wrap unit (the root)" in refusal(
        root
    )


def test_dtypes_that_train_side_by_side_are_no_problem():
    """Each unit has one; or the odd one is frozen, whole, or widened; or nothing is sharded."""
    odd = Net()
    odd.blocks[1].linear.bias.data = odd.blocks[1].linear.bias.data.bfloat16()

    def check(model, topology=SHARDED, **config):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        preflight.check(model, optimizer, AcceleratorConfig(**config), topology, CPU)

    check(odd, Topology())
    check(odd, mixed_precision="bf16")
    check(odd, fsdp=FSDPConfig(ignored_modules=("blocks.1",)))
    odd.blocks[1].linear.bias.requires_grad_(False)
    check(odd)
    apart = Net()
    apart.blocks[1].bfloat16()
    check(apart)


def test_a_backend_that_torch_does_not_have():
    for topology in (SHARDED, Topology()):
        text = refusal(
            Net(), topology=topology, compile=CompileConfig(enable=True, backend="inducter")
        )
        assert text.startswith(
            "accelerator.compile.backend = 'inducter' is not a backend of torch.compile here; it "
            "has: "
        )
        assert "aot_eager" in text
        assert "inductor" in text
    preflight.check(
        Net(), None, AcceleratorConfig(compile=CompileConfig(enable=True, backend="eager")),
        SHARDED, CPU,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_of_sharded_weights(mode):
    compiled = CompileConfig(enable=True, mode=mode)
    assert refusal(Net(), compile=compiled) == (
        f"accelerator.compile.mode = {mode} with parallelism.dp_shard > 1: it replays CUDA graphs, "
        "which read weights at fixed addresses, and a unit's weights are gathered to new ones each "
        "time. Use --accelerator.compile.mode default (CompileConfig.mode)."
    )
    for config, topology in [
        (compiled, Topology(dp_replicate=2)),
        (CompileConfig(mode=mode), SHARDED),
        (CompileConfig(enable=True, mode=mode, backend="eager"), SHARDED),
    ]:
        preflight.check(Net(), None, AcceleratorConfig(compile=config), topology, CPU)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("fsdp.wrap_modules", "", "--accelerator.fsdp.wrap_modules (FSDPConfig.wrap_modules)"),
        ("compile.mode", "default", "--accelerator.compile.mode default (CompileConfig.mode)"),
        ("tf32", "", "--accelerator.tf32 (AcceleratorConfig.tf32)"),
    ],
)
def test_a_setting_is_named_by_its_flag_and_its_field(path, value, said):
    assert option(path, value) == said


PACKAGES = [
    *Path(parallel_engine.__file__).parent.glob("*.py"),
    *(Path(parallel_config.__file__).parent / f"{n}.py" for n in ("accelerator", "parallelism")),
]


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.stem)
def test_no_message_spells_a_flag_itself(path):
    """A program of its own does not have flags: `option` names the field beside the flag."""
    strings = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    spelled = [s.value for s in strings if isinstance(s.value, str) and "--" in s.value]
    # Flags of launchers, which do not have a field.
    assert [s for s in spelled if not re.search("--(nproc_per_node|gpus-per|standalone)", s)] == []


def settings(config, path):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", f"{type(config).__name__}.{field.name}"


@pytest.mark.parametrize(
    ("config", "section"),
    [
        (AcceleratorConfig(), "accelerator"),
        (ParallelismConfig(), "parallelism"),
        (EMAConfig(), "ema"),
    ],
)
def test_every_setting_is_named_by_the_class_that_holds_it(config, section):
    for path, field in settings(config, section):
        if "context_parallel" not in path:  # reserved: no message asks for it
            assert config_option(path) == f"--{path} ({field})"
