"""`save_pretrained` and `from_pretrained` for any model: a folder, or a repository on the Hub.

class Regressor(PreTrainedModel):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        ...

model.save_pretrained("out")                    # every rank, sharded or not
model = Regressor.from_pretrained("user/name")
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from parallel_ckpt import resolve_checkpoint, save_weights
from parallel_ckpt.layout import StepFolder, belongs_to_weights
from parallel_ckpt.ranks import all_ranks
from parallel_ckpt.state.model import bare_module
from parallel_config import ConfigError
from parallel_config.checkpoint import parse_size
from parallel_publish.bundle import remove_stale_weights, write_files
from parallel_publish.config import is_repo_id
from parallel_publish.model_on_meta import (
    cast,
    fill,
    materialize,
    meta_names,
    parameters_on_meta,
    plain,
)
from parallel_publish.processors import Processor
from parallel_publish.retry import RetryPolicy

CONFIG = "config.json"


class PreTrainedModel(nn.Module):
    """A module that can be written to a folder and built again from it.

    By default `config.json` holds the constructor's arguments, which must be plain JSON values.
    A class built from something else overrides `config_document` and `from_config_document`.
    """

    _init_arguments: Mapping[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's arguments."""
        self = super().__new__(cls)
        object.__setattr__(self, "_init_arguments", _bound(cls, args, kwargs))
        return self

    def config_document(self) -> dict[str, Any]:
        """What `config.json` holds.

        Raises:
            ConfigError: an argument is not a plain value.
        """
        wrong = sorted(name for name, value in self._init_arguments.items() if not plain(value))
        if wrong:
            raise ConfigError.of(
                CONFIG,
                f"cannot hold {', '.join(wrong)} of {type(self).__name__}: only numbers, texts, "
                "booleans, None, and lists and dicts of them.",
                "Override config_document and from_config_document.",
            )
        return {"arguments": dict(self._init_arguments)}

    @classmethod
    def from_config_document(cls, document: Mapping[str, Any], **overrides: Any) -> Self:
        """Build the model, with fresh weights, from what `config_document` returned."""
        return cls(**{**document.get("arguments", {}), **overrides})

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        processors: Sequence[Processor] = (),
        max_shard_size: str = "5GB",
    ) -> Path:
        """Collective: every rank. Write config, weights and processors into `folder`.

        Gathers by itself, tensor by tensor, whatever shards or wraps the model. What an earlier
        call left in the folder is replaced once everything is written.

        Raises:
            ConfigError: the same on every rank, when any rank failed.
        """
        document = all_ranks().together(lambda: json.dumps(self.config_document(), indent=2) + "\n")
        return save_pretrained(
            self,
            folder,
            files={CONFIG: document},
            processors=processors,
            max_shard_size=max_shard_size,
        )

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        strict: bool = True,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        meta: bool = False,
        **overrides: Any,
    ) -> Self:
        """Build a model and fill it, in eval mode. No collective: each process reads for itself.

        `source` is a folder, a checkpoint, or a repository (`user/name`) of which `revision` is a
        branch, tag or commit. With `dtype` narrower weights are accepted and made. With `meta` no
        weight is ever initialised: for big models. Without `strict` tensors that only one side has
        are left alone. `overrides` replace constructor arguments.

        Raises:
            ConfigError: the folder does not exist, or does not hold a model.
            PublishError: the repository cannot be fetched.
            StateMismatch: lists the tensors that do not fit.
        """
        folder = find_pretrained(source, revision=revision, token=token)
        document = read_config(folder)
        where = torch.device(device) if device is not None else torch.device("cpu")
        if meta:
            with parameters_on_meta():
                model = cls.from_config_document(document, **overrides)
        else:
            model = cls.from_config_document(document, **overrides)
        # The cast is made on meta where that is possible, so that memory is only taken in the
        # final dtype.
        if dtype is not None:
            cast(model, dtype)
        # Noted before memory takes the place of meta: nothing tells them apart afterwards.
        must = meta_names(model)
        materialize(model, where)
        model.to(where)
        fill(model, folder, strict=strict, allow_cast=dtype is not None, must=must)
        return model.eval()


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    files: Mapping[str, str | bytes] | None = None,
    processors: Sequence[Processor] = (),
    max_shard_size: str = "5GB",
) -> Path:
    """Collective: every rank. Write any model's weights, with documents and processors beside.

    Raises:
        ConfigError: the same on every rank, when any rank failed; what was there is untouched
            unless everything was written.
    """
    target = Path(folder).expanduser().absolute()
    # Beside the target, thus on the same disk: the files are moved by a rename when all are there.
    fresh = target.with_name(f".{target.name}.saving")
    ranks = all_ranks()
    max_bytes = ranks.together(lambda: parse_size(max_shard_size))
    # A save that was killed may have left it.
    ranks.from_main(lambda: shutil.rmtree(fresh, ignore_errors=True))
    save_weights(bare_module(model), fresh, max_shard_bytes=max_bytes)

    def finish() -> None:
        try:
            write_files(fresh, files or {}, processors)
            _move(fresh, target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    ranks.from_main(finish)
    return target


def find_pretrained(
    source: str | Path, *, revision: str | None = None, token: str | None = None
) -> Path:
    """The folder of a model: as given, of a checkpoint, or fetched from the Hub.

    Raises:
        ConfigError: `source` is neither.
        PublishError: the repository cannot be fetched.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        # A folder with a model is that model; only otherwise may it be a run or a checkpoint.
        if (path / CONFIG).is_file() or any(belongs_to_weights(p.name) for p in path.iterdir()):
            require_safetensors(path, str(source))
            return path
        return StepFolder(resolve_checkpoint(path)).pretrained_model
    if not is_repo_id(str(source), namespace=True):
        raise ConfigError.of(source, "is neither a folder nor a repository such as user/name.")
    from parallel_publish.hub import download
    from parallel_publish.target import Target

    target = Target(
        repo_id=str(source), revision=revision or "main", token=token, retry=RetryPolicy(attempts=3)
    )
    # A repository may hold the run's checkpoints too, which no model needs.
    folder = download(target, ignore=["checkpoints/*"])
    require_safetensors(folder, f"{target.repo_id}@{target.revision}")
    return folder


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = (".h5", ".msgpack", ".gguf", ".onnx", ".tflite", ".npz")


def require_safetensors(folder: Path, source: str) -> None:
    """Refuse a folder without weights that can be read, by what it holds instead.

    Without this a model would list each of its tensors as missing.

    Raises:
        ConfigError: it does not hold a safetensors file of a whole model.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    stored = [name for name in names if name.endswith(".safetensors")]
    if any(not name.startswith("adapter_") for name in stored):
        return
    if stored:
        raise ConfigError.of(
            source,
            f"holds {', '.join(stored)}: an adapter, and not the model that it belongs to.",
            "Name the base model, or merge the adapter into it first.",
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ConfigError.of(
            source,
            f"holds weights only as pickles ({', '.join(pickles[:3])}), which are never read here: "
            "a pickle can run any code.",
            "If you trust it, write model.safetensors from it: safetensors.torch.save_file("
            "torch.load(file, weights_only=True), 'model.safetensors').",
        )
    others = ", ".join([name for name in names if name.endswith(_OTHERS)][:3])
    raise ConfigError.of(
        source,
        f"does not hold weights as safetensors{f', but {others}' if others else ''}.",
        "Name a folder or a branch with model.safetensors.",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The document in `config.json`.

    Raises:
        ConfigError: it is missing, or is not a JSON object.
    """
    path = folder / CONFIG
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError.of(path, "does not exist, so the model cannot be built.") from None
    except (OSError, ValueError) as error:
        raise ConfigError.of(path, f"cannot be read: {error}.") from error
    if not isinstance(document, dict):
        raise ConfigError.of(path, "is not a JSON object.")
    return document


def _move(fresh: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    written = {path.name for path in fresh.iterdir()}
    # The folder is not replaced as a whole: a person may keep other files in it.
    for name in sorted(written):
        # A rename replaces a file, but not a folder that has something in it.
        if (fresh / name).is_dir():
            shutil.rmtree(target / name, ignore_errors=True)
        os.replace(fresh / name, target / name)
    # Last: until the new weights are there, the old ones stay. A loader that takes every weight
    # file would mix old shards with new ones.
    remove_stale_weights(target, written)


def _bound(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with those of **kwargs among them; empty when a copy is being made."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    try:
        bound = signature.bind(None, *args, **kwargs)
    # copy and pickle call __new__ without arguments; a wrong call fails in __init__ with a better
    # text.
    except TypeError:
        return {}
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        # bind() keeps them in one dict under its own name, which a call could not take back.
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return {name: _listed(value) for name, value in found.items()}


def _listed(value: Any) -> Any:
    # As they are when read back: JSON has no tuples.
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
