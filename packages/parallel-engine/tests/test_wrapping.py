"""Wrap units are decided without ranks and without memory."""

import pytest
import torch
from torch import nn

from parallel_config import ConfigError, FSDPConfig
from parallel_engine.wrapping import forward_methods, resolve_wrap_policy, wrap_units


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


def test_a_unit_by_size_has_at_least_that_many_parameters():
    assert units(Plain(), min_num_params=72) == [
        "blocks.0",
        "blocks.0.linear",
        "blocks.1",
        "blocks.1.linear",
    ]


def test_nobody_names_units():
    with pytest.raises(ConfigError, match=r"saves no memory(.|\n)*--accelerator.fsdp.wrap_modules"):
        units(Plain())


def test_a_misspelt_class_lists_what_exists():
    with pytest.raises(ConfigError, match=r"no module of class 'Blok'(.|\n)*Block, Linear"):
        units(Plain(), wrap_modules=("Blok",))


def test_a_size_that_nothing_reaches_names_the_largest():
    with pytest.raises(ConfigError, match="min_num_params 72 or less"):
        units(Plain(), min_num_params=10_000)


def test_declared_methods_must_exist():
    assert forward_methods(Declares()) == ("predict",)
    model = Declares()
    model._fsdp_forward_methods = ("predct",)
    with pytest.raises(ConfigError, match="no method 'predct'"):
        forward_methods(model)
