"""From a snapshot to files: what each rank writes by itself, and what the main rank adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.formats.hashing import flush_files, hashed_file
from parallel_ckpt.layout import DCP, PRETRAINED_MODEL, TRAINING_STATE, StepFolder
from parallel_ckpt.ranks import Ranks
from parallel_ckpt.save import dcp as dcp_writer
from parallel_ckpt.save.snapshot import Snapshot
from parallel_ckpt.state.shards import owned
from parallel_ckpt.store.manifest import FileRecord
from parallel_config import CheckpointFormat


@dataclass(frozen=True)
class Share:
    """Names of the tensors whose boxes this rank writes or sends; decided once per save."""

    weights: frozenset[str]
    optimizer: frozenset[str]

    @classmethod
    def of(cls, snapshot: Snapshot, ranks: Ranks, form: CheckpointFormat) -> Share:
        """The share of this rank. No collective: every rank comes to the same division."""
        # The main rank writes safetensors alone, so spreading their boxes would only make it
        # receive more of them. DCP and the optimizer are written by all ranks at once.
        spread = not form.has_safetensors
        return cls(
            owned(snapshot.weights, ranks.rank, ranks.world_size, spread=spread),
            owned(snapshot.optimizer, ranks.rank, ranks.world_size, spread=True),
        )


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank wrote by itself, and its parts of the two DCP folders."""

    records: list[FileRecord]
    optimizer: dcp_writer.Part
    weights: dcp_writer.Part | None


def write_rank_files(
    folder: StepFolder, snapshot: Snapshot, share: Share, rank: int, form: CheckpointFormat
) -> RankFiles:
    """Write and flush what this rank writes by itself: its random states and its boxes."""
    record = _write(folder, folder.rng(rank), snapshot.rng)
    optimizer = {name: snapshot.optimizer[name] for name in share.optimizer}
    part = dcp_writer.write_part(folder.optimizer, optimizer, rank)
    records = [record, *_optimizer_records(folder, part.files)]
    model = None
    if form.has_dcp:
        weights = {name: snapshot.weights[name] for name in share.weights}
        model = dcp_writer.write_part(folder.dcp, weights, rank)
        records += _weights_records(model.files)
    # Each rank flushes what it wrote: the main rank cannot flush the page cache of another host.
    flush_files(paths_of(folder, records))
    return RankFiles(records, part, model)


def paths_of(folder: StepFolder, records: Sequence[FileRecord]) -> list[Path]:
    """Where the files of records lie."""
    return [folder.path / record.path for record in records]


def finish_dcp(folder: StepFolder, files: Sequence[RankFiles]) -> list[FileRecord]:
    """Write the metadata of the DCP folders that all ranks wrote; the caller flushes it."""
    written = dcp_writer.finish(folder.optimizer, [of_rank.optimizer for of_rank in files])
    records = _optimizer_records(folder, written)
    models = [of_rank.weights for of_rank in files if of_rank.weights is not None]
    if models:
        records += _weights_records(dcp_writer.finish(folder.dcp, models))
    return records


def write_documents(folder: StepFolder, documents: Mapping[str, bytes]) -> list[FileRecord]:
    """Write the files that exist once; the caller flushes them."""
    records = []
    for relative, content in documents.items():
        path = folder.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        records.append(_write(folder, path, content))
    return records


def _write(folder: StepFolder, path: Path, content: bytes) -> FileRecord:
    with hashed_file(path, flush=False) as file:
        file.write(content)
    relative = path.relative_to(folder.path).as_posix()
    return FileRecord(path=relative, size_bytes=file.size_bytes, checksum=file.checksum)


def _optimizer_records(
    folder: StepFolder, files: Mapping[str, tuple[int, str]]
) -> list[FileRecord]:
    return dcp_writer.file_records(f"{TRAINING_STATE}/{folder.optimizer.name}", files)


def _weights_records(files: Mapping[str, tuple[int, str]]) -> list[FileRecord]:
    return dcp_writer.file_records(f"{PRETRAINED_MODEL}/{DCP}", files)
