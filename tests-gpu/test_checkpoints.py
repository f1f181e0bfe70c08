"""Saved and resumed on every kind: to the last bit on the same ranks, on the curve on others."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_ckpt import CheckpointSaver, StateMismatch, load_weights, read_start, restore
from parallel_config import AcceleratorConfig, CheckpointFormat, ParallelismConfig
from parallel_engine import Engine, unwrap
from parallel_publish import PreTrainedModel
from parallel_testing.ranks import run_ranks

BEFORE, AFTER, GLOBAL_BATCH, WIDTH = 3, 5, 16, 12
FORMATS = tuple(CheckpointFormat)
KINDS = ("single", "ddp", "fsdp", "hsdp")


class Block(nn.Module):
    """A wrap unit whose rows do not divide evenly, with noise of its own on each rank."""

    def __init__(self, dropout):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Model(PreTrainedModel):
    """Frozen, unused and 0-dim parameters and a counter among the ordinary ones."""

    _fsdp_wrap_modules = ("Block",)

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.unused = nn.Linear(3, 5).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Run:
    """One rank of a training run."""

    def __init__(self, device, degrees, *, seed, dropout, dtype, precision="no"):
        torch.manual_seed(seed)
        model = Model(dropout).to(dtype)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
            {"params": []},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.1 * k))
        self.engine = Engine(
            parallelism=ParallelismConfig(**degrees),
            accelerator=AcceleratorConfig(deterministic=True, mixed_precision=precision),
            device=device,
        )
        self.dtype = torch.float32 if precision != "no" else dtype
        self.model, self.optimizer, self.schedule, _ = self.engine.prepare(
            model, optimizer, schedule, None
        )
        sharded = sum(isinstance(p, DTensor) for p in self.model.parameters())
        assert (sharded > 0) == self.engine.topology.is_sharded
        torch.manual_seed(1000 + self.engine.rank)

    def step(self, number):
        """One update on this rank's slice of a global batch; loss and norm over all ranks."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(GLOBAL_BATCH, WIDTH + 5, generator=generator, dtype=self.dtype)
        mine = batch.chunk(self.engine.topology.dp_world_size)[self.engine.rank]
        mine = mine.to(self.engine.device)
        report = self.engine.step(
            self.model, self.optimizer, self.schedule, [mine], loss_fn, clip_norm=0.5
        )
        return report.loss, report.grad_norm, report.lr

    def steps(self, start, count):
        return [self.step(number) for number in range(start, start + count)]

    def digest(self):
        """Collective: every rank. Of all weights, moments and groups, gathered without ours."""
        found = hashlib.sha256()
        model = unwrap(self.model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found.update(f"{name} {whole(tensor).tolist()}".encode())
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        for name, parameter in model.named_parameters():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                found.update(f"{name} {key} {whole(value).tolist()}".encode())
        for group in optimizer.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            found.update(repr(sorted(plain.items())).encode())
        return found.hexdigest()


def loss_fn(model, batch):
    return (model(batch[:, :WIDTH]) - batch[:, WIDTH:]).square().mean()


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu()


def save_and_go_on(device, degrees, root, forms, options):
    """Save after BEFORE updates, go on; (kind, what followed, digest at the end)."""
    run = Run(device, degrees, seed=0, **options)
    run.steps(0, BEFORE)
    for form in forms:
        saver = CheckpointSaver(
            root / form, topology=run.engine.topology, checkpoint_format=CheckpointFormat(form)
        )
        with saver:
            saver.save(
                step=BEFORE,
                samples_seen=BEFORE * GLOBAL_BATCH,
                model=run.model,
                optimizer=run.optimizer,
                scheduler=run.schedule,
                data_state={"next": BEFORE},
            )
    rows = run.steps(BEFORE, AFTER)
    return run.engine.topology.kind.value, rows, run.digest()


def resume(device, degrees, root, options):
    """Take the run up from its checkpoint, from other weights and another seed."""
    run = Run(device, degrees, seed=99, **options)
    start = read_start(root, topology=run.engine.topology)
    restored = restore(start.path, run.model, run.optimizer, run.schedule)
    start.restore_rng()
    assert restored.num_optimizer_entries == 3 * len(trained(run.model))
    assert start.samples_seen == BEFORE * GLOBAL_BATCH
    rows = run.steps(start.data_state["next"], AFTER)
    return run.engine.topology.kind.value, rows, run.digest()


def trained(model):
    return [p for p in unwrap(model).parameters() if p.requires_grad]


def run(fn, world_size, device, *args):
    """On ranks with a watchdog."""
    return run_ranks(fn, world_size, device, *args, init=False, device=device, timeout_s=120)


def require(kind, layouts, world_size):
    if kind == "single":
        return 1, {}
    if kind not in layouts:
        pytest.skip(f"{kind} cannot be shown on {world_size} rank(s)")
    return world_size, layouts[kind]


NOISY = {"dropout": 0.2, "dtype": torch.float32}
EXACT = {"dropout": 0.0, "dtype": torch.float64}


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_to_the_last_bit(kind, device, layouts, world_size, tmp_path):
    """With each rank's noise, in every format: loss, norm, rate, and all state after AFTER more."""
    ranks, degrees = require(kind, layouts, world_size)
    wanted = run(save_and_go_on, ranks, device, degrees, tmp_path, FORMATS, NOISY)
    assert {found[0] for found in wanted} == {kind}
    forms = FORMATS if kind == "fsdp" or ranks == world_size == 1 else FORMATS[:1]
    for form in forms:
        found = run(resume, ranks, device, degrees, tmp_path / form, NOISY)
        assert found == wanted, form


NARROW = {"dropout": 0.2, "dtype": torch.bfloat16, "precision": "bf16"}


@pytest.mark.parametrize("kind", ["single", "fsdp"])
def test_what_is_kept_for_a_resume_is_the_fp32_masters(kind, device, layouts, world_size, tmp_path):
    """The model was loaded in bf16 and computes in it; files hold what the optimizer works on."""
    ranks, degrees = require(kind, layouts, world_size)
    wanted = run(save_and_go_on, ranks, device, degrees, tmp_path, FORMATS, NARROW)
    for form in FORMATS:
        checkpoint = tmp_path / form / "checkpoints/last"
        assert load_weights(Model(), checkpoint) == len(Model().state_dict())
        with pytest.raises(StateMismatch, match=r"lose precision of the stored torch\.float32"):
            load_weights(Model().bfloat16(), checkpoint)
    assert run(resume, ranks, device, degrees, tmp_path / FORMATS[0], NARROW) == wanted


@pytest.fixture(scope="module")
def saved(device, layouts, world_size, tmp_path_factory):
    """A checkpoint of each kind that these ranks can show, and the curves that followed."""
    root, curves = tmp_path_factory.mktemp("saved"), {}
    for kind in ("single", *layouts):
        ranks, degrees = require(kind, layouts, world_size)
        form = FORMATS[len(curves) % len(FORMATS)]
        found = run(save_and_go_on, ranks, device, degrees, root / kind, (form,), EXACT)
        curves[kind] = found[0][1]
        (root / kind / form).rename(root / kind / "run")
    return root, curves


CHANGES = [
    ("fsdp", "single", 1, {}),
    ("single", "fsdp", None, {"dp_shard": -1}),
    ("fsdp", "fsdp", 2, {"dp_shard": 2}),
    ("fsdp", "hsdp", 4, {"dp_replicate": 2, "dp_shard": 2}),
    ("hsdp", "fsdp", 4, {"dp_shard": 4}),
    ("ddp", "fsdp", 2, {"dp_shard": 2}),
    ("hsdp", "ddp", 2, {"dp_replicate": 2}),
]


@pytest.mark.parametrize(("before", "after", "ranks", "degrees"), CHANGES)
def test_resume_on_a_changed_topology(
    before, after, ranks, degrees, device, layouts, world_size, saved
):
    """One global batch: the curve of the uninterrupted run goes on."""
    root, curves = saved
    ranks = ranks or world_size
    if ranks > world_size or before not in curves or (after != "single" and ranks < 2):
        pytest.skip(f"{before} to {after} on {ranks} cannot be shown on {world_size} rank(s)")
    for kind, rows, _ in run(resume, ranks, device, degrees, root / before / "run", EXACT):
        assert kind == after
        for found, wanted in zip(rows, curves[before], strict=True):
            assert found == pytest.approx(wanted, rel=1e-9)


def save_pretrained(device, degrees, folder):
    """Every rank calls it, twice, amid training; the weights as they are at the second call."""
    run = Run(device, degrees, seed=5, dropout=0.0, dtype=torch.float32)
    run.steps(0, 1)
    unwrap(run.model).save_pretrained(folder)
    rows = run.steps(1, 1)
    unwrap(run.model).save_pretrained(folder, max_shard_size="2KB")
    weights = {name: whole(tensor).clone() for name, tensor in unwrap(run.model).named_parameters()}
    rows += run.steps(2, 1)  # and the run goes on
    return run.engine.topology.kind.value, rows, weights


@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_on_all_ranks(kind, device, layouts, world_size, tmp_path):
    ranks, degrees = require(kind, layouts, world_size)
    folder = tmp_path / "model"
    results = run(save_pretrained, ranks, device, degrees, folder)
    assert {(found[0], str(found[1])) for found in results} == {(kind, str(results[0][1]))}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        *index["weight_map"].values(),
    }
    stored = {}
    for name in set(index["weight_map"].values()):
        stored |= load_file(folder / name)
    assert torch.equal(stored.pop("count"), torch.tensor(7))
    model = Model.from_pretrained(folder)
    for name, wanted in results[0][2].items():
        assert torch.equal(stored.pop(name), wanted)
        assert torch.equal(model.get_parameter(name), wanted)
    assert not stored
