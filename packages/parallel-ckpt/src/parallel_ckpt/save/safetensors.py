"""Weights of a sharded model to safetensors files, box by box: no rank ever holds the model.

The main rank writes each file in order of its bytes. Boxes of other ranks are received one at a
time in that order; a tensor that is cut along a dim other than 0 is put together first, alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.hashing import HashingWriter, hashed_file
from parallel_ckpt.formats.safetensors import Form, header_bytes, index_bytes, pack
from parallel_ckpt.layout import SAFETENSORS_INDEX
from parallel_ckpt.ranks import MAIN, Ranks, all_ranks
from parallel_ckpt.state.model import model_shards
from parallel_ckpt.state.savable import savable
from parallel_ckpt.state.shards import Shard, flat_bytes, owned
from parallel_ckpt.state.torch_dtypes import safetensors_name

Files = dict[str, tuple[int, str]]
"""Size in bytes and checksum of files by name."""


Held = tuple[int, Box]
"""A part of a tensor, and the rank that holds it."""


def save_weights(model: nn.Module, folder: Path, *, max_shard_bytes: int = 5 * 10**9) -> Files:
    """Collective: every rank. Write the model's weights as safetensors into `folder`.

    One file `model.safetensors`, or several with an index where it would exceed
    `max_shard_bytes`. Dtypes stay as they are in the model. Returns size and checksum of each file
    by name.

    Raises:
        CheckpointError: the same on every rank when any rank failed.
    """
    ranks = all_ranks("save_weights")
    shards = ranks.together(lambda: savable(model_shards(model)))
    ranks.from_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    own = owned(shards, ranks.rank, ranks.world_size, spread=False)
    return write_safetensors(folder, shards, own, ranks, max_shard_bytes)


def write_safetensors(
    folder: Path,
    shards: Mapping[str, Shard],
    own: Collection[str],
    ranks: Ranks,
    max_shard_bytes: int,
) -> Files:
    """Collective: every rank. As `save_weights`, of shards, into a folder that exists.

    `own` names the boxes that this rank writes or sends.
    """
    mine = {name: shards[name].box for name in own}
    boxes = _by_tensor(ranks.gather(mine))
    # Headers are made on every rank: one that is too long must stop all of them before the first
    # box is sent.
    forms, names = ranks.together(lambda: _plan(shards, max_shard_bytes))
    if not ranks.is_main:
        for file_names in names.values():
            _send(file_names, shards, mine, ranks)
    return _receive_all(folder, names, forms, shards, boxes, ranks)


def _plan(
    shards: Mapping[str, Shard], max_shard_bytes: int
) -> tuple[dict[str, Form], dict[str, list[str]]]:
    """What headers say of each tensor, and the tensors of each file."""
    forms = {
        name: Form(safetensors_name(shard.local.dtype, name), shard.shape)
        for name, shard in shards.items()
    }
    names = pack(forms, max_shard_bytes)
    for tensors in names.values():
        header_bytes(tensors, forms)
    if len(names) > 1:
        index_bytes(names, forms)
    return forms, names


def _receive_all(
    folder: Path,
    names: Mapping[str, list[str]],
    forms: Mapping[str, Form],
    shards: Mapping[str, Shard],
    boxes: Mapping[str, list[Held]],
    ranks: Ranks,
) -> Files:
    """Main rank: write every file. Each box is received even after an error, as it will be sent."""
    files: Files = {}
    error: Exception | None = None
    if ranks.is_main:
        for file_name, tensors in names.items():
            pieces = _pieces(tensors, shards, boxes, ranks)
            written = _write_file(folder / file_name, header_bytes(tensors, forms), pieces, error)
            if isinstance(written, Exception):
                error = written
            else:
                files[file_name] = written

    def conclude() -> Files:
        if error is not None:
            raise error
        return files | (_write_index(folder, index_bytes(names, forms)) if len(names) > 1 else {})

    return ranks.from_main(conclude)


def _write_file(
    path: Path, header: bytes, pieces: Iterable[torch.Tensor], error: Exception | None
) -> tuple[int, str] | Exception:
    """Write a file, or only take the pieces when something went wrong before."""
    pieces = iter(pieces)
    if error is None:
        try:
            with hashed_file(path) as file:
                file.write(header)
                for piece in pieces:
                    _write_tensor(file, piece)
            return file.size_bytes, file.checksum
        except OSError as failed:
            error = failed
    for _ in pieces:
        continue
    return error


def _write_tensor(file: HashingWriter, tensor: torch.Tensor) -> None:
    if tensor.numel():
        file.write(as_bytes(tensor).numpy())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's contiguous bytes in host memory, as a flat uint8 tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return flat_bytes(plain.cpu().contiguous())


def _pieces(
    names: Sequence[str],
    shards: Mapping[str, Shard],
    boxes: Mapping[str, list[Held]],
    ranks: Ranks,
) -> Iterator[torch.Tensor]:
    """Host tensors whose bytes, one after another, are the data of a file."""
    for name in names:
        shard = shards[name]
        held = boxes.get(name, [])
        parts = ((box, _take(owner, box, shard, ranks)) for owner, box in held)
        if all(box.is_rows_of(shard.shape) for _, box in held):
            for _, part in parts:
                yield part
        else:
            whole = torch.empty(shard.shape, dtype=shard.local.dtype)
            for box, part in parts:
                whole[box.within(Box.whole(shard.shape))] = part
            yield whole


def _take(owner: int, box: Box, shard: Shard, ranks: Ranks) -> torch.Tensor:
    if owner == ranks.rank:
        return shard.local.cpu()
    part = torch.empty(box.sizes, dtype=shard.local.dtype)
    if part.numel():
        dist.recv(part.reshape(-1).view(torch.uint8), src=owner, group=ranks.group)
    return part


def _send(
    names: Sequence[str], shards: Mapping[str, Shard], mine: Mapping[str, Box], ranks: Ranks
) -> None:
    for name in names:
        if name in mine and shards[name].local.numel():
            dist.send(as_bytes(shards[name].local), dst=MAIN, group=ranks.group)


def _by_tensor(held: Sequence[Mapping[str, Box]]) -> dict[str, list[Held]]:
    boxes: dict[str, list[Held]] = {}
    for rank, of_rank in enumerate(held):
        for name, box in of_rank.items():
            boxes.setdefault(name, []).append((rank, box))
    return {name: sorted(parts, key=lambda part: part[1].offsets) for name, parts in boxes.items()}


def _write_index(folder: Path, text: bytes) -> Files:
    with hashed_file(folder / SAFETENSORS_INDEX) as file:
        file.write(text)
    return {SAFETENSORS_INDEX: (file.size_bytes, file.checksum)}
