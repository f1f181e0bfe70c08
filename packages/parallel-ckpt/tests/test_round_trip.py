"""Whatever `save` accepts comes back through every reader with the same bits (decision 0012).

What is saved is drawn: every dtype of torch, odd shapes, views and names, and every optimizer and
scheduler that torch has. A failure names the seed that draws it again.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    load_weights,
    read_start,
    restore,
    save_weights,
)
from parallel_ckpt.convert import convert
from parallel_ckpt.formats.dtypes import SAFETENSORS_BY_TORCH, TORCH_ITEM_BYTES
from parallel_ckpt.inspect import inspect
from parallel_ckpt.load.sources import same_bits
from parallel_ckpt.verify import verify
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = sorted(
    {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
)
KEPT = [name for name in DTYPES if name in TORCH_ITEM_BYTES]
SHAPES: list[tuple[int, ...]] = [
    (),
    (1,),
    (7,),
    (0,),
    (3, 0, 2),
    (2, 3, 4),
    (0, 2**40),
    (1,) * 38 + (2, 3),
    (1,) * 64,
    (5, 1, 2),
]
NAMES = [
    "weight",
    "module",
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "ü",
    "重み",
    "\U0001f916",
    "e\u0301",
    "a b",
    "a/b",
    "a\\b",
    "..",
    "\x1b[31m",
    "\n",
    "\x00",
    "state",
    "optimizer",
    "model",
    "params",
    "n" * 2000,
    "$tuple",
    "__metadata__ ",
    "'\"",
    "%s",
    "{}",
    "0",
    "-1",
    "None",
    "class",
    "con",
    "\u202e",
]
NAMES = [name.replace(".", "_dot") for name in NAMES]


def plain(draw: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits; of booleans only 0 and 1, as torch has no others."""
    memory = torch.empty(shape, dtype=dtype)
    top = 1 if dtype is torch.bool else 255
    values = [draw.randint(0, top) for _ in range(memory.numel() * memory.element_size())]
    memory.reshape(-1).view(torch.uint8).copy_(torch.tensor(values, dtype=torch.uint8))
    return memory


class OnlyMethods(torch.Tensor):
    """A subclass that adds nothing to the values."""


