"""Saving: one collective call writes everything, and only a whole checkpoint ever exists."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.optim import Optimizer

from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.layout import (
    PRETRAINED_MODEL,
    RunFolder,
    StepFolder,
    step_name,
    step_of,
)
from parallel_ckpt.ranks import DEADLINE_S, Ranks
from parallel_ckpt.save import dcp as dcp_writer
from parallel_ckpt.save.background import Background, Staging
from parallel_ckpt.save.rank_files import (
    RankFiles,
    Share,
    finish_dcp,
    paths_of,
    write_documents,
    write_rank_files,
)
from parallel_ckpt.save.safetensors import write_safetensors
from parallel_ckpt.save.same_on_ranks import (
    Digests,
    differing_buffers,
    digests_of,
    line_about_buffers,
    require_same,
)
from parallel_ckpt.save.snapshot import Snapshot, checked_files, take_snapshot, with_sequence
from parallel_ckpt.state.optimizer import Stateful, inner_scheduler
from parallel_ckpt.store.commit import abandon, begin, commit, delete, read_last, reason
from parallel_ckpt.store.find import resolve_checkpoint
from parallel_ckpt.store.lock import RunLock
from parallel_ckpt.store.manifest import FileRecord, Manifest, OptimizerRecord, read_manifest
from parallel_ckpt.store.mend import open_run
from parallel_ckpt.store.retention import Commit, line_of_descent, superseded
from parallel_config import CheckpointConfig, CheckpointFormat, ReportedError, Topology
from parallel_config.checkpoint import parse_size


class CheckpointSaver:
    """The one writer of a run's checkpoints. Close it, or use it as a context manager."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        topology: Topology,
        config: CheckpointConfig | None = None,
        checkpoint_format: CheckpointFormat = CheckpointFormat.SAFETENSORS,
        provenance: Mapping[str, object] | None = None,
        on_note: Callable[[str], None] = print,
        on_commit: Callable[[Path], None] | None = None,
        deadline_s: float = DEADLINE_S,
        resumed_from: str | Path | None = None,
    ) -> None:
        """Collective: every rank. Lock the run folder, check that all ranks see it, and mend it.

        `provenance` is kept in each manifest; `on_note` is called on the main rank with a line for
        everything that was taken over, put back or removed, or cannot be. `on_commit` is called
        there with each checkpoint once it is committed, before retention deletes any; other ranks
        wait for it, however long it takes. What it raises becomes a note: the checkpoint is there.
        With `async_save` both are called on a thread of the saver's, while training goes on.

        `resumed_from` is the checkpoint of this run that training goes on from; None stands for the
        one committed last. Retention counts only it, its ancestors and what is saved from now on.

        Raises:
            CheckpointError: another run writes here, or a rank does not see the folder; or
                `resumed_from` is not a checkpoint of this run.
        """
        self._run = RunFolder(Path(run_dir).expanduser().absolute())
        self._topology = topology
        self._config = config or CheckpointConfig()
        self._format = checkpoint_format
        self._provenance = dict(provenance or {})
        self._on_note = on_note
        self._on_commit = on_commit
        self._ranks = Ranks.join(deadline_s, "CheckpointSaver")
        self._background_ranks = self._ranks
        self._lock: RunLock | None = None
        self._pending: Background[Path] | None = None
        self._staging = Staging()
        self._commits: dict[int, Commit] = {}
        """Of the committed steps whose manifest can be read; on the main rank alone."""
        self._resumed_from = resumed_from
        self._parent: int | None = None
        """Sequence of the checkpoint that the run goes on from; on the main rank alone."""
        self._sequence = 0
        """The highest one given so far; on the main rank alone."""
        self._compares_buffers = self._ranks.world_size > 1
        """Until a difference between ranks was said."""
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        if self._config.async_save:
            self._background_ranks = Ranks.join(deadline_s, "CheckpointSaver")

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(failed=error is not None)

    def save(
        self,
        *,
        step: SupportsIndex,
        samples_seen: SupportsIndex,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        data_state: object = None,
        train_config: str | None = None,
        model_files: Mapping[str, str | bytes] | None = None,
    ) -> Path:
        """Collective: every rank. Write the checkpoint of `step`; return its folder.

        `step` counts optimizer updates, `samples_seen` the samples in them; both may be integers of
        any library. `model_files` (config, processors) land beside the weights. With `async_save`
        the call returns once this rank's shards are copied; the folder exists after `wait`.

        Raises:
            CheckpointError: the same on every rank, when any rank failed; there is no new
                checkpoint then, the former ones and `last` are untouched. Once it is committed,
                only notes tell of what failed (`last`, `on_commit`, deleting old ones).
        """
        self.wait()  # the buffers and the main rank's counters belong to one save at a time
        self._ranks.enter("CheckpointSaver.save")
        snapshot = self._agreed_snapshot(
            step=step,
            samples_seen=samples_seen,
            model=model,
            optimizer=optimizer,
            scheduler=inner_scheduler(scheduler),
            data_state=data_state,
            train_config=train_config,
            model_files=model_files or {},
        )
        share = Share.of(snapshot, self._ranks, self._format)
        if not self._config.async_save:
            return self._write(snapshot, share, self._ranks)
        staged = self._ranks.together(lambda: self._staging.copy(snapshot, share))
        # A group of its own: the next call of this thread may meet the other ranks while the
        # background thread still does.
        self._pending = Background(lambda: self._write(staged, share, self._background_ranks))
        return self._run.step(snapshot.step).path

    def wait(self) -> None:
        """Collective: every rank. Wait until the save that is in flight is committed.

        Raises:
            CheckpointError: it failed; the same on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self, *, failed: bool = False) -> None:
        """Collective: every rank. Wait for the save in flight and give the run folder back.

        With `failed` an error of that save is not raised over the one that is under way.
        """
        try:
            self.wait()
        except ReportedError as error:
            if not failed:
                raise
            self._on_note(str(error))
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._background_ranks is not self._ranks:
            self._background_ranks.leave()
        self._ranks.leave()

    def _open(self) -> None:
        """Lock, mend and check the folder."""
        self._lock, notes = open_run(self._run, self._ranks)

        def count() -> None:
            for note in notes:
                self._on_note(note)
            self._commits = _commits(self._run)
            by_sequence = {commit.sequence: step for step, commit in self._commits.items()}
            self._sequence = max(by_sequence, default=0)
            self._parent = self._sequence or None
            if self._resumed_from is not None:
                self._parent = _sequence_in(self._run, self._resumed_from, self._commits)

        self._ranks.from_main(count)

    def _agreed_snapshot(
        self, *, train_config: str | None, model_files: Mapping[str, str | bytes], **given: Any
    ) -> Snapshot:
        """Ranks that hold different tensors would each write what another does not know of."""
        taken: list[Snapshot] = []

        compare = self._compares_buffers

        def take() -> Digests:
            files = checked_files(train_config, model_files)
            snapshot = take_snapshot(files=files, **given)
            taken.append(snapshot)
            return digests_of(snapshot, with_buffers=compare)

        digests = self._ranks.together_all(take)
        require_same(digests, taken[0], self._ranks)
        odd = differing_buffers(digests, taken[0], self._ranks)
        if odd:
            # Said once. It is not an error: statistics of each rank's own batches are common.
            self._compares_buffers = False
            if self._ranks.is_main:
                self._on_note(line_about_buffers(odd))
        return taken[0]

    def _write(self, snapshot: Snapshot, share: Share, ranks: Ranks) -> Path:
        """Write, flush, agree, commit: the main rank commits after every rank has flushed."""
        folder = StepFolder(Path(ranks.from_main(lambda: str(self._begin(snapshot.step)))))
        try:
            files = ranks.together_for_main(
                lambda: write_rank_files(folder, snapshot, share, ranks.rank, self._format)
            )
            weights = self._write_safetensors(folder, snapshot, share, ranks)
            notes = ranks.from_main(lambda: self._conclude(folder, snapshot, files, weights))
        except BaseException:
            # After an agreement that failed, no rank writes into the folder any more.
            if ranks.is_main:
                abandon(folder)
            raise
        # From here on the checkpoint exists: nothing may make it look as if the save had failed,
        # and a listener may take as long as it likes.
        path = self._run.step(snapshot.step).path
        ranks.while_main(
            lambda: self._after_commit(path, snapshot.step, notes),
            lambda: self._tell([f"{path}: saved; on_commit is slow, and all ranks wait for it."]),
        )
        return path

    def _begin(self, step: int) -> Path:
        assert self._lock is not None
        self._lock.check()
        return begin(self._run, step).path

    def _write_safetensors(
        self, folder: StepFolder, snapshot: Snapshot, share: Share, ranks: Ranks
    ) -> list[FileRecord]:
        if not self._format.has_safetensors:
            return []
        limit = parse_size(self._config.max_shard_size)
        files = write_safetensors(
            folder.pretrained_model, snapshot.weights, share.weights, ranks, limit
        )
        return dcp_writer.file_records(PRETRAINED_MODEL, files)

    def _conclude(
        self,
        folder: StepFolder,
        snapshot: Snapshot,
        files: list[RankFiles],
        weights: list[FileRecord],
    ) -> list[str]:
        """Main rank: write what exists once and commit; lines about what failed after that."""
        # Before the commit: a number that might have been committed is never given again.
        self._sequence += 1
        documents = with_sequence(snapshot.documents, self._sequence)
        late = finish_dcp(folder, files) + write_documents(folder, documents)
        early = [record for of_rank in files for record in of_rank.records] + weights
        return self._commit(folder, snapshot, early + late, paths_of(folder, late))

    def _commit(
        self,
        folder: StepFolder,
        snapshot: Snapshot,
        files: list[FileRecord],
        unflushed: list[Path],
    ) -> list[str]:
        assert self._lock is not None
        # Once more, as late as possible: this process may have been stopped for long, and the new
        # holder of the lock would lose its checkpoint to ours.
        self._lock.check()
        kind = snapshot.optimizer_class
        manifest = Manifest(
            step=snapshot.step,
            samples_seen=snapshot.samples_seen,
            sequence=self._sequence,
            topology=self._topology,
            checkpoint_format=self._format,
            files=tuple(sorted(files, key=lambda record: record.path)),
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            provenance=self._provenance,
            optimizer=None if kind is None else OptimizerRecord(class_name=kind),
            parent=self._parent,
        )
        notes = commit(self._run, folder, manifest, unflushed)
        self._commits[manifest.step] = Commit(manifest.sequence, manifest.parent)
        self._parent = manifest.sequence
        return notes

    def _after_commit(self, path: Path, step: int, notes: list[str]) -> None:
        # Announced first: retention may delete what the listener is about to read or link.
        try:
            if self._on_commit is not None:
                self._on_commit(path)
        except Exception as error:
            notes.append(f"{path}: saved; on_commit failed: {type(error).__name__}: {error}")
        try:
            notes += self._retire(step)
        except Exception as error:
            notes.append(f"{path}: saved; retention failed: {type(error).__name__}: {error}")
        self._tell(notes)

    def _tell(self, notes: list[str]) -> None:
        with contextlib.suppress(Exception):
            for note in notes:
                self._on_note(note)

    def _retire(self, step: int) -> list[str]:
        """Delete what retention lets go; lines about what cannot be deleted.

        A checkpoint whose manifest cannot be read stays, and counts for nothing: it may yet be
        mended.
        """
        notes: list[str] = []
        try:
            there = self._run.committed_steps()
        except OSError as error:
            return [f"{self._run.checkpoints}: old ones are not deleted: {reason(error)}"]
        self._commits = {k: n for k, n in self._commits.items() if k in there}
        last = read_last(self._run)
        doomed = superseded(
            self._commits,
            newest=step,
            keep_last=self._config.keep_last,
            keep_every=self._config.keep_every,
            protected=[] if last is None else [last],
        )
        line = line_of_descent(self._commits, step)
        abandoned = [old for old in doomed if old not in line]
        if abandoned:
            names = ", ".join(step_name(old) for old in abandoned)
            notes.append(
                f"{self._run.checkpoints}: deleting {names}: the run does not go on from there, "
                f"so {step_name(step)} does not descend from it."
            )
        for old in doomed:
            try:
                delete(self._run, old)
            except OSError as error:
                notes.append(f"{self._run.step(old).path}: not deleted: {reason(error)}")
        return notes


def _commits(run: RunFolder) -> dict[int, Commit]:
    found: dict[int, Commit] = {}
    for step in run.committed_steps():
        # A damaged manifest is reported by the call that wants to load it.
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(run.step(step))
            found[step] = Commit(manifest.sequence, manifest.parent)
    return found


def _sequence_in(run: RunFolder, path: str | Path, commits: Mapping[int, Commit]) -> int:
    """Of the checkpoint that `path` means, which is one of this run.

    Raises:
        CheckpointError: it is not, so retention would not know which checkpoints to keep.
    """
    found = resolve_checkpoint(path)
    step = step_of(found.name)
    if step is not None and step in commits and found.parent == run.checkpoints.resolve():
        return commits[step].sequence
    raise CheckpointError.of(
        f"resumed_from = {str(path)!r}",
        f"is not a checkpoint of {run.path} that can be read.",
        "Give the checkpoint of this run that training goes on from, or None for the newest.",
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("parallel-ckpt", "parallel-config", "parallel-engine", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
