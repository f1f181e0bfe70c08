"""`ptrain doctor`: what this machine can run, and what is missing.

What can be tried is tried: two gloo ranks add numbers, a file is flushed, a port is opened.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel_config import ConfigError
from parallel_config.environment import (
    accelerate_variables,
    check_environment,
    environment_wins,
    launch_variables,
    requested_device,
)
from parallel_train.cli.exits import DONE, FAILED
from parallel_train.cli.parsing import Parsed
from parallel_train.data.config import EMBEDDED_ROOT

Level = Literal["ok", "note", "miss", "fail"]
"""ok: it is there. note: it works, but have a look. miss: an option is not there. fail: training
cannot run here."""

TORCHRUN_PORT = 29500
# Below these only a note is shown: training may still run.
ENOUGH_FILES = 1024
ENOUGH_SHARED_BYTES = 1 << 30
ENOUGH_DISK_BYTES = 1 << 30
# 8 MiB: enough to see the rate of a slow disk, over in a moment on any.
TRIAL_BYTES = 1 << 23
TRIAL_S = 10


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    text: str


def run(parsed: Parsed) -> int:
    """Print the findings. Returns 0 when training can run here, 1 otherwise."""
    folder = Path(parsed.command.output_dir).expanduser()
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "installed": _packages,
        "devices": _devices,
        "ranks": _ranks,
        "environment": _environment,
        "disk": lambda: _disk(folder),
        "options": _extras,
    }
    if parsed.command.dataset is not None:
        root = Path(parsed.command.dataset).expanduser()
        sections = {"dataset": lambda: _dataset(root)}
    findings = [(title, f) for title, look in sections.items() for f in _all(title, look)]
    if parsed.command.json:
        print(json.dumps([{"section": title, **vars(f)} for title, f in findings], indent=2))
    else:
        _show(findings)
    return FAILED if any(finding.level == "fail" for _, finding in findings) else DONE


def _all(title: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A look that fails is a finding: the doctor reports where others would crash."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except Exception as error:
        found.append(Finding(title, "fail", f"{type(error).__name__}: {error}"))
    return found


def _show(findings: list[tuple[str, Finding]]) -> None:
    signs = {"ok": "ok  ", "note": "note", "miss": "-   ", "fail": "FAIL"}
    last = ""
    for title, finding in findings:
        if title != last:
            print(f"{title}:")
        last = title
        print(f"  {signs[finding.level]}  {finding.name:<12} {finding.text}")
    failed = [finding.name for _, finding in findings if finding.level == "fail"]
    if last == "dataset":
        print(f"{len(failed)} problem(s)." if failed else "This dataset can be trained on.")
        return
    print(f"Training cannot run here: {', '.join(failed)}." if failed else "Training can run here.")


def _packages() -> Iterator[Finding]:
    """Our packages and what they require, each against the versions that are supported."""
    version = platform.python_version()
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "fail", version)
    ours = ("parallel-train", "parallel-engine", "parallel-ckpt", "parallel-publish")
    wanted: dict[str, set[str]] = {}
    for package in ours:
        for requirement in importlib.metadata.requires(package) or ():
            match = re.match(r"[\w.-]+", requirement)
            # A condition marks an extra, which `_extras` reports, or another platform.
            if match and ";" not in requirement:
                wanted.setdefault(match[0], set()).add(requirement[match.end() :])
    for name in ("parallel-train", *sorted(wanted)):
        yield _package(name, sorted(wanted.get(name, ())))


def _package(name: str, wanted: list[str]) -> Finding:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", f'missing; pip install "{name}{",".join(wanted)}"')
    broken = [rule for rules in wanted for rule in rules.split(",") if not meets(found, rule)]
    if broken:
        return Finding(name, "fail", f'{found}; pip install "{name}{",".join(sorted(broken))}"')
    return Finding(name, "ok", found)


def meets(version: str, rule: str) -> bool:
    """Whether a version meets `>=X` or `<X`; of other rules nothing is claimed."""
    match = re.fullmatch(r"(>=|<)([\d.]+)", rule.strip())
    if match is None:
        return True
    found, bound = _numbers(version), _numbers(match[2])
    return found >= bound if match[1] == ">=" else found < bound


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without trailing zeros: 2.15.0+cpu is (2, 15)."""
    release = re.match(r"[\d.]+", version)
    numbers = [int(part) for part in (release[0] if release else "").split(".") if part]
    # 2.0 and 2 are one version.
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _devices() -> Iterator[Finding]:
    import torch

    # The cores that this process may use; a container often has fewer than the machine.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("cpu", "ok", f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'}")
    asked = requested_device()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        text = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, bf16 "
        # By default torch counts emulation as support.
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        yield Finding(f"cuda:{index}", "ok", text + ("in hardware" if bf16 else "emulated, slow"))
    if not count:
        built = torch.version.cuda
        why = (
            f"torch is built for CUDA {built}, no device is seen" if built else "torch without CUDA"
        )
        yield Finding("cuda", "fail" if asked == "cuda" else "miss", f"{why}; runs use the CPU")
    if asked:
        yield Finding("device", "note", f"PARALLEL_DEVICE = {asked!r} decides")


