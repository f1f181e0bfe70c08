"""The folder that is published: weights, config, processors, card, train config, nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from parallel_ckpt import DamagedCheckpoint, read_manifest, resolve_checkpoint
from parallel_ckpt.layout import (
    DCP,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    TRAINING_STATE,
    StepFolder,
    belongs_to_weights,
)
from parallel_ckpt.store.integrity import Verify, file_problems
from parallel_ckpt.store.manifest import FileRecord
from parallel_config import ConfigError, Problem
from parallel_config.checkpoint import parse_size
from parallel_publish.card import CARD, CURVE, CardInfo, card_problems, loss_curve_svg, render_card
from parallel_publish.processors import Processor
from parallel_publish.retry import Stop, Stopped, never
from parallel_publish.sharing import DOCUMENTS

Dtype = Literal["keep", "fp32", "bf16", "fp16"]
_BUILT = ".built.json"
"""In a bundle of ours: the names of what was put into it, whatever a person adds later."""
_MODEL_FILES = re.compile(
    r"[^.].*\.(json|safetensors|jinja|spm|model)"
    r"|chat_template\.\w+|tokenizer\.[\w.]+|vocab\.(txt|bpe)|merges\.txt"
    rf"|{re.escape(CARD)}|{re.escape(CURVE)}|(LICENSE|NOTICE)(\.(md|txt))?"
)
"""What is sent of any folder, at its top: a person may keep anything else there."""
NEVER = (DCP, TRAINING_STATE)
"""Folders of a checkpoint that no published model holds."""


def write_files(
    folder: Path,
    files: Mapping[str, str | bytes],
    processors: Sequence[Processor] = (),
) -> None:
    """Write documents and processors beside the weights. No collective.

    Raises:
        ConfigError: a name leads out of the folder or takes the place of the weights.
    """
    for name, content in files.items():
        if Path(name).name != name or name in (".", "..") or belongs_to_weights(name):
            raise ConfigError.of(name, "cannot be the name of a file beside the weights.")
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    # A processor chooses its file names itself. Stamps show a collision without a read of all
    # weights.
    before = _weight_stamps(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    if _weight_stamps(folder) != before:
        raise ConfigError.of(
            folder,
            "had its weights overwritten by a processor. The processor must use other file names.",
        )


def checked_card(info: CardInfo, *, repo_id: str) -> str:
    """Text of a card.

    Raises:
        ConfigError: the Hub would refuse it.
    """
    problems = list(card_problems(info))
    if problems:
        raise ConfigError(problems)
    return render_card(info, repo_id=repo_id)


def write_card(folder: Path, info: CardInfo, *, repo_id: str) -> str:
    """Write README.md and the curve it shows; returns the card's text.

    Raises:
        ConfigError: the Hub would refuse the card.
    """
    text = checked_card(info, repo_id=repo_id)
    (folder / CARD).write_text(text, encoding="utf-8")
    if info.losses:
        (folder / CURVE).write_text(loss_curve_svg(info.losses), encoding="utf-8")
    return text


def bundle_checkpoint(
    path: str | Path,
    folder: Path,
    *,
    dtype: Dtype = "keep",
    max_shard_size: str = "5GB",
    stop: Stop = never,
) -> StepFolder:
    """Fill `folder` from a committed checkpoint, without ranks; returns the checkpoint.

    Weights are linked where they are safetensors already and nothing is to change, else converted.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        Stopped: `stop` was true.
    """

    def progress(done: int, total: int) -> None:
        if stop():
            raise Stopped

    step = StepFolder(resolve_checkpoint(path))
    source = step.pretrained_model
    names = _names(step)
    limit = parse_size(max_shard_size)
    if _is_linked(step, dtype, limit):
        # By checksum, because a link is made without a read. convert compares checksums as it
        # reads.
        refuse_damage(step, "full")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            _link_or_copy(source / name, folder / name)
        return step
    from parallel_ckpt.convert import convert

    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / ".converted"  # convert replaces a folder, and this one may be locked
    convert(step.path, output=fresh, dtype=dtype, max_shard_size=limit, progress=progress)
    for entry in fresh.iterdir():
        entry.replace(folder / entry.name)
    fresh.rmdir()
    for name in names:
        if not belongs_to_weights(name) and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
    return step


def bundle_bytes(step: StepFolder, *, dtype: Dtype, max_bytes: int) -> int:
    """Bytes that a checkpoint's bundle takes at most, for the check of the disk."""
    if _is_linked(step, dtype, max_bytes):
        # Links do not take room.
        return 0
    return sum(record.size_bytes for record in _model_records(step))


def bundle_files(folder: Path) -> dict[str, Path]:
    """Files to send by their path in the repository: what `seal` has listed, and a model's own.

    Raises:
        ConfigError: it is not a bundle: the weights are missing or damaged, or it contains parts of
            a checkpoint or a link out of it.
    """
    problems = list(bundle_problems(folder))
    names = _built(folder)
    # Also what a person added later, and all of a folder that was never sealed.
    names |= {entry.name for entry in folder.glob("*") if _MODEL_FILES.fullmatch(entry.name)}
    found = {name: folder / name for name in sorted(names) if (folder / name).is_file()}
    root = folder.resolve()
    problems += [
        Problem(str(path), "is a link that leads out of the folder.", "Copy the file there.")
        for path in found.values()
        # The client would follow the link and publish a file that was never meant.
        if not path.resolve().is_relative_to(root)
    ]
    if problems:
        raise ConfigError(problems, source=str(folder))
    return found


