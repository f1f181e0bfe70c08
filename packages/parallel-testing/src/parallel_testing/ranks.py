"""Gloo ranks for tests: started from a forkserver that has imported torch once, and watched.

    def work(value):                 # a function of the test module
        return torch.distributed.get_rank() + value

    def test_it():
        assert run_ranks(work, 2, 10) == [10, 11]

Four ranks start in about a second; `spawn` would take twenty, and plain `fork` breaks once the
test process has threads.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

GLOO_TIMEOUT_S = 30.0
"""gloo finds a rank that does not join a collective only by this deadline, and not before."""
_preloaded = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.fsdp",
    "torch.utils.data",
    # FSDP2's hooks and every optimizer import it at their first call.
    "torch._dynamo",
    "accelerate",
    # Test modules import it, and a rank imports its test module.
    "pytest",
    # Of programs: together they take longer than all of our own modules.
    "pyarrow.parquet",
    "rich.console",
    "safetensors.torch",
    "tyro",
    "yaml",
    "parallel_testing.ranks",
]
"""Only what reads no environment variable of ours at its import: the environment comes later."""


def preload(*modules: str) -> None:
    """Have the forkserver import these modules once, instead of every rank anew.

    Call it in a conftest.py: it counts until the first rank of the process is started. Modules
    that are not installed are left out.
    """
    _preloaded.extend(name for name in modules if name not in _preloaded)


def preloaded() -> list[str]:
    """The modules that the forkserver imports, or has imported: those that are installed."""
    return [name for name in _preloaded if _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


@dataclass(frozen=True)
class RankOutcome(Generic[T]):
    """How one rank ended."""

    rank: int
    exit_code: int | None
    """None if the watchdog had to kill it."""
    result: T | None = None
    """What the function returned; None if it did not return."""
    error: str = ""
    """Its traceback, or the stack it hung in."""
    error_type: str = ""
    """Name of the exception's class."""

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process ended with 0."""
        return self.exit_code == 0 and not self.error


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message shows every such rank's traceback."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = 90.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    device: str = "cpu",
) -> list[T]:
    """Run `fn(*args)` on `world_size` gloo ranks; returns the results by rank.

    `fn` is a function at the top of a module. With `init` the process group is there already.
    Devices are hidden from the ranks unless `device` names another kind than "cpu".

    Raises:
        RanksFailed: a rank raised, died, or was still busy after `timeout_s` seconds.
    """
    outcomes = rank_outcomes(
        fn, world_size, *args, timeout_s=timeout_s, env=env, init=init, device=device
    )
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise RanksFailed("\n".join(_describe(outcome) for outcome in failed))
    return [cast(T, outcome.result) for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = 90.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    device: str = "cpu",
) -> list[RankOutcome[T]]:
    """Like `run_ranks`, for tests in which ranks are meant to fail: returns how each ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder, port = Path(name), free_port()
        processes = []
        for rank in range(world_size):
            variables = {**_environment(rank, world_size, port, device), **(env or {})}
            # The function goes by name and file: the rank cannot import a test file, so it could
            # not unpickle the function itself.
            spec = (_source(fn), fn.__qualname__, args, variables, init, str(folder))
            # Not a daemon: a daemonic process may not have children, but a rank may start loaders.
            process = context.Process(target=_child, args=(rank, pickle.dumps(spec)), daemon=False)
            process.start()
            processes.append(process)
        _watch(processes, timeout_s)
        return [_outcome(folder, rank, process) for rank, process in enumerate(processes)]


def free_port() -> int:
    """A TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, world_size: int, port: int, device: str) -> dict[str, str]:
    # Hidden, since torch and accelerate take a GPU where they see one, and results would differ
    # between machines.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PARALLEL_DEVICE": "cpu"} if device == "cpu" else {}
    return hidden | launch_variables(rank, world_size, port) | {"OMP_NUM_THREADS": "1"}


def launch_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for one of `world_size` ranks of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _source(fn: Callable[..., object]) -> tuple[str, str]:
    """Name and file of the module of `fn`; a test file cannot be imported by its name."""
    module = sys.modules[fn.__module__]
    return fn.__module__, str(module.__file__)


def _watch(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Wait for all; after `timeout_s` have them dump their stacks and kill them."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [process for process in processes if process.is_alive()]
    # All of them first, then the kill: the stacks show the same moment.
    for process in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGUSR2)
    if hung:
        time.sleep(0.5)  # they write their stacks now
    for process in hung:
        process.kill()
        process.join()


def _outcome(folder: Path, rank: int, process: BaseProcess) -> RankOutcome[T]:
    stacks = folder / f"stacks-{rank}"
    hung = stacks.exists() and stacks.stat().st_size > 0
    report = folder / f"result-{rank}"
    if report.exists():
        result, error, error_type = pickle.loads(report.read_bytes())
        # A rank that was asked for its stack may still write a report before the kill; it hung
        # anyway.
        return RankOutcome(rank, None if hung else process.exitcode, result, error, error_type)
    text = stacks.read_text() if hung else ""
    return RankOutcome(
        rank, None if hung else process.exitcode, error=text or "ended without a report"
    )


def _describe(outcome: RankOutcome[T]) -> str:
    how = "hung in" if outcome.exit_code is None else f"ended with {outcome.exit_code}"
    return f"--- rank {outcome.rank} {how}\n{outcome.error}"


def _child(rank: int, pickled: bytes) -> None:
    """In the rank: run the function, leave the result in a file, end without a hung teardown."""
    source, qualname, args, variables, init, folder = pickle.loads(pickled)
    # Before torch.distributed and our packages read them: the forkserver started without.
    os.environ.update(variables)
    with open(Path(folder) / f"stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        report, code = _run(source, qualname, args, init)
        # Renamed when it is whole: a rank that is killed while it writes leaves no report.
        temporary = Path(folder) / f"result-{rank}.tmp"
        temporary.write_bytes(pickle.dumps(report))
        os.replace(temporary, Path(folder) / f"result-{rank}")
        # os._exit does not flush.
        sys.stdout.flush()
        sys.stderr.flush()
        # A gloo thread that still owns a tensor aborts an ordinary exit.
        os._exit(code)


def _run(
    source: tuple[str, str], qualname: str, args: tuple[object, ...], init: bool
) -> tuple[tuple[object, str, str], int]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # before the first backward, or a forked process may die in it
    try:
        if init:
            timeout = datetime.timedelta(seconds=GLOO_TIMEOUT_S)
            dist.init_process_group("gloo", timeout=timeout)
        result = _function(source, qualname)(*args)
        if dist.is_initialized():
            # A rank that ends early would close the connections that others still use.
            dist.barrier()
            dist.destroy_process_group()
        return (result, "", ""), 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        return (None, "" if code == 0 else f"SystemExit({error.code!r})", "SystemExit"), code
    # KeyboardInterrupt included: it must reach the report, for the process ends without a
    # traceback.
    except BaseException as error:
        return (None, traceback.format_exc(), type(error).__name__), 1


def _function(source: tuple[str, str], qualname: str) -> Callable[..., object]:
    name, path = source
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, f"no module at {path}"
        assert spec.loader is not None, f"no module at {path}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
