"""After a power cut: the old checkpoint or the new one, whole, and none that was acknowledged lost.

The calls of real saves on two ranks are recorded. The model of
docs/decisions/0015-what-a-power-cut-leaves.md says what may be on disk after each of them. Every
such state is made of real files and read by the readers that a resume uses.

`python test_power_loss.py 100000` is the large campaign (`nox -s power`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parallel_ckpt import (
    CheckpointError,
    CheckpointSaver,
    RunFolder,
    StepFolder,
    mend_run,
    newest_intact,
    read_manifest,
    read_start,
    resolve_checkpoint,
    restore,
)
from parallel_ckpt.convert import convert
from parallel_ckpt.layout import parse_step
from parallel_ckpt.store.commit import last_name, read_last
from parallel_ckpt.store.integrity import file_problems
from parallel_config import CheckpointConfig, CheckpointFormat, Topology
from parallel_testing.power_loss import (
    Blobs,
    Bound,
    Disk,
    Mutant,
    Recorder,
    State,
    crash_states,
    merged,
    mutants,
    read_tree,
    recorded,
    replay,
)
from parallel_testing.power_loss.calls import Call
from parallel_testing.ranks import run_ranks

RUN = "outputs/run"
OUTPUT = "exports/final"
RETIRED = re.compile(rf"{RUN}/checkpoints/(\d+)")
HIDDEN = re.compile(r"/\.\d+\.(tmp|del)-[0-9a-z]+/")
FORMS = ("safetensors_dcp", "dcp", "stuck")
"""Recordings; see `recording`."""
QUICK = Bound(torn=False, subsets=5)
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# --- What is recorded


def build(value: float, *, shard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and a moment that hold `value` everywhere."""
    model = nn.Linear(32, 16)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def digest_of(step: Path) -> str:
    return hashlib.sha256((step / "manifest.json").read_bytes()).hexdigest()


def note(recorder: Recorder, path: Path) -> None:
    """The caller is told that a checkpoint is there."""
    recorder.mark(f"{path.name} {digest_of(path)}")


def save_all(root: Path, form: str) -> list[Call]:
    """Two ranks: a save, the same step again, two more of which the last deletes the first."""
    config = CheckpointConfig(keep_last=2)
    with recorded(root) as recorder:
        saver = CheckpointSaver(
            root / RUN,
            topology=Topology(dp_shard=2),
            checkpoint_format=CheckpointFormat(form),
            config=config,
            on_note=lambda text: None,
            on_commit=lambda path: note(recorder, path),
        )
        with saver:
            for step, value in ((1, 1.0), (1, 1.5), (2, 2.0), (3, 3.0)):
                model, optimizer = build(value, shard=True)
                path = saver.save(
                    step=step,
                    samples_seen=step,
                    model=model,
                    optimizer=optimizer,
                    data_state=value,
                    train_config="{}",
                    model_files={"config.json": "{}"},
                )
                if dist.get_rank() == 0:
                    note(recorder, path)
    return recorder.calls


