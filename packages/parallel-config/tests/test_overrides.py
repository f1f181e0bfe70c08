"""Under PARALLEL_ALLOW_ACCELERATE_ENV=1 accelerate's variables become fields of the config."""

import pytest

from parallel_config import AcceleratorConfig, ConfigError, FSDPConfig, with_environment

ALLOWED = {"PARALLEL_ALLOW_ACCELERATE_ENV": "1"}


def test_without_the_variable_the_config_stays():
    config = AcceleratorConfig()
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_OFFLOAD_PARAMS": "true"}
    assert with_environment(config, environ) == (config, ())


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "BF16", "mixed_precision", "bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", "gradient_accumulation.steps", 7),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "compile.backend", "eager"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "compile.enable", True),
        ("ACCELERATE_DYNAMO_MODE", "max-autotune", "compile.mode", "max-autotune"),
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "True", "compile.fullgraph", True),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "fsdp.reshard_after_forward", False),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp.cpu_offload", True),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B", "fsdp.wrap_modules", ("A", "B")),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "activation_checkpointing.mode", "full"),
    ],
)
def test_each_variable_changes_its_field_and_says_so(name, text, field, value):
    environ = {**ALLOWED, name: text}
    config, lines = with_environment(AcceleratorConfig(), environ)
    found = config
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value
    assert any(
        f"accelerator.{field}: " in line and f"({name} = {text!r})" in line for line in lines
    )
    assert with_environment(config, environ) == (config, ())


def test_what_a_plain_launch_exports_changes_only_what_differs():
    environ = {**ALLOWED, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}
    config = AcceleratorConfig(fsdp=FSDPConfig(reduce_dtype="bf16"))
    assert with_environment(config, environ) == (config, ())
    config, lines = with_environment(AcceleratorConfig(mixed_precision="bf16"), environ)
    assert config == AcceleratorConfig()
    assert lines == ("accelerator.mixed_precision: bf16 -> no (ACCELERATE_MIXED_PRECISION = 'no')",)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "it must be one of no, bf16, fp16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many", "it must be a whole number"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0", "= 0, but it must be at least 1"),
    ],
)
def test_a_value_that_the_field_cannot_take(name, text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        with_environment(AcceleratorConfig(), {**ALLOWED, name: text})
