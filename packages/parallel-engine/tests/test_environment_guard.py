"""Whatever stands in the environment: accelerate's objects are those of the config."""

import os
import re
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn

from parallel_config import AcceleratorConfig, ConfigError, ParallelismConfig, Topology
from parallel_engine import Engine
from parallel_engine.accelerate_build import build_accelerator, require_as_configured
from parallel_testing.ranks import run_ranks

# A value for each variable that accelerate 1.15 reads, different from what a run has.
HOSTILE = {
    "ACCELERATE_CPU_AFFINITY": "1",
    "ACCELERATE_DOWNCAST_BF16": "true",
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "ACCELERATE_DYNAMO_MODE": "max-autotune",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "true",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
    "ACCELERATE_FP8_BACKEND": "MSAMP",
    "ACCELERATE_FP8_OPT_LEVEL": "O1",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
    "ACCELERATE_GRADIENT_CLIPPING": "0.1",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_NUM_PROCESSES": "5",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_USE_SAGEMAKER": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_FORWARD_PREFETCH": "true",
    "FSDP_IGNORED_MODULES": "blocks.*",
    "FSDP_MIN_NUM_PARAMS": "1",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_SHARDING_STRATEGY": "NO_SHARD",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "false",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear",
    "FSDP_USE_ORIG_PARAMS": "false",
    "FSDP_VERSION": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "deepspeed",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
    "PARALLELISM_CONFIG_CP_SIZE": "2",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "eager",
    "PARALLELISM_CONFIG_SP_BACKEND": "ulysses",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "8",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "true",
    "PARALLELISM_CONFIG_SP_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
}
REFUSED = {
    "ACCELERATE_DOWNCAST_BF16",
    "ACCELERATE_FP8_BACKEND",
    "ACCELERATE_TORCH_DEVICE",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_USE_SAGEMAKER",
}
# Of backends that are refused, of logging and debugging, or of the launcher alone.
HARMLESS = re.compile(
    r"ACCELERATE_(DEEPSPEED_\w*|CONFIG_DS_FIELDS|SAGEMAKER_\w*|DEBUG_\w*|LOG_LEVEL|ENABLE_RICH|"
    r"BYPASS_DEVICE_MAP|IN_TPU_POD|INIT_INCLUDE_BUFFERS|ALLOW_CP_STANDALONE|DYNAMO_|FP8_)|FP8_OVERRIDE_\w*"
)
PLAIN_LAUNCH = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_USE_CPU": "False",
}


def test_every_variable_that_accelerate_reads_is_known():
    """A release that reads another one fails here: try it, then list it above."""
    read = set()
    for path in Path(accelerate.__file__).parent.rglob("*.py"):
        text = path.read_text()
        read |= set(
            re.findall(r"[\"']((?:ACCELERATE|FSDP|PARALLELISM_CONFIG|FP8)_[A-Z0-9_]+)", text)
        )
    unknown = {name for name in read - HOSTILE.keys() if not HARMLESS.fullmatch(name)}
    assert unknown == set()
    assert len(read & HOSTILE.keys()) > 35


class Block(nn.Linear):
    pass


class Model(nn.Module):
    _fsdp_wrap_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4, 4), Block(4, 4)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def plain(value):
    """Public fields of an object as text; addresses say nothing."""
    fields = getattr(value, "__dict__", {})
    return {name: re.sub(r" at 0x\w+", "", repr(v)) for name, v in fields.items()}


