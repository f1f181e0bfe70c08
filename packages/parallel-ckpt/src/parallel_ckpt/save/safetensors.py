"""Weights of a sharded model to safetensors files, box by box: no rank ever holds the model.

The main rank writes each file in order of its bytes. Boxes of other ranks are received one at a
time in that order; a tensor that is cut along a dim other than 0 is put together first, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from parallel_ckpt.errors import RankLost
from parallel_ckpt.formats.box import Box
from parallel_ckpt.formats.hashing import HashingWriter, hashed_file
from parallel_ckpt.formats.safetensors import Form, header_bytes, index_bytes, pack
from parallel_ckpt.layout import SAFETENSORS_INDEX
from parallel_ckpt.ranks import Ranks, all_ranks
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
    files: Files = {}
    error: Exception | None = None
    if ranks.is_main:
        files, error = _receive_all(folder, names, forms, shards, boxes, ranks)
    else:
        for file_names in names.values():
            error = _send(file_names, shards, mine, ranks) or error
    try:
        ranks.agree(error)
        return ranks.from_main(lambda: files | _write_index(folder, names, forms))
    except BaseException:
        # In their place a rank that failed has sent zeros. Such a file must not be left behind.
        if ranks.is_main:
            for name in files:
                (folder / name).unlink(missing_ok=True)
        raise


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
) -> tuple[Files, Exception | None]:
    """Main rank: write every file. Each box is received even after an error, as it will be sent."""
    files: Files = {}
    error: Exception | None = None
    for file_name, tensors in names.items():
        inbox = _Inbox(tensors, shards, boxes, ranks)
        try:
            if error is None:
                files[file_name] = _write_file(folder / file_name, tensors, forms, inbox)
        except RankLost:
            raise  # nothing more will come
        # Whatever its class: the other ranks send on, and wait for one that does not receive.
        except Exception as failed:
            error = failed
        inbox.drain()
    return files, error


def _write_file(
    path: Path, tensors: Sequence[str], forms: Mapping[str, Form], inbox: _Inbox
) -> tuple[int, str]:
    with hashed_file(path) as file:
        file.write(header_bytes(tensors, forms))
        for name in tensors:
            for piece in inbox.pieces(name):
                _write_tensor(file, piece)
    return file.size_bytes, file.checksum


def _write_tensor(file: HashingWriter, tensor: torch.Tensor) -> None:
    if tensor.numel():
        file.write(as_bytes(tensor).numpy())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's contiguous bytes in host memory, as a flat uint8 tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return flat_bytes(plain.cpu().contiguous())


class _Inbox:
    """Main rank: the boxes of one file in the order in which they are sent."""

    def __init__(
        self,
        tensors: Sequence[str],
        shards: Mapping[str, Shard],
        boxes: Mapping[str, list[Held]],
        ranks: Ranks,
    ) -> None:
        self._shards, self._boxes, self._ranks = shards, boxes, ranks
        self._due = deque(
            (name, owner, box) for name in tensors for owner, box in boxes.get(name, [])
        )

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Host tensors whose bytes, one after another, are those of the next tensor."""
        shard, held = self._shards[name], self._boxes.get(name, [])
        if all(box.is_rows_of(shard.shape) for _, box in held):
            for _ in held:
                yield self._take()
        else:
            whole = torch.empty(shard.shape, dtype=shard.local.dtype)
            for _, box in held:
                whole[box.within(Box.whole(shard.shape))] = self._take()
            yield whole

    def drain(self) -> None:
        """Receive what is still due, and drop it."""
        while self._due:
            if self._due[0][1] == self._ranks.rank:
                self._due.popleft()
            else:
                self._take()

    def _take(self) -> torch.Tensor:
        name, owner, box = self._due[0]
        shard = self._shards[name]
        if owner == self._ranks.rank:
            self._due.popleft()
            return shard.local.cpu()
        part = torch.empty(box.sizes, dtype=shard.local.dtype)
        # Only now is it taken off the list: without memory for it, it would still be sent.
        self._due.popleft()
        if part.numel():
            self._ranks.receive(part.reshape(-1).view(torch.uint8), owner)
        return part


def _send(
    names: Sequence[str], shards: Mapping[str, Shard], mine: Mapping[str, Box], ranks: Ranks
) -> Exception | None:
    """Send this rank's boxes of a file. In place of one that cannot be read, zeros are sent.

    The main rank waits for each box, and would wait for ever for one that is left out.
    """
    error: Exception | None = None
    for name in names:
        if name in mine and shards[name].local.numel():
            try:
                data = as_bytes(shards[name].local)
            except Exception as failed:
                error = error or failed
                data = torch.zeros(shards[name].local.nbytes, dtype=torch.uint8)
            ranks.send(data)
    return error


def _by_tensor(held: Sequence[Mapping[str, Box]]) -> dict[str, list[Held]]:
    boxes: dict[str, list[Held]] = {}
    for rank, of_rank in enumerate(held):
        for name, box in of_rank.items():
            boxes.setdefault(name, []).append((rank, box))
    return {name: sorted(parts, key=lambda part: part[1].offsets) for name, parts in boxes.items()}


def _write_index(folder: Path, names: Mapping[str, list[str]], forms: Mapping[str, Form]) -> Files:
    if len(names) == 1:
        return {}
    with hashed_file(folder / SAFETENSORS_INDEX) as file:
        file.write(index_bytes(names, forms))
    return {SAFETENSORS_INDEX: (file.size_bytes, file.checksum)}
