"""What a launch exports, what is refused by name, and what passes."""

import pytest

from parallel_config import ConfigError
from parallel_config.environment import (
    LaunchFacts,
    accelerate_variables,
    check_environment,
    environment_wins,
    launch_variables,
    requested_device,
    without_launch,
)

# What `accelerate launch` of 1.15 exports for a run without a config file.
PLAIN_LAUNCH = {
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "OMP_NUM_THREADS": "1",
}


def test_a_plain_launch_passes():
    check_environment(PLAIN_LAUNCH)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "1"),
        ("ACCELERATE_USE_FSDP", "True"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_USE_SAGEMAKER", "true"),
        ("ACCELERATE_DOWNCAST_BF16", "yes"),
        ("ACCELERATE_TORCH_DEVICE", "meta"),
    ],
)
def test_another_backend_or_device_is_refused_by_name_and_value(name, value):
    environ = {**PLAIN_LAUNCH, name: value}
    with pytest.raises(ConfigError, match=f"{name} = '{value}'") as caught:
        check_environment(environ)
    assert "PARALLEL_ALLOW_ACCELERATE_ENV=1" in str(caught.value)
    check_environment({**environ, "PARALLEL_ALLOW_ACCELERATE_ENV": "1"})


@pytest.mark.parametrize("value", ["false", "0", "", "no"])
def test_a_switch_that_is_off_passes(value):
    check_environment({"ACCELERATE_USE_DEEPSPEED": value, "ACCELERATE_USE_FSDP": value})


def test_every_refused_variable_is_listed():
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cuda:3"}
    with pytest.raises(ConfigError) as caught:
        check_environment(environ)
    assert len(caught.value.problems) == 2


def test_variables_are_recorded_by_prefix():
    environ = {**PLAIN_LAUNCH, "FSDP_VERSION": "1", "PATH": "/bin"}
    assert "FSDP_VERSION" in accelerate_variables(environ)
    assert "PATH" not in accelerate_variables(environ)


def test_launch_facts():
    assert LaunchFacts.read({}) == LaunchFacts()
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    facts = LaunchFacts.read(environ)
    assert (facts.rank, facts.local_rank, facts.world_size, facts.is_main) == (5, 1, 8, False)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "contradict"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "contradict"),
    ],
)
def test_launch_facts_that_cannot_be(environ, text):
    with pytest.raises(ConfigError, match=text):
        LaunchFacts.read(environ)


def test_requested_device():
    assert requested_device({}) is None
    assert requested_device({"PARALLEL_DEVICE": "CPU"}) == "cpu"
    with pytest.raises(ConfigError, match="PARALLEL_DEVICE = 'tpu'"):
        requested_device({"PARALLEL_DEVICE": "tpu"})


def test_the_environment_wins_only_when_told():
    assert not environment_wins({})
    assert not environment_wins({"PARALLEL_ALLOW_ACCELERATE_ENV": "0"})
    assert environment_wins({"PARALLEL_ALLOW_ACCELERATE_ENV": "true"})


def test_what_a_launcher_left_is_found_and_taken_out():
    left = {
        "RANK": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "PARALLEL_LISTEN_FD": "4",
    }
    environ = {**left, "PATH": "/bin", "ROLE_ARN": "mine", "OMP_NUM_THREADS": "1"}
    assert launch_variables(environ) == dict(sorted(left.items()))
    assert without_launch(environ) == {"PATH": "/bin", "ROLE_ARN": "mine", "OMP_NUM_THREADS": "1"}


def test_where_the_ranks_meet_is_read_with_the_rest():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    facts = LaunchFacts.read(environ)
    assert (facts.master_addr, facts.master_port, facts.is_launched) == ("host0", "29500", True)
    assert (facts.listen_fd, facts.launcher_fd) == (None, None)
    ours = LaunchFacts.read(environ | {"PARALLEL_LISTEN_FD": "4", "PARALLEL_LAUNCHER_FD": "5"})
    assert (ours.listen_fd, ours.launcher_fd) == (4, 5)
    assert not LaunchFacts.read({}).is_launched
