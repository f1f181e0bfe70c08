"""Launch facts from the process environment, and variables that are refused there.

Launch facts (rank, world size) are read here and nowhere else. The environment is checked twice.
Before accelerate is imported, `check_environment` refuses variables that would select another
backend, device or topology. Later `parallel_engine` compares what accelerate chose with the config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallel_config.errors import ConfigError, Problem

ALLOW_VARIABLE = "PARALLEL_ALLOW_ACCELERATE_ENV"
"""Set to 1, the environment wins over the config; the run is then marked as not reproducible."""
DEVICE_VARIABLE = "PARALLEL_DEVICE"
"""`cpu` or `cuda`: the device to run on instead of the best one of the machine."""

LISTEN_VARIABLE = "PARALLEL_LISTEN_FD"
"""From the launcher to rank 0: the descriptor of the socket on which the ranks meet."""
LAUNCHER_VARIABLE = "PARALLEL_LAUNCHER_FD"
"""From the launcher to its workers: a descriptor that reads as ended once the launcher is gone."""

TRUE_WORDS = frozenset({"1", "true", "yes", "on", "t", "y"})

# A plain `accelerate launch` exports these too, but never with a value that turns one on. So a
# value that turns one on was set by somebody, and only then is it refused.
_SWITCHES: Mapping[str, str] = {
    "ACCELERATE_USE_DEEPSPEED": "hands the model to DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "hands the model to Megatron-LM",
    "ACCELERATE_USE_SAGEMAKER": "selects SageMaker's backends",
    "ACCELERATE_USE_FSDP": "makes accelerate configure FSDP from its own variables",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "sets the degrees of the device mesh",
    "ACCELERATE_DOWNCAST_BF16": "changes the dtype of tensors",
}
_VALUES: Mapping[str, str] = {"ACCELERATE_TORCH_DEVICE": "selects the device"}
_LAUNCH = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        LISTEN_VARIABLE,
        LAUNCHER_VARIABLE,
    }
)
# accelerate fills open fields of its plugins from variables that begin so.
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Where this process stands in its launch, as `torchrun` and its like export it."""

    rank: int = 0
    """Number of this process among all of the launch."""
    local_rank: int = 0
    """Number of this process among those on this host."""
    world_size: int = 1
    """Processes in the launch."""
    local_world_size: int = 1
    """Processes on this host."""
    master_addr: str = ""
    """Host of rank 0, where the ranks meet."""
    master_port: str = ""
    """Port on that host."""
    is_launched: bool = False
    """Whether a launcher has started this process: RANK is set."""
    listen_fd: int | None = None
    """On rank 0: the socket that already listens on that port, where the launcher opened it."""
    launcher_fd: int | None = None
    """Reads as ended once the launcher is gone, where it is ours."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchFacts:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; a bare process is rank 0 of 1.

        Raises:
            ConfigError: a variable is not a number, or two variables contradict each other.
        """
        environ = os.environ if environ is None else environ
        world_size = _number(environ, "WORLD_SIZE", 1)
        rank = _number(environ, "RANK", 0)
        facts = cls(
            rank=rank,
            # A launcher that says nothing of hosts has one: ranks are then local ranks.
            local_rank=_number(environ, "LOCAL_RANK", rank),
            world_size=world_size,
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
            master_addr=environ.get("MASTER_ADDR", "").strip(),
            master_port=environ.get("MASTER_PORT", "").strip(),
            is_launched="RANK" in environ,
            listen_fd=_descriptor(environ, LISTEN_VARIABLE),
            launcher_fd=_descriptor(environ, LAUNCHER_VARIABLE),
        )
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                Problem(
                    "RANK",
                    f"= {rank} and WORLD_SIZE = {world_size} contradict each other.",
                    "Start through torchrun or --nproc_per_node, or unset RANK and WORLD_SIZE.",
                )
            )
        # Each process would take itself for rank 0 and wait for others that never come.
        if world_size > 1 and "RANK" not in environ:
            raise ConfigError(
                Problem(
                    "WORLD_SIZE",
                    f"= {world_size} is set, but RANK is not.",
                    "Start through torchrun or --nproc_per_node, or unset WORLD_SIZE.",
                )
            )
        return facts


def launch_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables by which a launcher gives this process its place in a launch."""
    environ = os.environ if environ is None else environ
    return {
        name: environ[name]
        for name in sorted(environ)
        # torchrun exports several variables of its own that begin so.
        if name in _LAUNCH or name.startswith("TORCHELASTIC_")
    }


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that `launch_variables` finds.

    If they stayed, new ranks would connect to the port of another launch.
    """
    launch = launch_variables(environ)
    return {name: value for name, value in environ.items() if name not in launch}


def environment_wins(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user allowed accelerate's variables to override the config."""
    environ = os.environ if environ is None else environ
    return environ.get(ALLOW_VARIABLE, "").strip().lower() in TRUE_WORDS


def requested_device(environ: Mapping[str, str] | None = None) -> str | None:
    """The device type that `PARALLEL_DEVICE` asks for; None if it is not set.

    Raises:
        ConfigError: it is neither cpu nor cuda.
    """
    environ = os.environ if environ is None else environ
    value = environ.get(DEVICE_VARIABLE, "").strip().lower()
    if value not in ("", "cpu", "cuda"):
        raise ConfigError(
            Problem(
                DEVICE_VARIABLE, f"= {value!r}, but it must be cpu or cuda.", "Change or unset it."
            )
        )
    return value or None


def accelerate_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every variable that accelerate may read, for the record of a run."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name.startswith(_PREFIXES)}


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse variables that select another backend, device or topology. Call before accelerate.

    Raises:
        ConfigError: names each such variable with its value and effect. With
            `PARALLEL_ALLOW_ACCELERATE_ENV=1` nothing is raised.
    """
    environ = os.environ if environ is None else environ
    problems = list(_foreign(environ))
    if problems and not environment_wins(environ):
        raise ConfigError(problems, source="environment")


def _foreign(environ: Mapping[str, str]) -> Iterator[Problem]:
    for name, effect in _SWITCHES.items():
        if environ.get(name, "").strip().lower() in TRUE_WORDS:
            yield _refusal(name, environ[name], effect)
    for name, effect in _VALUES.items():
        # No word switches these off: every value selects something.
        if environ.get(name, "").strip():
            yield _refusal(name, environ[name], effect)


def _refusal(name: str, value: str, effect: str) -> Problem:
    return Problem(
        name,
        f"= {value!r} {effect}, but the config alone decides the run.",
        f"Unset {name}, or set {ALLOW_VARIABLE}=1 to let the environment win.",
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            Problem(
                name, f"= {text!r} is not a number.", f"Unset {name}, or start through torchrun."
            )
        ) from None


def _descriptor(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name, 0) if environ.get(name, "").strip() else None
