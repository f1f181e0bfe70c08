"""Does the recorder see every call? A save on two ranks under `strace`, compared with what it saw.

`python packages/parallel-ckpt/tests/strace_of_a_save.py` needs `strace` (Linux). It records the
calls of `test_power_loss.py` once more, in a process that `strace` follows, and then compares for
each name below the run how often it was made, moved, removed and flushed, and how many bytes were
written to it. Not part of the tests: it needs a tool that is not installed everywhere.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from parallel_testing.power_loss import Call, merged
from parallel_testing.ranks import run_ranks
from test_power_loss import convert_all, save_all

FOLLOWED = (
    "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,"
    "rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,link,linkat,"
    "fsync,fdatasync,sync,syncfs,sync_file_range,truncate,ftruncate,fallocate,mmap"
)
LINE = re.compile(r"^\d+ +(?:<\.\.\. )?(\w+)(?:\(| resumed>)(.*)\) += (-?\d+)(.*)$")
UNFINISHED = re.compile(r"^(\d+) +(\w+)\((.*) <unfinished \.\.\.>$")
RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")
TEXT = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, |AT_FDCWD, )?"([^"]*)"')
KINDS = {
    "rename": "rename",
    "unlink": "remove",
    "rmdir": "remove",
    "mkdir": "mkdir",
    "symlink": "symlink",
    "link": "link",
    "fsync": "fsync",
    "fdatasync": "fsync",
}
Seen = Counter[tuple[str, ...]]
"""How often a kind of call was made on a path, and with the kind `write` how many bytes."""


def record(root: Path, to: Path) -> None:
    """Run the calls of all ranks, and keep them."""
    calls = merged(run_ranks(save_all, 2, root, "dcp"))
    calls += merged(run_ranks(convert_all, 1, root, init=False))
    to.write_bytes(pickle.dumps(calls))


def of_recorder(calls: Iterable[Call]) -> Seen:
    """What the recorder saw."""
    seen: Seen = Counter()
    for call in calls:
        if call.kind == "write":
            seen["write", call.path] += len(call.data)
        elif call.kind in ("rename", "link"):
            seen[call.kind, call.path, call.target] += 1
        elif call.kind not in ("mark", "truncate"):
            seen[call.kind, call.path] += 1
        else:
            seen[call.kind, call.path] += call.kind == "truncate"
    return +seen


def whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """A call that another process interrupted is printed in two parts."""
    begun: dict[tuple[str, str], str] = {}
    for line in lines:
        if found := UNFINISHED.match(line):
            begun[found[1], found[2]] = f"{found[1]} {found[2]}({found[3]}"
        elif found := RESUMED.match(line):
            yield begun.pop((found[1], found[2]), line) + found[3]
        else:
            yield line


def of_strace(lines: Iterable[str], root: str) -> Seen:
    """What the kernel was asked for below the root, calls that failed left out."""
    seen: Seen = Counter()
    exists: set[str] = set()
    for line in whole_lines(lines):
        found = LINE.match(line)
        if found is None or int(found[3]) < 0 or root not in line:
            continue
        name, arguments, result, rest = found.groups()
        for key, count in _read(name, arguments, int(result), rest, root, exists):
            seen[key] += count
    return +seen


def _read(
    name: str, arguments: str, result: int, rest: str, root: str, exists: set[str]
) -> Iterator[tuple[tuple[str, ...], int]]:
    paths = [_inside(os.path.join(a or "", b), root) for a, b in TEXT.findall(arguments)]
    opened = re.match(r"\d+<([^>]*)>", arguments)
    inside = _inside(opened[1], root) if opened else None
    kind = KINDS.get(name.removesuffix("2").removesuffix("at"))
    if name.startswith(("open", "creat")):
        if paths[0] is None:
            return
        if "O_CREAT" in arguments and paths[0] not in exists:
            yield ("create", paths[0]), 1
        elif "O_TRUNC" in arguments:
            yield ("truncate", paths[0]), 1
        exists.add(paths[0])
    elif kind in ("rename", "link"):
        if paths[0] is not None and paths[1] is not None:
            yield (kind, paths[0], paths[1]), 1
    elif kind == "symlink":
        if paths[-1] is not None:
            yield (kind, paths[-1]), 1
    elif kind == "fsync":
        if inside is not None:
            yield (kind, inside), 1
    elif kind is not None:
        if paths[0] is not None:
            exists.discard(paths[0])
            yield (kind, paths[0]), 1
    elif name in ("write", "pwrite64"):
        if inside is not None:
            yield ("write", inside), result
    elif name in ("ftruncate", "fallocate"):
        if inside is not None:
            yield ("truncate", inside), 1
    elif f"<{root}" not in arguments:  # a message between processes that names a path
        return
    elif name != "mmap" or ("MAP_SHARED" in arguments and "PROT_WRITE" in arguments):
        yield (f"not recorded: {name}", arguments), 1


def _inside(path: str, root: str) -> str | None:
    if path.startswith(root):
        return os.path.relpath(path.removesuffix(" (deleted)"), root)
    return None


def main() -> int:
    """Print what one of both saw alone; how many such calls there are."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        root, calls, trace = work / "root", work / "calls", work / "trace"
        root.mkdir()
        command = ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={FOLLOWED}", "-o", str(trace)]
        subprocess.run([*command, sys.executable, __file__, str(root), str(calls)], check=True)
        mine = of_recorder(pickle.loads(calls.read_bytes()))
        with trace.open(errors="replace") as lines:
            kernels = of_strace((line.rstrip("\n") for line in lines), str(root))
    for title, more in (("strace alone", kernels - mine), ("the recorder alone", mine - kernels)):
        print(f"seen by {title}: {len(more)}")
        for key, count in sorted(more.items())[:40]:
            print(f"  {count} x {' '.join(key)}")
    kinds: Counter[str] = Counter()
    for key, count in mine.items():
        kinds[key[0]] += count
    print("both saw:", dict(kinds) if mine == kernels else "not the same")
    return len(kernels - mine)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        record(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(bool(main()))