def effective(degrees):
    """What accelerate ended up with, the units, and two losses."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(parallelism=ParallelismConfig(**degrees), device="cpu")
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    accelerator = engine.accelerator
    state = accelerator.state
    x = torch.ones(2, 4)
    losses = [
        engine.step(model, optimizer, None, [x], lambda m, b: m(b).square().mean()).loss
        for _ in range(2)
    ]
    return {
        "steps": accelerator.gradient_accumulation_steps,
        "window": plain(accelerator.gradient_state),
        "precision": (state.mixed_precision, accelerator.native_amp),
        "kind": (str(state.distributed_type), state.num_processes, str(state.device)),
        "dynamo": plain(state.dynamo_plugin),
        "plugin": plain(getattr(state, "fsdp_plugin", None)),
        "mesh": plain(getattr(state, "parallelism_config", None)),
        "ddp": plain(accelerator.ddp_handler),
        "loader": plain(accelerator.dataloader_config),
        "units": [(n, type(m).__name__) for n, m in model.named_modules()],
        "losses": losses,
    }


def under_each_variable(degrees):
    """By variable what came of it, or the refusal; and the variables that left a trace."""
    wanted = effective(degrees)
    found, changed = {}, []
    for name, value in HOSTILE.items():
        os.environ[name] = value
        before = dict(os.environ)
        try:
            found[name] = effective(degrees)
        except ConfigError as error:
            found[name] = str(error)
        if dict(os.environ) != before:
            changed.append(name)
        del os.environ[name]
    os.environ.update(PLAIN_LAUNCH)
    return wanted, found, changed, effective(degrees)


@pytest.mark.parametrize(
    ("world_size", "degrees"), [(1, {}), (2, {}), (2, {"dp_shard": -1})], ids=["one", "ddp", "fsdp"]
)
def test_a_variable_is_refused_by_name_or_without_effect(world_size, degrees):
    results = run_ranks(under_each_variable, world_size, degrees, init=False, timeout_s=200)
    for wanted, found, changed, under_plain_launch in results:
        assert changed == []
        assert under_plain_launch == wanted
        refused = {name for name, outcome in found.items() if isinstance(outcome, str)}
        assert refused == REFUSED
        for name, outcome in found.items():
            if name in refused:
                assert f"{name} = {HOSTILE[name]!r}" in outcome
                assert f"Unset {name}, or set PARALLEL_ALLOW_ACCELERATE_ENV=1" in outcome
            else:
                assert outcome == wanted, name


def where_the_environment_wins():
    os.environ["PARALLEL_ALLOW_ACCELERATE_ENV"] = "1"
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "3"
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    before = dict(os.environ)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = AcceleratorConfig()
    engine = Engine(parallelism=ParallelismConfig(dp_shard=-1), accelerator=given, device="cpu")
    engine.prepare(model, optimizer, None, None)
    assert dict(os.environ) == before
    assert given == AcceleratorConfig()
    state = engine.accelerator.state
    window = next(engine.accumulate([torch.ones(1)], epochs=None))
    policy = state.fsdp_plugin.mixed_precision_policy
    return (
        len(window),
        engine.accelerator.gradient_accumulation_steps,
        str(policy.param_dtype),
        state.fsdp_plugin.reshard_after_forward,
        engine.overridden,
    )


def test_the_environment_wins_where_that_is_allowed():
    for found in run_ranks(where_the_environment_wins, 2, init=False):
        assert found[:4] == (3, 3, "torch.bfloat16", False)
        assert len(found[4]) == 3
        assert "(ACCELERATE_GRADIENT_ACCUMULATION_STEPS = '3')" in found[4][1]


def an_earlier_accelerator():
    """Somebody else's, with other settings, in the same process; it ended within a window."""
    other = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    model, loader = other.prepare(Model(), torch.utils.data.DataLoader([torch.ones(4)] * 8))
    for batch in loader:
        with other.accumulate(model):
            other.backward(model(batch).mean())
            assert not other.sync_gradients
        break
    return effective({})


def test_an_earlier_accelerator_leaves_nothing_behind():
    alone = run_ranks(effective, 1, {}, init=False)
    assert run_ranks(an_earlier_accelerator, 1, init=False) == alone


def a_device_of_the_environment():
    os.environ["PARALLEL_ALLOW_ACCELERATE_ENV"] = "1"
    os.environ["ACCELERATE_TORCH_DEVICE"] = "meta"
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        Engine(device="cpu").prepare(model, optimizer, None, None)
    return str(caught.value).splitlines()[-1].strip()


def test_the_environment_never_wins_over_the_device():
    assert run_ranks(a_device_of_the_environment, 1, init=False) == [
        "device = cpu, but accelerate ended up with meta because of ACCELERATE_TORCH_DEVICE = "
        "'meta'. Unset ACCELERATE_TORCH_DEVICE."
    ]


def a_kind_of_the_environment(names):
    """As on GPUs, where accelerate shards by itself what the engine replicates."""
    config, topology, device = AcceleratorConfig(), Topology(dp_replicate=2), torch.device("cpu")
    accelerator = build_accelerator(config, topology, device)
    require_as_configured(accelerator, config, topology, device)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    os.environ.update(dict.fromkeys(names, "true"), PARALLEL_ALLOW_ACCELERATE_ENV="1")
    with pytest.raises(ConfigError) as caught:
        require_as_configured(accelerator, config, topology, device)
    return str(caught.value).splitlines()[-1].strip()


KIND = "kind = DistributedType.MULTI_CPU, but accelerate ended up with DistributedType.FSDP"


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (
            ["ACCELERATE_USE_FSDP"],
            " because of ACCELERATE_USE_FSDP = 'true'. Unset ACCELERATE_USE_FSDP.",
        ),
        (
            [],
            "; ACCELERATE_USE_FSDP, ACCELERATE_USE_DEEPSPEED, ACCELERATE_USE_MEGATRON_LM would "
            f"explain it, but is not set. accelerate {accelerate.__version__} may behave otherwise "
            "than 1.15, which is known.",
        ),
    ],
)
def test_the_environment_never_wins_over_the_kind(names, cause):
    found = run_ranks(a_kind_of_the_environment, 2, names)
    assert found == [KIND + cause] * 2
