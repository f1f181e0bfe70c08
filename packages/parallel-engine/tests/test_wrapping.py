"""Wrap units are decided without ranks and without memory."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    ConfigError,
    FSDPConfig,
    ParallelismConfig,
    clean_fqn,
)
from parallel_engine import Engine
from parallel_engine.wrapping import forward_methods, resolve_wrap_policy, wrap_units
from parallel_testing.models import TinyModel
from parallel_testing.ranks import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Plain(nn.Module):
    """Declares nothing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)


class Declares(Plain):
    _fsdp_wrap_modules = ("Block",)
    _fsdp_forward_methods = ("predict",)

    def predict(self):
        return None


def units(model, **config):
    return list(wrap_units(model, resolve_wrap_policy(model, FSDPConfig(**config))))


def test_the_models_declaration_is_used_on_a_meta_model():
    with torch.device("meta"):
        model = Declares()
    assert units(model) == ["blocks.0", "blocks.1"]


def test_the_users_classes_come_before_the_models():
    assert units(Declares(), wrap_modules=("Linear",)) == [
        "blocks.0.linear",
        "blocks.1.linear",
        "head",
    ]


def test_a_unit_by_size_has_at_least_that_many_parameters_of_its_own():
    assert units(Plain(), min_num_params=72) == ["blocks.0.linear", "blocks.1.linear"]
    pairs = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
    assert units(pairs, min_num_params=100) == ["0"]
    assert units(pairs, min_num_params=1) == ["0.0", "0.1", "1"]


def test_classes_without_parameters_are_no_units():
    with pytest.raises(ConfigError, match="modules of these classes do not hold parameters"):
        units(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), wrap_modules=("ReLU",))


class Tower(nn.Module):
    """Of blocks that bear the name of other blocks, and one of a class derived from them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return x + self.linear(x)

    class Special(Block):
        pass

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Block(), self.Special(), self.Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nn.Module):
    _fsdp_wrap_modules = ("Block",)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return x - self.linear(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.action = Tower()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.action(x).mean()


def sharded_units(config):
    """Names of the units of a real run, and how many modules of it hook an all-gather."""
    engine = Engine(parallelism=ParallelismConfig(dp_shard=2), accelerator=config, device="cpu")
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    engine.step(model, optimizer, None, [torch.ones(2, 4)], lambda m, x: m(x))
    found = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    return [clean_fqn(name) for name in found]


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("by_size", [False, True])
def test_the_units_of_a_run_are_the_declared_ones_and_no_others(mode, by_size):
    """Not the first class of a name, not its subclasses; not twice with checkpointing."""
    config = AcceleratorConfig(
        fsdp=FSDPConfig(min_num_params=1 if by_size else None),
        activation_checkpointing=ActivationCheckpointingConfig(mode=mode),
    )
    wanted = ["blocks.0", "blocks.1", "action.layers.0", "action.layers.2"]
    if by_size:
        wanted = [f"{n}.linear" for n in (*wanted[:3], "action.layers.1", wanted[3])]
    for found in run_ranks(sharded_units, 2, config, init=False):
        assert found == ["", *wanted]


def test_a_model_without_named_units_is_refused():
    with pytest.raises(
        ConfigError, match=r"does not save memory(.|\n)*--accelerator.fsdp.wrap_modules"
    ):
        units(Plain())


def test_a_misspelt_class_lists_what_exists():
    with pytest.raises(
        ConfigError, match=r"does not contain a module of class 'Blok'(.|\n)*Block, Linear"
    ):
        units(Plain(), wrap_modules=("Blok",))


def test_a_size_that_nothing_reaches_names_the_largest():
    with pytest.raises(ConfigError, match="min_num_params 72 or less"):
        units(Plain(), min_num_params=10_000)


def test_declared_methods_must_exist():
    assert forward_methods(Declares()) == ("predict",)
    model = Declares()
    model._fsdp_forward_methods = ("predct",)
    with pytest.raises(ConfigError, match="'predct' is not a method of the model"):
        forward_methods(model)


def logged_units():
    """What this rank logs about the units of a sharded model. A warning on the way is an error."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("parallel_engine").addHandler(handler)
    logging.getLogger("parallel_engine").setLevel(logging.INFO)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(parallelism=ParallelismConfig(dp_shard=-1), device="cpu")
        engine.prepare(model, optimizer, None, None)
    return lines


def test_number_and_size_of_units_are_logged_once():
    main, other = run_ranks(logged_units, 2, init=False)
    assert main == [
        "3 wrap units (TinyModel._fsdp_wrap_modules), with their parameters: "
        "(root) 67; blocks.0 88; blocks.1 88"
    ]
    assert other == []