def whole(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor


def expanded(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.ndim and tensor.numel() else tensor


def strided(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor[::2] if tensor.ndim else tensor


def transposed(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor.transpose(0, -1) if tensor.ndim else tensor


def tail(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor[1:] if tensor.ndim else tensor


def conjugated(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor.conj() if tensor.dtype in (torch.complex64, torch.complex128) else tensor


def negated(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    is_complex = tensor.dtype in (torch.complex64, torch.complex128)
    return tensor.conj().imag if is_complex else tensor


def subclassed(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return tensor.as_subclass(OnlyMethods)


VIEWS = [whole, expanded, strided, transposed, tail, conjugated, negated, subclassed]


class Drawn(nn.Module):
    """Tensors as parameters or persistent buffers, some below further modules."""

    def __init__(self, draw: random.Random, dtypes: list[str], size: int) -> None:
        super().__init__()
        modules: list[nn.Module] = [self]
        for _ in range(2):
            below = nn.Module()
            draw.choice(modules).add_module(f"{draw.choice(NAMES)}+", below)
            modules.append(below)
        for _ in range(size):
            owner, name = draw.choice(modules), draw.choice(NAMES)
            if name in owner._buffers or name in owner._parameters:
                continue
            dtype = getattr(torch, draw.choice(dtypes))
            tensor = draw.choice(VIEWS)(plain(draw, dtype, draw.choice(SHAPES)), draw)
            if draw.random() < 0.5:
                owner._buffers[name] = tensor
            else:
                owner._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all values, by name; of no code of the package."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg() for n, t in named}


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in bits(model).items()}


def assert_bits(model: nn.Module, expected: dict[str, torch.Tensor], where: str) -> None:
    found = bits(model)
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (where, name)
        assert found[name].shape == tensor.shape, (where, name)
        assert same_bits(found[name], tensor), (where, name)


def zero(model: nn.Module) -> None:
    """Forget the values, by the memory below whatever views there are."""
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        torch.empty(0, dtype=torch.uint8).set_(local.untyped_storage()).zero_()


def round_trip(seed: int, form: CheckpointFormat, root: Path) -> None:
    draw = random.Random(seed)
    dtypes = (
        KEPT if form is CheckpointFormat.DCP else [n for n in KEPT if n in SAFETENSORS_BY_TORCH]
    )
    model = Drawn(draw, dtypes, size=12)
    expected = copies(model)
    config = CheckpointConfig(
        async_save=draw.random() < 0.3, max_shard_size=draw.choice(["50B", "5GB"])
    )
    with CheckpointSaver(
        root / "run", topology=Topology(), checkpoint_format=form, config=config
    ) as saver:
        path = saver.save(step=1, samples_seen=1, model=model)
    assert_bits(model, expected, "the save changed the model")

    def blank() -> nn.Module:
        return Drawn(random.Random(seed), dtypes, size=12)

    assert verify(path).ok
    assert not inspect(path).problems
    counted = sum(count for count, _ in inspect(path).tensors_by_dtype.values())
    assert counted == len(expected)
    for name, load in {"restore": restore, "load_weights": _load}.items():
        loaded = blank()
        zero(loaded)
        load(path, loaded)
        assert_bits(loaded, expected, name)
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in expected.values()}
    if names <= SAFETENSORS_BY_TORCH.keys():
        convert(path, root / "out")
        loaded = blank()
        zero(loaded)
        load_weights(loaded, root / "out")
        assert_bits(loaded, expected, "convert")
    else:
        with pytest.raises(CheckpointError, match="which safetensors files cannot hold"):
            convert(path, root / "out")


def _load(path: Path, model: nn.Module) -> None:
    load_weights(model, path)


@pytest.mark.parametrize("form", CheckpointFormat)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_saved_comes_back(seed: int, form: CheckpointFormat, tmp_path: Path) -> None:
    round_trip(seed, form, tmp_path)


def saved(
    run: Path, form: CheckpointFormat = CheckpointFormat.SAFETENSORS, **state: Any
) -> tuple[Path | None, str]:
    """The checkpoint, or why there is none."""
    with CheckpointSaver(run, topology=Topology(), checkpoint_format=form) as saver:
        try:
            return saver.save(step=2, samples_seen=2, **state), ""
        except CheckpointError as error:
            return None, str(error)


@pytest.mark.parametrize("form", CheckpointFormat)
def test_every_dtype_is_kept_or_refused_by_name(form: CheckpointFormat, tmp_path: Path) -> None:
    outcomes = Counter[str]()
    for name in DTYPES:
        model = nn.Module()
        try:
            memory = torch.empty(3, dtype=getattr(torch, name))
        except (RuntimeError, NotImplementedError):
            outcomes["torch itself cannot make it"] += 1
            continue
        model.register_buffer("a", memory)
        path, refusal = saved(tmp_path / name, form, model=model)
        if path is None:
            assert f"a has dtype {name}" in refusal or f"a has dtype torch.{name}" in refusal
        else:
            restore(path, model)
        outcomes["kept" if path else "refused"] += 1
    kept = KEPT if form is CheckpointFormat.DCP else [n for n in KEPT if n in SAFETENSORS_BY_TORCH]
    assert outcomes["kept"] == len(kept), outcomes


def on_two_ranks(root: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for seed, form in enumerate(CheckpointFormat):
        dtypes = [n for n in KEPT if n in SAFETENSORS_BY_TORCH]

        def build(seed: int = seed, dtypes: list[str] = dtypes) -> nn.Module:
            model = Drawn(random.Random(seed), dtypes, size=8)
            model.sharded = nn.Linear(5, 3).requires_grad_(False)
            fully_shard(model.sharded, mesh=mesh)
            return model

        torch.manual_seed(seed)
        model = build()
        expected = copies(model)
        with CheckpointSaver(
            root / form, topology=Topology(dp_shard=2), checkpoint_format=form
        ) as saver:
            path = saver.save(step=1, samples_seen=1, model=model)
        for load in (restore, _load):
            loaded = build()
            zero(loaded)
            load(path, loaded)
            found = bits(loaded)
            for name, tensor in expected.items():
                local = [t.to_local() if "sharded" in name else t for t in (found[name], tensor)]
                assert same_bits(*local), name


def test_whatever_two_ranks_save_comes_back(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    for form in CheckpointFormat:
        assert verify(tmp_path / form).ok
        convert(tmp_path / form, tmp_path / f"{form}-out")


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    sparse = name == "SparseAdam"
    model: nn.Module = nn.Embedding(5, 3, sparse=True) if sparse else nn.Linear(3, 2)
    parameters = [p for p in model.parameters() if p.ndim == 2] if name == "Muon" else None
    optimizer = getattr(torch.optim, name)(parameters or model.parameters(), lr=0.1)

    def step() -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            given = torch.tensor([1, 3]) if sparse else torch.ones(2, 3)
            total = model(given).square().sum()
            total.backward()
            return total

        optimizer.step(loss)

    return model, optimizer, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_or_is_refused(name: str, tmp_path: Path) -> None:
    model, optimizer, step = trained(name)
    step()
    step()
    path, refusal = saved(tmp_path, model=model, optimizer=optimizer)
    if path is None:
        assert name == "LBFGS", refusal
        return
    assert verify(path).ok
    assert not inspect(path).problems
    step()
    again, other, step_again = trained(name)
    restore(path, again, other)
    step_again()
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert same_bits(one.detach(), two.detach())


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    halves = [
        lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return {
        "LambdaLR": lambda: lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k),
        "MultiplicativeLR": lambda: lr_scheduler.MultiplicativeLR(optimizer, lambda k: 0.9),
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2),
        "MultiStepLR": lambda: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        "ConstantLR": lambda: lr_scheduler.ConstantLR(optimizer),
        "LinearLR": lambda: lr_scheduler.LinearLR(optimizer),
        "ExponentialLR": lambda: lr_scheduler.ExponentialLR(optimizer, 0.9),
        "PolynomialLR": lambda: lr_scheduler.PolynomialLR(optimizer),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        "CosineAnnealingWarmRestarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(
            optimizer, 3
        ),
        "CyclicLR": lambda: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        "OneCycleLR": lambda: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        "SequentialLR": lambda: lr_scheduler.SequentialLR(optimizer, halves, [2]),
        "ChainedScheduler": lambda: lr_scheduler.ChainedScheduler(halves),
    }


def scheduled(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, Callable[[], float]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedulers(optimizer)[name]()

    def step() -> float:
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    return model, optimizer, scheduler, step


NOT_SCHEDULERS = {"LRScheduler", "_LRScheduler"}


def test_the_schedulers_below_are_all_that_torch_has() -> None:
    of_torch = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    _, optimizer, _, _ = scheduled("StepLR")
    assert of_torch - NOT_SCHEDULERS == schedulers(optimizer).keys()


@pytest.mark.parametrize("name", sorted(schedulers(torch.optim.SGD([torch.zeros(1)], lr=0.1))))
def test_every_scheduler_of_torch_goes_on_or_is_refused(name: str, tmp_path: Path) -> None:
    model, optimizer, scheduler, step = scheduled(name)
    step()
    step()
    path, refusal = saved(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    if path is None:
        assert name in ("OneCycleLR", "CyclicLR"), refusal
        assert "only plain values are kept" in refusal
        return
    rates = [step() for _ in range(5)]
    again, other, schedule, step_again = scheduled(name)
    start = read_start(path, topology=Topology())
    restore(start.path, again, other, schedule)
    assert [step_again() for _ in range(5)] == rates


def test_weights_alone_come_back(tmp_path: Path) -> None:
    dtypes = [n for n in KEPT if n in SAFETENSORS_BY_TORCH]
    model = Drawn(random.Random(5), dtypes, size=20)
    expected = copies(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_weights(model, tmp_path)
    zero(model)
    load_weights(model, tmp_path)
    assert_bits(model, expected, "save_weights")
