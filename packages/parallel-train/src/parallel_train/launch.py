"""`--nproc_per_node N`: start the ranks of this machine through torch's own elastic launcher."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel_train.signals import PREEMPTED

EXIT_CODES_VARIABLE = "PARALLEL_EXIT_CODES"
"""Folder in which each worker leaves its exit code: after a signal the launcher forgets them."""


def without_flags(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """`argv` less `--name value` and `--name=value`, in either spelling."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if skip:
            skip = False
        elif word.startswith("--") and name in names:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def launch(argv: Sequence[str], *, nproc_per_node: int, grace_s: float) -> int:
    """Run `ptrain <argv>` on `nproc_per_node` ranks of this machine and wait for them.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the workers, which have `grace_s` seconds to
    write a checkpoint. Returns 0 when all ended well, 75 when they were preempted and saved, 2
    when the input was wrong, 1 otherwise.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Left over from another launch they would send the ranks to a stranger's port.
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="ptrain-") as folder:
        os.environ[EXIT_CODES_VARIABLE] = folder
        options: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": nproc_per_node,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",  # port 0: the system picks a free one
            "max_restarts": 0,
            "signals_to_handle": "SIGTERM,SIGINT,SIGUSR1",
            "shutdown_timeout": max(1, round(grace_s)),
        }
        known = {field.name for field in dataclasses.fields(LaunchConfig)}
        config = LaunchConfig(**{k: v for k, v in options.items() if k in known})
        command = ["-u", "-m", "parallel_train", *argv]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            codes = _codes(Path(folder)) or {f.exitcode for f in error.failures.values()}
            return _verdict(codes, complete=True)
        except SignalException:
            codes = _codes(Path(folder))
            return _verdict(codes, complete=len(_files(Path(folder))) == nproc_per_node)
        return 0


def leave_exit_code(code: int) -> None:
    """In a worker: note the exit code for the launcher. Free when there is none."""
    folder = os.environ.get(EXIT_CODES_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / os.environ.get("RANK", "0")).write_text(str(code))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _codes(folder: Path) -> set[int]:
    return {int(path.read_text() or "1") for path in _files(folder)}


def _verdict(codes: set[int], *, complete: bool) -> int:
    if not complete or not codes:
        return 1
    if codes <= {0, PREEMPTED}:
        return PREEMPTED if PREEMPTED in codes else 0
    return 2 if codes == {2} else 1
