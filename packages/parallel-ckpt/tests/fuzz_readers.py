"""Random damage to every kind of file that is read: `python fuzz_readers.py SECONDS [SEED]`.

Each trial changes the bytes of one genuine file of a golden checkpoint and reads it. What may
happen is that it reads, or is refused by an error of ours, soon and in little memory; anything else
is a surprise: it is printed with the seed that repeats it, and the exit status is 1.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_ckpt import StepFolder
from parallel_ckpt.convert import convert
from parallel_ckpt.errors import CheckpointError
from parallel_ckpt.formats.dcp import parse_metadata
from parallel_ckpt.formats.safetensors import read_header, read_index
from parallel_ckpt.inspect import inspect
from parallel_ckpt.store.manifest import read_manifest
from parallel_ckpt.verify import verify

GOLDEN = Path(__file__).parent / "golden" / "v1" / "good_fsdp2"
MAX_SECONDS = 5.0
MAX_BYTES = 8 << 30
INDEX = b'{"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "c"}}'

Trial = Callable[[Path, random.Random], None]


def main(arguments: list[str]) -> int:
    """Run trials for a number of seconds; 0 when none surprised."""
    seconds, seed = float(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0
    counts: dict[str, int] = {}
    surprises = 0
    end = time.monotonic() + seconds
    with _bounded_memory(), tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        while time.monotonic() < end:
            draw = random.Random(seed)
            trial = draw.choice(TRIALS)
            counts[trial.__name__] = counts.get(trial.__name__, 0) + 1
            surprises += _surprises(trial, Path(name), draw, seed)
            seed += 1
    print(f"{sum(counts.values())} trials, {surprises} surprises: {counts}")
    return 1 if surprises else 0


def _surprises(trial: Trial, folder: Path, draw: random.Random, seed: int) -> bool:
    begin = time.monotonic()
    try:
        trial(folder, draw)
    except CheckpointError:
        pass
    except Exception:
        print(f"{trial.__name__}, seed {seed}:\n{traceback.format_exc()}")
        return True
    took_s = time.monotonic() - begin
    if took_s > MAX_SECONDS:
        print(f"{trial.__name__}, seed {seed}: took {took_s:.1f} s")
    return took_s > MAX_SECONDS


def damaged(data: bytes, draw: random.Random) -> bytes:
    """`data` with bytes changed, cut out, put in, repeated, or set to what breaks bounds."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 1, 2, 4, 8, 64))
        match draw.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = draw.randbytes(length)
            case 3:
                changed[at : at + length] = draw.choice((b"\xff", b"\x00", b"\x7f")) * length
            case 4:
                other = draw.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + length]
            case _:
                changed = changed[: draw.randrange(len(changed) + 1)]
    return bytes(changed)


def dcp_metadata(folder: Path, draw: random.Random) -> None:
    data = (GOLDEN / "pretrained_model" / "dcp" / ".metadata").read_bytes()
    parse_metadata(damaged(data, draw), folder)


def dcp_folder(folder: Path, draw: random.Random) -> None:
    """A folder without a manifest: nothing but the readers themselves stands in the way."""
    source, target = folder / "dcp", folder / "out"
    shutil.copytree(GOLDEN / "pretrained_model" / "dcp", source, dirs_exist_ok=True)
    victim = draw.choice(sorted(source.iterdir()))
    victim.write_bytes(damaged(victim.read_bytes(), draw))
    try:
        convert(source, target)
    finally:
        assert [path.name for path in folder.glob(".*")] == []
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(source)


def safetensors(folder: Path, draw: random.Random) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damaged((GOLDEN / "pretrained_model" / path.name).read_bytes(), draw))
    read_header(path)


def index(folder: Path, draw: random.Random) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(damaged(INDEX, draw))
    read_index(path)


def manifest(folder: Path, draw: random.Random) -> None:
    path = folder / "manifest.json"
    path.write_bytes(damaged((GOLDEN / path.name).read_bytes(), draw))
    read_manifest(StepFolder(folder))


def checkpoint(folder: Path, draw: random.Random) -> None:
    """One changed file of a whole checkpoint never verifies."""
    step = folder / "000003"
    shutil.copytree(GOLDEN, step)
    try:
        victim = draw.choice(sorted(p for p in step.rglob("*") if p.is_file()))
        before = victim.read_bytes()
        victim.write_bytes(damaged(before, draw))
        is_changed = victim.read_bytes() != before and victim.name != "manifest.json"
        inspect(step)
        assert not (is_changed and verify(step).ok), f"{victim} verifies"
    finally:
        shutil.rmtree(step)


TRIALS: tuple[Trial, ...] = (dcp_metadata, dcp_folder, safetensors, index, manifest, checkpoint)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """What is in use now and a few gigabytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