def _ranks() -> Iterator[Finding]:
    """Whether several ranks can meet and talk on this host."""
    import torch
    import torch.distributed as dist

    # Port 0: the system chooses a free one.
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Finding("port", "ok", f"a free one found ({server.getsockname()[1]})")
    taken = _is_taken(TORCHRUN_PORT)
    text = f"{TORCHRUN_PORT}, torchrun's own, is {'taken: use --standalone' if taken else 'free'}"
    yield Finding("torchrun", "note" if taken else "ok", text)
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "gloo", "fail", "this torch does not have gloo: more than one rank cannot run"
        )
        return
    started = time.perf_counter()
    problem = _try_gloo()
    if problem:
        way = "Set GLOO_SOCKET_IFNAME to an interface that reaches the other ranks."
        yield Finding("gloo", "fail", f"two ranks on {socket.gethostname()}: {problem} {way}")
    else:
        seconds = time.perf_counter() - started
        yield Finding("gloo", "ok", f"two ranks met in {seconds:.2f} s: DDP, FSDP2, HSDP on CPU")
    cuda = torch.cuda.is_available()
    if cuda and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding(
            "nccl", "ok", f"{version}: DDP, FSDP2, HSDP on {torch.cuda.device_count()} GPUs"
        )
    else:
        yield Finding("nccl", "fail" if cuda else "miss", "not in this torch" if cuda else "no GPU")


