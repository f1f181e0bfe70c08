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
from parallel_ckpt.state.shards import Shard, owners
from parallel_ckpt.store.manifest import FileRecord
from parallel_config import CheckpointFormat


@dataclass(frozen=True)
class Own:
    """What one rank wrote by itself."""

    records: list[FileRecord]
    optimizer: dcp_writer.Part
    weights: dcp_writer.Part | None


def needed(snapshot: Snapshot, ranks: Ranks, form: CheckpointFormat) -> tuple[set[str], set[str]]:
    """Names of weights and of optimizer tensors that this rank will write or send."""

    def mine(shards: Mapping[str, Shard], spread: bool) -> set[str]:
        chosen = owners(shards, ranks.world_size, spread=spread)
        return {name for name, owner in chosen.items() if owner == ranks.rank}

    return mine(snapshot.weights, not form.has_safetensors), mine(snapshot.optimizer, True)


def write_own(folder: StepFolder, snapshot: Snapshot, ranks: Ranks, form: CheckpointFormat) -> Own:
    """Write and flush what this rank writes by itself: random states and its shards."""
    weights, optimizer = needed(snapshot, ranks, form)
    rng = folder.rng(ranks.rank)
    with hashed_file(rng, flush=False) as file:
        file.write(snapshot.rng)
    relative = rng.relative_to(folder.path).as_posix()
    records = [FileRecord(path=relative, size_bytes=file.size_bytes, checksum=file.checksum)]
    part = dcp_writer.write_part(
        folder.optimizer, {name: snapshot.optimizer[name] for name in optimizer}, ranks.rank
    )
    records += dcp_writer.file_records(f"{TRAINING_STATE}/{folder.optimizer.name}", part.files)
    model = None
    if form.has_dcp:
        model = dcp_writer.write_part(
            folder.dcp, {name: snapshot.weights[name] for name in weights}, ranks.rank
        )
        records += dcp_writer.file_records(f"{PRETRAINED_MODEL}/{DCP}", model.files)
    flush_files(paths(folder, records))
    return Own(records, part, model)


def paths(folder: StepFolder, records: Sequence[FileRecord]) -> list[Path]:
    """Where the files of records lie."""
    return [folder.path / record.path for record in records]


def finish_dcp(folder: StepFolder, own: list[Own]) -> list[FileRecord]:
    """Write the metadata of what all ranks wrote; the caller flushes."""
    files = dcp_writer.finish(folder.optimizer, [part.optimizer for part in own])
    records = dcp_writer.file_records(f"{TRAINING_STATE}/{folder.optimizer.name}", files)
    models = [part.weights for part in own if part.weights is not None]
    if models:
        files = dcp_writer.finish(folder.dcp, models)
        records += dcp_writer.file_records(f"{PRETRAINED_MODEL}/{DCP}", files)
    return records


def write_documents(folder: StepFolder, documents: Mapping[str, bytes]) -> list[FileRecord]:
    """Write the files that exist once; the caller flushes."""
    records = []
    for relative, content in documents.items():
        path = folder.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        with hashed_file(path, flush=False) as file:
            file.write(content)
        records.append(
            FileRecord(path=relative, size_bytes=file.size_bytes, checksum=file.checksum)
        )
    return records
