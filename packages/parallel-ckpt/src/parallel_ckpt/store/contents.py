"""What a committed checkpoint consists of: the files that its manifest lists, and no others.

Whatever else lies in its folder (a copy that somebody kept, what a dead conversion left) has no
checksum and is read by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parallel_ckpt.errors import DamagedCheckpoint
from parallel_ckpt.formats.dcp import DcpFolder, read_dcp
from parallel_ckpt.formats.dcp_index import read_index
from parallel_ckpt.formats.safetensors import read_tensors
from parallel_ckpt.formats.stored import StoredTensor
from parallel_ckpt.layout import DCP_INDEX, DCP_METADATA, MANIFEST, StepFolder, is_weight_file
from parallel_ckpt.store.manifest import FileRecord, Manifest, read_manifest


@dataclass(frozen=True)
class Contents:
    """A checkpoint's folder with its manifest. No collective, and no torch."""

    folder: StepFolder
    manifest: Manifest

    @classmethod
    def read(cls, folder: StepFolder) -> Contents:
        """Those of a committed checkpoint.

        Raises:
            CheckpointNotFound: the folder is not a checkpoint.
            DamagedCheckpoint: its manifest cannot be read.
        """
        return cls(folder, read_manifest(folder))

    @cached_property
    def records(self) -> dict[Path, FileRecord]:
        """Of every file, by its path."""
        return {self.folder.path / record.path: record for record in self.manifest.files}

    @property
    def safetensors(self) -> list[Path]:
        """The files of the weights, sorted; empty where they are kept as DCP alone."""
        files = (p for p in self.records if p.parent == self.folder.pretrained_model)
        return sorted(p for p in files if is_weight_file(p.name))

    def has_dcp(self, folder: Path) -> bool:
        """Whether a folder of it holds DCP shards."""
        return folder / DCP_METADATA in self.records

    def read_safetensors(self) -> dict[str, StoredTensor]:
        """The weights by name, from safetensors files.

        Raises:
            DamagedCheckpoint: a file cannot be read, or contradicts another.
        """
        index = self.folder.safetensors_index
        return read_tensors(self.safetensors, index if index in self.records else None)

    def read_dcp(self, folder: Path) -> DcpFolder:
        """What a folder of DCP shards holds.

        Raises:
            DamagedCheckpoint: its metadata cannot be read, or names a file that is not listed.
        """
        self.require(folder / DCP_METADATA)
        stored = self.stored_dcp(folder)
        self.require(*stored.files)
        return stored

    def dcp_document(self, folder: Path) -> Path:
        """What says where the tensors of a DCP folder lie: our index, or torch's metadata.

        An index that is not listed is not read: it may belong to other files.
        """
        index = folder / DCP_INDEX
        return index if index in self.records else folder / DCP_METADATA

    def stored_dcp(self, folder: Path) -> DcpFolder:
        """As `read_dcp`, whether or not the files are listed that the tensors lie in.

        Raises:
            DamagedCheckpoint: the document cannot be read.
        """
        has_index = self.dcp_document(folder).name == DCP_INDEX
        return read_index(folder) if has_index else read_dcp(folder)

    def read_bytes(self, path: Path) -> bytes:
        """A file that every checkpoint holds.

        Raises:
            DamagedCheckpoint: it is not listed.
        """
        self.require(path)
        return path.read_bytes()

    def require(self, *paths: Path) -> None:
        """Raise unless these files are part of the checkpoint.

        Raises:
            DamagedCheckpoint: names one that is not.
        """
        for path in paths:
            if path not in self.records:
                raise DamagedCheckpoint.of(path, f"is needed, but {MANIFEST} does not list it.")
