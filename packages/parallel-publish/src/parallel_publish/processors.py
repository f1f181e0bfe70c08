"""What a processor must offer to be published beside its model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Processor(Protocol):
    """Anything that writes itself into the model's folder; its class reads it back.

    The class has `from_pretrained(folder)`, which takes the folder that `save_pretrained` wrote to.
    File names must not collide with the model's: `config.json`, `model*.safetensors`.
    """

    def save_pretrained(self, folder: Path, /) -> None:
        """Write the processor's files into `folder`, which exists. No collective."""