def save_with_a_stuck_file(root: Path) -> list[Call]:
    """What a replacement leaves cannot be removed as a whole; later its step is deleted."""
    unlink, scandir, is_stuck = os.unlink, os.scandir, True

    def refusing(path: Any, *, dir_fd: int | None = None) -> None:
        if is_stuck and str(path) == "manifest.json":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, dir_fd=dir_fd)

    def manifest_last(path: Any = ".") -> Any:
        if not isinstance(path, int):  # `rmtree` alone lists open folders
            return scandir(path)
        with scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name == "manifest.json")
        return contextlib.nullcontext(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", refusing)
        patch.setattr(os, "scandir", manifest_last)
        with recorded(root) as recorder:
            config = CheckpointConfig(keep_last=1)
            saver = CheckpointSaver(
                root / RUN, topology=Topology(), config=config, on_note=lambda text: None
            )
            for step, value in ((1, 1.0), (1, 1.5), (2, 2.0)):
                model, optimizer = build(value)
                is_stuck = value == 1.5
                note(
                    recorder,
                    saver.save(
                        step=step,
                        samples_seen=step,
                        model=model,
                        optimizer=optimizer,
                        data_state=value,
                    ),
                )
            saver.close()
    return recorder.calls


def mend_after_kill(calls: Sequence[Call]) -> Iterator[tuple[Call, ...]]:
    """Killed after a rename in the run, then mended by another process: the calls of both.

    A kill loses nothing by itself: the page cache stays. So the mending works on the live tree.
    """
    for index, call in enumerate(calls):
        if call.kind != "rename" or "/checkpoints/" not in call.target or ".tmp" in call.target:
            continue
        with tempfile.TemporaryDirectory() as name:
            root = Path(name).resolve()
            Blobs(root / "blobs").materialize(replay(calls[: index + 1]).live(), root / "live")
            with recorded(root / "live") as recorder:
                mend_run(root / "live" / RUN)
            both = (*calls[: index + 1], *recorder.calls)
            assert replay(both).live() == read_tree(root / "live"), "a call was not recorded"
            yield both


def convert_all(root: Path) -> list[Call]:
    """Shards to safetensors beside them, then to a new folder, then in place of the shards."""
    steps = RunFolder(root / RUN)
    with recorded(root) as recorder:
        convert(steps.step(2).path)
        note(recorder, steps.step(2).path)
        convert(steps.step(3).path, root / OUTPUT)
        recorder.mark(OUTPUT)
        convert(steps.step(3).path, delete_dcp=True)
        note(recorder, steps.step(3).path)
    return recorder.calls


@cache
def recording(form: str) -> tuple[Call, ...]:
    """The calls of all ranks; of shards alone, also those of the conversions."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        if form == "stuck":
            calls = merged(run_ranks(save_with_a_stuck_file, 1, root, init=False))
        else:
            calls = merged(run_ranks(save_all, 2, root, form))
        if form == "dcp":
            calls += merged(run_ranks(convert_all, 1, root, init=False))
        assert replay(calls).live() == read_tree(root), "a call was not recorded"
    return tuple(calls)


# --- What must hold


@dataclass
class Promises:
    """What the caller was told after each call, and which versions of a step there are."""

    versions: dict[int, list[str]]
    """Digests of manifests in the order of their commits."""
    after: list[dict[int, int]]
    """By number of calls: steps that must be there, and the least version of each."""
    newest: list[int | None]
    """By number of calls: the step acknowledged last."""
    exported: list[bool]
    export: dict[str, bytes]
    """Files of the folder that a conversion made."""

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Promises:
        versions: dict[int, list[str]] = {}
        promised: dict[int, int] = {}
        newest: int | None = None
        is_exported = False
        made = cls(versions, [{}], [None], [False], {})
        disk = Disk()
        for call in calls:
            disk.apply(call)
            if call.kind == "mark" and call.target == OUTPUT:
                is_exported = True
                held = disk.live().items()
                made.export = {p: c for p, c in held if p.startswith(OUTPUT) and c is not None}
            elif call.kind == "mark":
                name, digest = call.target.split()
                known = versions.setdefault(int(name), [])
                known += [] if digest in known else [digest]
                promised = {**promised, int(name): known.index(digest)}
                newest = int(name) if newest is None else max(newest, int(name))
            elif call.kind == "rename" and ".del-" in call.target:
                # Retention has begun to take it away.
                gone = RETIRED.fullmatch(call.path)
                promised = {k: n for k, n in promised.items() if gone is None or k != int(gone[1])}
            made.after.append(promised)
            made.newest.append(newest)
            made.exported.append(is_exported)
        return made


class Judge:
    """Reads states as real files, each distinct one once."""

    def __init__(self, work: Path, calls: Sequence[Call]) -> None:
        self.blobs = Blobs(work / "blobs")
        self.root = work / "tree"
        self.promises = Promises.of(calls)
        self.known: dict[tuple[object, ...], list[str]] = {}
        """Faults by what readers can see and what was promised."""
        self.outcomes: set[tuple[object, ...]] = set()
        """Folders after mending that were resumed."""
        self._read: dict[tuple[tuple[str, int], ...], int | None] = {}

    def faults(self, state: State, told: Promises, *, anew: bool = False) -> list[str]:
        """What is wrong with a state."""
        after = state.after
        key = (visible(state), *told.after[after].items(), told.newest[after], told.exported[after])
        if key not in self.known or anew:
            self.blobs.materialize(state.tree, self.root)
            found = list(self._judge(told.after[after], told.newest[after], told.exported[after]))
            assert self.known.setdefault(key, found) == found, "a reader sees what is hidden"
            if not found:
                self._resume()
        return self.known[key]

    def _judge(
        self, promised: dict[int, int], newest: int | None, is_exported: bool
    ) -> Iterator[str]:
        run = RunFolder(self.root / RUN)
        yield from self._torn(run, "before mending")
        if (
            run.committed_steps()
            and self._version(StepFolder(resolve_checkpoint(run.path))) is None
        ):
            yield "torn: the run folder means a checkpoint that is not whole"
        if newest is not None and (parse_step(last_name(run) or "") or 0) < newest:
            yield "lost: `last` does not name the checkpoint acknowledged last"
        mend_run(run.path)
        yield from self._torn(run, "after mending")
        # Every folder was read in full just now.
        path, skipped = newest_intact(run.path, verify="fast")
        if skipped:
            yield "torn: a resume has to skip a checkpoint"
        for step, least in promised.items():
            version = self._version(run.step(step))
            if version is None or version < least:
                yield f"lost: {step} was acknowledged"
        if newest is not None and (path is None or int(path.name) < newest):
            yield "lost: a resume takes an older checkpoint than the one acknowledged last"
        if newest is not None and (read_last(run) or 0) < newest:
            yield "lost: `last` is older than the checkpoint acknowledged last"
        if (self.root / OUTPUT).exists():
            held = read_tree(self.root / OUTPUT)
            if {
                f"{OUTPUT}/{n}": c for n, c in held.items() if c is not None
            } != self.promises.export:
                yield "torn: the exported folder is not whole"
        elif is_exported:
            yield "lost: the exported folder"

    def _torn(self, run: RunFolder, when: str) -> Iterator[str]:
        for step in run.committed_steps():
            if self._version(run.step(step)) is None:
                yield f"torn: {step} is not whole {when}"

    def _version(self, folder: StepFolder) -> int | None:
        """Which version a folder holds, all of it; None for none, or for a mixture.

        Files are links to contents that do not change: what was read once is not read again.
        """
        links = tuple(_links(str(folder.path), ""))
        if links not in self._read:
            self._read[links] = self._read_version(folder)
        return self._read[links]

    def _read_version(self, folder: StepFolder) -> int | None:
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            return None
        known = self.promises.versions.get(manifest.step, [])
        digest = digest_of(folder.path)
        if digest not in known or list(file_problems(folder, manifest.files, "full")):
            return None
        return known.index(digest)

    def _resume(self) -> None:
        """Load what a resume takes, once for each folder that mending can leave."""
        run = RunFolder(self.root / RUN)
        path, _ = newest_intact(run.path, verify="fast")
        if path is None:
            return
        outcome = (path.name, digest_of(path), read_last(run))
        if outcome not in self.outcomes:
            self.outcomes.add(outcome)
            start = read_start(path, topology=Topology(dp_shard=2))
            model, optimizer = build(-1.0)
            restore(path, model, optimizer)
            assert {v for p in model.parameters() for v in p.flatten().tolist()} == {
                start.data_state
            }


def visible(state: State) -> bytes:
    """What a reader can see: of a folder that is being written or removed, only its name."""
    seen = b"".join(p.encode() + b"\0" + d for p, d in state.parts if not is_hidden(p))
    return hashlib.blake2b(seen, digest_size=16).digest()


@cache
def is_hidden(path: str) -> bool:
    """Whether a path lies in a folder that readers do not look into."""
    return HIDDEN.search(path) is not None


def _links(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _links(entry.path, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name, entry.inode()


@dataclass
class Tally:
    """What a campaign has seen."""

    trees: set[bytes] = field(default_factory=set)
    """Distinct ones."""
    read: int = 0
    """Distinct ones to a reader, with what was promised at that moment."""
    outcomes: set[tuple[object, ...]] = field(default_factory=set)
    """Distinct folders after mending; each was resumed."""
    wrong: Counter[str] = field(default_factory=Counter)


def check(
    judge: Judge,
    calls: Sequence[Call],
    bound: Bound,
    *,
    part: tuple[int, int] = (0, 1),
    stop: bool = False,
    every: int = 50,
) -> Tally:
    """Judge every state of a bound; with `part` only one share of them.

    Every so many states one is read from its files although a reader cannot tell it from one that
    was read before.
    """
    told = Promises.of(calls)
    tally = Tally()
    former: object = None
    seen: set[bytes] = set()
    for state in crash_states(calls, bound):
        if state.digest[0] % part[1] != part[0]:
            continue
        promise = (told.after[state.after], told.newest[state.after], told.exported[state.after])
        if promise != former:
            former, seen = promise, set()  # the same tree may be right before an acknowledgement
        if state.digest in seen:
            continue
        seen.add(state.digest)
        tally.trees.add(state.digest)
        faults = judge.faults(state, told, anew=len(tally.trees) % every == 0)
        tally.wrong.update(faults)
        if faults and stop:
            break
    assert not judge.blobs.changed()
    tally.read, tally.outcomes = len(judge.known), judge.outcomes
    return tally


def faults_of_mutants(form: str, work: Path) -> dict[str, str | None]:
    """For each flush and rename of the product, a fault that shows when it is taken out."""
    calls = recording(form)
    judge = Judge(work, calls)
    found = {mutant.name: _fault(judge, mutant) for mutant in mutants(calls)}
    for both in mend_after_kill(calls):
        # Renames of a mending put names right for readers; `test_mend.py` misses those.
        for mutant in mutants(both):
            if mutant.name.startswith("fsync") and not found.get(mutant.name):
                found[mutant.name] = _fault(judge, mutant)
    return found


def _fault(judge: Judge, mutant: Mutant) -> str | None:
    try:
        tally = check(judge, mutant.calls, QUICK, stop=True, every=1000)
    except OSError as error:
        return f"refused by the file system: {error}"
    return next(iter(tally.wrong), None)


# --- Tests


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder in memory where there is one: a state is a few dozen files."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.mark.parametrize("form", FORMS)
def test_the_recorded_calls_give_the_real_tree(form: str) -> None:
    assert len(recording(form)) > 150  # `recording` compares the trees


@pytest.mark.parametrize("form", ["dcp", "stuck"])
def test_no_state_loses_or_mixes_checkpoints(form: str, work: Path) -> None:
    calls = recording(form)
    tally = check(Judge(work, calls), calls, QUICK)
    assert tally.wrong == {}
    assert len(tally.trees) > 500
    assert len(tally.outcomes) >= 4


def test_killed_and_mended_before_the_power_fails(work: Path) -> None:
    calls = recording("stuck")
    judge = Judge(work, calls)
    killed = list(mend_after_kill(calls))
    assert len(killed) > 8
    for both in killed[::3]:
        assert check(judge, both, QUICK).wrong == {}


def test_every_flush_and_rename_of_a_commit_is_needed(work: Path) -> None:
    found = faults_of_mutants("stuck", work)
    assert len(found) > 20
    assert [name for name, fault in found.items() if fault is None] == []


def test_one_block_that_is_missing_is_seen(work: Path) -> None:
    """A flush taken out, and the file is there but for some of its blocks, at its full size."""
    calls = recording("stuck")
    name = "pretrained_model/model.safetensors"
    mutant = next(m for m in mutants(calls) if m.name.startswith("fsync") and name in m.name)
    flushes = [k for k, c in enumerate(calls) if c.kind == "fsync" and c.path.endswith(name)]
    whole = {replay(calls[:k]).live()[calls[k].path] for k in flushes}
    judge, told = Judge(work, calls), Promises.of(mutant.calls)
    torn = [
        state
        for state in crash_states(mutant.calls[:90], Bound(subsets=0))
        if (held := state.tree.get(f"{RUN}/checkpoints/000001/{name}"))
        and isinstance(held, bytes)
        and held not in whole
        and any(len(held) == len(good) for good in whole if isinstance(good, bytes))
    ]
    assert len({state.digest for state in torn}) > 5
    assert all(judge.faults(state, told) for state in torn[:: len(torn) // 5])


def campaign(number: int, processes: int) -> int:
    """Judge at least `number` distinct states; print what was found. Returns what was wrong."""
    failed = 0
    for form in FORMS:
        calls = recording(form)
        print(f"{form}: {len(calls)} calls", flush=True)
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            samples = number // len(FORMS) // len(calls)  # beside the states of the bound
            jobs = [(calls, samples, (k, processes)) for k in range(processes)]
            tallies = pool.starmap(_one_part, jobs)
        wrong: Counter[str] = sum((tally.wrong for tally in tallies), Counter())
        trees = sum(len(tally.trees) for tally in tallies)
        print(
            f"  {trees} distinct states, {sum(tally.read for tally in tallies)} to a reader; "
            f"{len(set().union(*(tally.outcomes for tally in tallies)))} resumed; "
            f"torn {_count(wrong, 'torn')}, lost {_count(wrong, 'lost')}",
            flush=True,
        )
        failed += sum(wrong.values())
        for fault, count in wrong.most_common(10):
            print(f"    {count} x {fault}")
    return failed + _missed()


def _count(wrong: Counter[str], kind: str) -> int:
    return sum(count for fault, count in wrong.items() if fault.startswith(kind))


def _missed() -> int:
    """Print for each flush and rename how its absence shows; how many are caught nowhere."""
    found: dict[str, str | None] = {}
    for form in FORMS:
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            for mutant, fault in faults_of_mutants(form, Path(name)).items():
                found[mutant] = found.get(mutant) or fault
    for mutant, fault in sorted(found.items()):
        print(f"{mutant}: {fault or 'NOT CAUGHT'}")
    missed = sum(fault is None for fault in found.values())
    print(f"{len(found) - missed} of {len(found)} mutants caught")
    return missed


def _one_part(calls: Sequence[Call], samples: int, part: tuple[int, int]) -> Tally:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        bound = Bound(samples=samples)
        return check(Judge(Path(name), calls), calls, bound, part=part, every=200)


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    sys.exit(bool(campaign(*(arguments + [100_000, 2][len(arguments) :]))))
