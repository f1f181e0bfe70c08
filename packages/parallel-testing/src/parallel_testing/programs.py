"""Programs for tests: `python -m MODULE ...` without the seconds that importing torch takes.

    done = run_program("parallel_train", ["train", "--steps", "4"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr

Each program is a process of its own, with its own folder, environment, arguments and output. It is
forked from the server that also starts the ranks of `parallel_testing.ranks`, which has imported
torch and accelerate, but none of our packages: their code runs from its first line.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_config.environment import without_launch
from parallel_testing.ranks import free_port, launch_variables, preloaded

_GRACE_S = 20.0
"""How long the other ranks may go on after one of them has failed."""


def clean_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the test for a program on the CPU, without a launch around the test."""
    kept = without_launch(os.environ)
    return {**kept, "OMP_NUM_THREADS": "1", "PARALLEL_DEVICE": "cpu", **(changes or {})}


def run_program(
    module: str,
    words: Sequence[object],
    *,
    cwd: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    ranks: int = 1,
    timeout_s: float = 150.0,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module *words`; returns exit code, stdout and stderr.

    `env` is the whole environment (default: `clean_environment()`). With `ranks` above 1 that many
    processes start with the variables that torchrun sets; the exit code is then the first that is
    not 0, and the outputs stand one after another.

    Raises:
        subprocess.TimeoutExpired: the program was still busy after `timeout_s` seconds. It is
            killed, and what it wrote is in the exception.
    """
    variables = dict(clean_environment() if env is None else env)
    arguments = [str(word) for word in words]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    port = free_port() if ranks > 1 else 0
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        folder = Path(name)
        processes = []
        for rank in range(ranks):
            launch = launch_variables(rank, ranks, port) if ranks > 1 else {}
            outputs = (str(folder / f"out-{rank}"), str(folder / f"err-{rank}"))
            spec = (module, arguments, os.fspath(cwd), {**variables, **launch}, *outputs)
            process = context.Process(target=_program, args=spec, daemon=False)
            process.start()
            processes.append(process)
        finished = _wait(processes, timeout_s)
        out, err = (
            "".join(_text(folder / f"{kind}-{rank}") for rank in range(ranks))
            for kind in ("out", "err")
        )
        if not finished:
            raise subprocess.TimeoutExpired([module, *arguments], timeout_s, out, err)
        codes = [process.exitcode or 0 for process in processes]
        code = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess([module, *arguments], code, out, err)


def run_ptrain(
    *words: object,
    cwd: str | os.PathLike[str],
    code: int = 0,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 150.0,
) -> str:
    """Run `ptrain *words`; returns what it printed, stderr last.

    `--nproc_per_node N` becomes N ranks as torchrun starts them: what our launcher does and says
    needs a test of its own, with a new interpreter. `env` is added to `clean_environment()`.

    Raises:
        AssertionError: it ended with another code than `code`; the message shows its outputs.
        subprocess.TimeoutExpired: see `run_program`.
    """
    ranks, arguments = ranks_of(words)
    environ = clean_environment(env)
    done = run_program(
        "parallel_train", arguments, cwd=cwd, env=environ, ranks=ranks, timeout_s=timeout_s
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def ranks_of(words: Sequence[object]) -> tuple[int, list[str]]:
    """The number after `--nproc_per_node`, 1 without it, and the other words."""
    left = [str(word) for word in words]
    if "--nproc_per_node" not in left:
        return 1, left
    at = left.index("--nproc_per_node")
    return int(left[at + 1]), left[:at] + left[at + 2 :]


def _wait(processes: Sequence[multiprocessing.process.BaseProcess], timeout_s: float) -> bool:
    """Wait until all have ended, or kill them; whether they ended by themselves in time."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        for process in processes:
            process.join(0.05)
        if any(process.exitcode for process in processes):  # a peer may now wait for it for long
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    failed = any(process.exitcode for process in processes if process not in late)
    return not late or failed


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _program(
    module: str, words: list[str], cwd: str, env: dict[str, str], out: str, err: str
) -> None:
    """In the process: become the program, and end as an interpreter ends."""
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *words]
    # As `python -m` has it: the folder first, then PYTHONPATH.
    added = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [cwd, *added]
    code = _run(module)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at an exit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # multiprocessing's own end would skip what atexit has just done


def _run(module: str) -> int:
    import torch

    torch.set_num_threads(1)  # before the first backward, or a forked process may die in it
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