def left_out(folder: Path) -> list[str]:
    """What lies in a folder and is not sent, less hidden files; a folder ends with `/`."""
    sent = {Path(name).parts[0] for name in bundle_files(folder)}
    others = [entry for entry in sorted(folder.iterdir()) if entry.name not in sent]
    return [
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in others
        if not entry.name.startswith(".") and entry.name != "__pycache__"
    ]


def seal(folder: Path) -> None:
    """Note what a bundle of ours consists of, when it is built: all of it is sent later."""
    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    shown = [name for name in names if not name.startswith(".")]
    (folder / _BUILT).write_text(json.dumps(shown) + "\n", encoding="utf-8")


def _built(folder: Path) -> set[str]:
    try:
        listed = json.loads((folder / _BUILT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {str(name) for name in listed} if isinstance(listed, list) else set()


def remove_bundle(folder: Path, on_note: Callable[[str], None]) -> None:
    """Remove what `seal` has listed, and the folder unless a person has put something there."""
    for name in _built(folder):
        (folder / name).unlink(missing_ok=True)
    (folder / _BUILT).unlink(missing_ok=True)
    for below in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            below.rmdir()  # only where it is empty
    try:
        folder.rmdir()
    except OSError:
        others = ", ".join(sorted(entry.name for entry in folder.iterdir()))
        on_note(f"{folder} is kept, because it holds other files: {others}")


def bundle_problems(folder: Path) -> Iterator[Problem]:
    """One line for everything that keeps a folder from being published."""
    if not folder.is_dir():
        yield Problem(str(folder), "is not a folder.")
        return
    for name in NEVER:
        if (folder / name).exists():
            yield Problem(str(folder / name), "belongs to a checkpoint, not to a published model.")
    stored: set[str] = set()
    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".safetensors"]
    weights = [path for path in files if belongs_to_weights(path.name)]
    if not weights:
        yield Problem(str(folder), f"does not hold {SAFETENSORS}.")
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                stored |= set(opened.keys()) if path in weights else set()
        except (SafetensorError, OSError) as error:
            yield Problem(str(path), f"is damaged: {error}.")
    for name in DOCUMENTS:
        yield from _document_problems(folder / name)
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            yield Problem(str(index), f"is not an index of weights: {error!r}.")
            return
        # A loader trusts the index: a tensor that is missing there would be missing in the model.
        if listed != stored:
            yield Problem(
                str(index), f"lists {len(listed)} tensors, but the files hold {len(stored)}."
            )


def _document_problems(path: Path) -> Iterator[Problem]:
    """What is wrong with a JSON document, from which paths could not be taken out either."""
    if path.is_file():
        try:
            json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            yield Problem(str(path), f"is not a JSON document: {error}.")


def num_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights as they would be published, for the check of the disk."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def remove_stale_weights(folder: Path, written: set[str]) -> None:
    """Drop weight files that an earlier save left in a folder."""
    for entry in folder.iterdir():
        if belongs_to_weights(entry.name) and entry.name not in written:
            entry.unlink()


def refuse_damage(step: StepFolder, verify: Verify) -> None:
    """Check the files of a checkpoint's model, by size or by checksum.

    Raises:
        DamagedCheckpoint: names each that is missing or differs.
    """
    problems = list(file_problems(step, _model_records(step), verify))
    if problems:
        raise DamagedCheckpoint(problems, source=str(step.path))


def _model_records(step: StepFolder) -> list[FileRecord]:
    """Files that a bundle is made from; shards only where there is no safetensors."""
    prefix = step.pretrained_model.name + "/"
    records = [record for record in read_manifest(step).files if record.path.startswith(prefix)]
    # Shards are only read to convert them, which is not needed where safetensors are there.
    plain = [record for record in records if f"/{DCP}/" not in record.path]
    has_weights = any(belongs_to_weights(record.path.removeprefix(prefix)) for record in plain)
    return plain if has_weights else records


def _names(step: StepFolder) -> list[str]:
    """Names of the model's files that the checkpoint itself lists, its shards aside."""
    paths = [Path(record.path) for record in _model_records(step)]
    return [path.name for path in paths if path.parent.name == step.pretrained_model.name]


def _is_linked(step: StepFolder, dtype: Dtype, max_bytes: int) -> bool:
    """Whether the checkpoint's own weights are sent, not converted ones.

    A file above the limit is, if one tensor fills it: it cannot be split.
    """
    files = [step.pretrained_model / name for name in _names(step) if belongs_to_weights(name)]
    return dtype == "keep" and bool(files) and not any(_can_be_split(p, max_bytes) for p in files)


def _can_be_split(path: Path, max_bytes: int) -> bool:
    """Whether a file holds more than that, its header aside, and more than one tensor."""
    # The cheap test first: only a file above the limit is opened.
    if path.suffix != ".safetensors" or path.stat().st_size <= max_bytes:
        return False
    try:
        with open(path, "rb") as file:
            # A safetensors file begins with the length of its header in 8 bytes, little-endian.
            # The limit counts the tensors, not the header.
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        if path.stat().st_size - header_bytes <= max_bytes:
            return False
        with safe_open(path, framework="pt") as opened:
            return len(list(opened.keys())) > 1
    except (SafetensorError, OSError):
        return False  # the damage is reported when the whole file is read


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name where the file system lets us: a model is not copied to be read once."""
    target.unlink(missing_ok=True)
    try:
        if not belongs_to_weights(source.name):
            raise OSError("small files are copied, so that they can be edited")
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _weight_stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        entry.name: (entry.stat().st_size, entry.stat().st_mtime_ns)
        for entry in folder.iterdir()
        if belongs_to_weights(entry.name)
    }
