"""Whole checkpoints from the Hub: found by number, fetched and verified, for one process or all."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from parallel_ckpt import (
    CheckpointNotFound,
    DamagedCheckpoint,
    Manifest,
    RunFolder,
    StepFolder,
    read_manifest,
)
from parallel_ckpt.layout import CHECKPOINTS, MANIFEST, TEMPORARY, step_name
from parallel_ckpt.ranks import all_ranks
from parallel_ckpt.store.integrity import file_problems, identity_problems
from parallel_ckpt.store.manifest import parse_manifest
from parallel_config import ConfigError, Problem
from parallel_publish.errors import PublishError
from parallel_publish.hub import RemoteFile, at_one_state, download, list_files
from parallel_publish.retry import POLL_S, RetryPolicy
from parallel_publish.staging import check_disk
from parallel_publish.target import Target

T = TypeVar("T")
FETCH_S = 2 * RetryPolicy().timeout_s
"""How long ranks wait for the one that fetches: it asks what there is, and loads it down."""
_MANIFESTS = re.compile(rf"{CHECKPOINTS}/(\d{{6,}})/{re.escape(MANIFEST)}")


def newest_on_hub(target: Target) -> tuple[int, list[str]]:
    """Step of the newest complete checkpoint, by number, and a line for each that was skipped.

    Raises:
        CheckpointNotFound: the repository does not hold one.
    """
    files = list_files(target)
    skipped: list[str] = []
    for step in sorted(_steps(files), reverse=True):
        problem = _incomplete(target, step, files)
        if problem is None:
            return step, skipped
        skipped.append(f"{target.repo_id}: checkpoint {step} {problem}")
    raise CheckpointNotFound.of(
        f"{target.repo_id}@{target.revision}",
        f"does not hold a complete checkpoint below {CHECKPOINTS}/"
        + (f"; {len(skipped)} incomplete." if skipped else "."),
        "Push one first (push_checkpoint_to_hub, or PublishConfig.push_checkpoints of a run), or "
        "name the branch that holds them.",
    )


def fetch_checkpoint(target: Target, run_dir: str | Path, *, step: int | None = None) -> Path:
    """Download a checkpoint into a run folder and verify every file; returns its step folder.

    None means the newest complete one. One that is there already and whole is not fetched again.
    No collective: see `fetch_on_main`. Nothing that was downloaded is executed.

    Raises:
        CheckpointNotFound: there is none on the Hub.
        DamagedCheckpoint: what came differs from its manifest.
    """
    # One commit for all requests: a push meanwhile would mix the files of two states.
    target = at_one_state(target)
    number = newest_on_hub(target)[0] if step is None else step
    run = RunFolder(Path(run_dir).expanduser().absolute())
    final = run.step(number)
    if final.is_committed and not _problems(final):
        return final.path
    # It may be a checkpoint of another run; a fetch never replaces what is there.
    if final.path.exists():
        raise PublishError.of(
            final.path, "exists already, but is not an intact checkpoint.", "Move it away."
        )
    # In the same folder as the checkpoint, so that the rename at the end is atomic. The name is
    # that of a save under way: if this process dies, the next start removes it.
    incoming = run.hidden(number, TEMPORARY, uuid.uuid4().hex[:12])
    try:
        incoming.mkdir(parents=True)
    except OSError as error:
        raise PublishError.of(
            run.path, f"cannot be written: {error.strerror}.", "Fetch to a folder that can."
        ) from None
    try:
        prefix = f"{CHECKPOINTS}/{step_name(number)}/"
        sizes = (file.size_bytes for file in list_files(target) if file.path.startswith(prefix))
        check_disk(incoming, sum(sizes), "the files to fetch")
        pattern = f"{CHECKPOINTS}/{step_name(number)}/*"
        download(target, allow=[pattern], into=incoming)
        fetched = StepFolder(incoming / CHECKPOINTS / step_name(number))
        problems = _problems(fetched)
        if problems:
            raise DamagedCheckpoint(problems, source=f"{target.repo_id}, checkpoint {number}")
        os.rename(fetched.path, final.path)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return final.path


def fetch_on_main(target: Target, run_dir: str | Path, *, step: int | None = None) -> Path:
    """Collective: every rank. `fetch_checkpoint` on the main rank, into a folder that all share."""
    return Path(on_main_at_leisure(lambda: str(fetch_checkpoint(target, run_dir, step=step))))


def on_main_at_leisure(act: Callable[[], T]) -> T:
    """Collective: every rank. Run `act` on the main rank, even longer than a collective may take.

    The others wait by asking the launch's store, up to `FETCH_S`: a collective would time out.

    Raises:
        ReportedError: the same on every rank when `act` failed.
        PublishError: the main rank is gone, or is not done in time.
    """
    ranks = all_ranks()
    if ranks.group is None:
        return act()
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    # A new key for each call: the store keeps what an earlier call has set.
    key = ranks.broadcast(f"parallel_publish/{uuid.uuid4().hex}")
    outcome: list[Callable[[], T]] = []
    if ranks.is_main:
        try:
            outcome = [partial(_same, act())]
        except Exception as error:
            outcome = [partial(_raise, error)]
        finally:
            # Also after a KeyboardInterrupt, or the others would wait until FETCH_S is over.
            store.set(key, "")
    else:
        _wait_for(store, key, FETCH_S)
    # The store only says that it is over. Value or error take the way of every agreement.
    return ranks.from_main(lambda: outcome[0]())


def _wait_for(store: Any, key: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    try:
        # Asked again and again: a blocking wait ends at the timeout of the store.
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise PublishError.of("rank 0", f"has not ended within {limit_s:.0f} s.")
            time.sleep(POLL_S)
    # Under our launcher rank 0 holds the store, so the connection breaks when it ends.
    except RuntimeError as error:
        raise PublishError.of("rank 0", "ended while the others waited for it.") from error


def _same(value: T) -> T:
    return value


def _raise(error: Exception) -> NoReturn:
    raise error


def _steps(files: Sequence[RemoteFile]) -> list[int]:
    found = (_MANIFESTS.fullmatch(file.path) for file in files)
    # Only names that we write ourselves: 0000500 would be found as step 500, but not fetched.
    return [int(match[1]) for match in found if match and step_name(int(match[1])) == match[1]]


def _incomplete(target: Target, step: int, files: Sequence[RemoteFile]) -> str | None:
    """Why a checkpoint on the Hub is not whole, None when it is."""
    prefix = f"{CHECKPOINTS}/{step_name(step)}/"
    sizes = {file.path: file.size_bytes for file in files}
    try:
        manifest = _remote_manifest(target, prefix + MANIFEST)
    except (CheckpointNotFound, DamagedCheckpoint) as error:  # not: the Hub is out of reach
        return f"does not have a readable manifest: {error}"
    if manifest.step != step:
        return f"holds the manifest of step {manifest.step}"
    wrong = [r.path for r in manifest.files if sizes.get(prefix + r.path) != r.size_bytes]
    return f"does not hold {', '.join(wrong[:3])} as its manifest lists it" if wrong else None


def _remote_manifest(target: Target, path: str) -> Manifest:
    folder = download(target, allow=[path])
    file = folder / path
    if not file.is_file():
        raise CheckpointNotFound.of(path, "is not in the repository.")
    return parse_manifest(file.read_bytes(), Path(path))


def _problems(folder: StepFolder) -> list[Problem]:
    try:
        manifest = read_manifest(folder)
        odd = identity_problems(folder, manifest)
        return [*odd, *file_problems(folder, manifest.files, "full")]
    except ConfigError as error:
        return list(error.problems)