def _is_taken(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return False
    except OSError:
        return True


def _try_gloo() -> str:
    """What keeps two gloo ranks of this process from adding two numbers; nothing if they can."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    # Two threads and a store in memory: gloo is tried without processes or a port.
    store = HashStore()

    def rank(number: int) -> float:
        timeout = datetime.timedelta(seconds=TRIAL_S)
        group: Any = dist.ProcessGroupGloo(store, number, 2, timeout)
        value = torch.ones(1)
        group.allreduce([value]).wait()
        return float(value)

    try:
        with ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(rank, range(2)))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if sums == [2.0, 2.0] else f"1 + 1 gave {sums}."


def _environment() -> Iterator[Finding]:
    """Variables and limits that would change a run."""
    try:
        check_environment()
    except ConfigError as error:
        yield from (Finding(p.path, "fail", f"{p.message} {p.remedy}") for p in error.problems)
    names = ", ".join(accelerate_variables())
    if environment_wins():
        text = (
            "overrides the config, because PARALLEL_ALLOW_ACCELERATE_ENV is set: "
            f"{names or 'nothing'}"
        )
        yield Finding("accelerate", "note", text)
    else:
        yield Finding("accelerate", "ok", f"set, harmless: {names}" if names else "nothing set")
    left = launch_variables()
    if left:
        shown = ", ".join(f"{name} = {value!r}" for name, value in left.items())
        yield Finding(
            "launch",
            "note",
            f"left over from a launcher; unset them outside of a launcher: {shown}",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # -1 means no limit.
    few = 0 <= files < ENOUGH_FILES
    text = f"{files} may be open; loader workers need many: ulimit -n 4096" if few else str(files)
    yield Finding("open files", "note" if few else "ok", text)
    yield from shared_memory(Path("/dev/shm"))


def shared_memory(path: Path) -> Iterator[Finding]:
    """Loader workers hand batches over through it; containers often have 64 MB."""
    if not path.is_dir():
        return
    free = shutil.disk_usage(path).free
    text = f"{free / 1e9:.1f} GB free in {path}"
    if free < ENOUGH_SHARED_BYTES:
        text += "; with --dataset.num_workers a batch may not fit: docker run --shm-size 8g"
    yield Finding("shared mem", "ok" if free >= ENOUGH_SHARED_BYTES else "note", text)


def _disk(folder: Path) -> Iterator[Finding]:
    """Whether checkpoints written below `folder` will be durable."""
    # The run folder need not exist yet: its first parent that does lies on the same disk.
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free
    yield Finding(
        "space", "ok" if free > ENOUGH_DISK_BYTES else "note", f"{free / 1e9:.1f} GB at {existing}"
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".ptrain-doctor-", dir=existing) as trial:
            yield from _durability(Path(trial))
    except OSError as error:
        text = f"{existing} cannot be written: {error.strerror}. Use --output_dir."
        yield Finding("write", "fail", text)
    embedded = (EMBEDDED_ROOT / "meta/info.json").is_file()
    yield Finding("dataset", "ok" if embedded else "fail", f"embedded one at {EMBEDDED_ROOT}")


def _dataset(root: Path) -> Iterator[Finding]:
    """Everything in a dataset's folder, all problems at once."""
    from parallel_train.data.opening import examine  # it imports torch

    found = examine(root)
    yield from (Finding("holds", "ok", fact) for fact in found.facts)
    for number, problem in enumerate(found.problems, 1):
        yield Finding(f"problem {number}", "fail", f"{problem.message} {problem.remedy}")


def _durability(folder: Path) -> Iterator[Finding]:
    started = time.perf_counter()
    with (folder / "file").open("wb") as file:
        # Random bytes: a file system that compresses would show a rate of its own.
        file.write(os.urandom(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())
    rate = TRIAL_BYTES / (time.perf_counter() - started)
    yield Finding("flush", "ok", f"files reach the disk, {rate / 1e6:.0f} MB/s")
    # A rename is durable only once its folder is flushed, and a checkpoint is committed by one.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        yield Finding("names", "ok", "folders can be flushed")
    except OSError:
        yield Finding("names", "note", "folders cannot be flushed; as on some network file systems")
    finally:
        os.close(descriptor)
    try:
        # Some file systems do not have links.
        os.symlink("file", folder / "link")
        yield Finding("links", "ok", "`last` is a link")
    except OSError:
        yield Finding("links", "note", "no links here: `last` will be a file that holds a name")


def _extras() -> Iterator[Finding]:
    """What the extras of parallel-train add."""
    wanted: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("parallel-train") or ():
        # Requires-Dist: NAME ... ; extra == "EXTRA"
        match = re.match(r"([\w.-]+).*;.*extra == ['\"]([\w-]+)['\"]", requirement)
        if match:
            wanted.setdefault(match[2], []).append(match[1])
    for extra, names in sorted(wanted.items()):
        missing = [name for name in names if not _is_installed(name)]
        text = f'pip install "parallel-train[{extra}]"' if missing else ", ".join(names)
        yield Finding(extra, "miss" if missing else "ok", text)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
