"""Records the calls of this process that change what lies below a folder.

It stands under `os` and `open`, where Python code changes files. Native code that opens files by
itself is not seen: the replayed calls then give another tree than the real one, which the tests
compare, and `strace` shows the calls that are missing.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from parallel_testing.power_loss.calls import Call, Kind

_DEPTH = 2
"""Functions of the product that a call site names."""


class Recorder:
    """The calls so far. One per process and root."""

    def __init__(self, root: Path, package: str) -> None:
        self.root = os.path.realpath(root)
        self.package = f"{os.sep}{package}{os.sep}"
        self.calls: list[Call] = []
        # One call at a time: the order of the list is the order in which they reached the kernel.
        self.lock = threading.RLock()

    def mark(self, text: str) -> None:
        """Note at this moment that the caller was told something."""
        with self.lock:
            self.calls.append(Call("mark", time.monotonic_ns(), target=text))

    def add(self, kind: Kind, at: int, **fields: Any) -> None:
        """Append a call that began at `at`."""
        self.calls.append(Call(kind, at, site=self._site(), **fields))

    def inside(self, path: object, folder: int | None = None) -> str | None:
        """A path relative to the root; None when it lies elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        name = os.fsdecode(os.fspath(path))  # type: ignore[call-overload]
        if folder is not None:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        parent, last = os.path.split(os.path.abspath(name))
        full = os.path.join(os.path.realpath(parent), last)  # a link itself is not followed
        if full == self.root or full.startswith(self.root + os.sep):
            return os.path.relpath(full, self.root)
        return None

    def _site(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        names: list[str] = []
        while frame is not None and len(names) < _DEPTH:
            code = frame.f_code
            if self.package in code.co_filename:
                names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
            frame = frame.f_back
        return " < ".join(names)


@contextmanager
def recorded(root: Path, package: str = "parallel_ckpt") -> Iterator[Recorder]:
    """Record what this process changes below `root`; call sites name functions of `package`."""
    recorder = Recorder(root, package)
    patches = _patches(recorder)
    former = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, function in patches:
            setattr(owner, name, function)
        yield recorder
    finally:
        for owner, name, function in former:
            setattr(owner, name, function)


def _patches(recorder: Recorder) -> list[tuple[Any, str, Callable[..., Any]]]:
    names = _names(recorder)
    # `shutil` and `pathlib` look these up in `os` at each call.
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (os, name, function) for name, function in (names | _descriptors(recorder)).items()
    ]
    opener = _opener(recorder)
    return [*patches, (builtins, "open", opener), (io, "open", opener)]


def _names(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Calls that change names."""
    real = {name: getattr(os, name) for name in ("mkdir", "symlink", "link", "rename", "unlink")}
    rmdir = os.rmdir

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with recorder.lock:
            at, inside = time.monotonic_ns(), recorder.inside(path, dir_fd)
            real["mkdir"](path, mode, dir_fd=dir_fd)
            if inside is not None:
                inode = os.stat(path, dir_fd=dir_fd).st_ino
                recorder.add("mkdir", at, path=inside, inode=inode)

    def symlink(source: Any, target: Any, *rest: Any, dir_fd: int | None = None) -> None:
        with recorder.lock:
            at, inside = time.monotonic_ns(), recorder.inside(target, dir_fd)
            real["symlink"](source, target, *rest, dir_fd=dir_fd)
            if inside is not None:
                recorder.add("symlink", at, path=inside, target=os.fspath(source))

    def two(kind: Kind, act: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, **options: Any) -> None:
            with recorder.lock:
                at = time.monotonic_ns()
                inside = recorder.inside(source, options.get("src_dir_fd"))
                to = recorder.inside(target, options.get("dst_dir_fd"))
                act(source, target, **options)
                if inside is not None or to is not None:
                    assert inside is not None, f"{kind} into the root is not recorded"
                    assert to is not None, f"{kind} out of the root is not recorded"
                    recorder.add(kind, at, path=inside, target=to)

        return call

    def removing(act: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            with recorder.lock:
                at, inside = time.monotonic_ns(), recorder.inside(path, dir_fd)
                act(path, dir_fd=dir_fd)
                if inside is not None:
                    recorder.add("remove", at, path=inside)

        return call

    return {
        "mkdir": mkdir,
        "symlink": symlink,
        "link": two("link", real["link"]),
        "rename": two("rename", real["rename"]),
        "replace": two("rename", os.replace),
        "unlink": removing(real["unlink"]),
        "remove": removing(real["unlink"]),
        "rmdir": removing(rmdir),
    }


def _descriptors(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Calls that act on open files."""
    real_open, real_write, real_pwrite = os.open, os.write, os.pwrite
    real_truncate, real_fallocate = os.ftruncate, os.posix_fallocate

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return real_open(path, flags, mode, dir_fd=dir_fd)
        with recorder.lock:
            at, inside = time.monotonic_ns(), recorder.inside(path, dir_fd)
            was_there = inside is not None and os.path.lexists(os.path.join(recorder.root, inside))
            descriptor = real_open(path, flags, mode, dir_fd=dir_fd)
            if inside is not None:
                is_emptied = bool(flags & os.O_TRUNC)
                _opened(recorder, at, inside, descriptor, was_there, is_emptied)
            return descriptor

    def write(descriptor: int, data: Any) -> int:
        with recorder.lock:
            at, offset = time.monotonic_ns(), None
            if (inside := _inside(recorder, descriptor)) is not None:
                offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            count = real_write(descriptor, data)
            if inside is not None:
                _written(recorder, at, inside, descriptor, offset, data, count)
            return count

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        with recorder.lock:
            at, inside = time.monotonic_ns(), _inside(recorder, descriptor)
            count = real_pwrite(descriptor, data, offset)
            if inside is not None:
                _written(recorder, at, inside, descriptor, offset, data, count)
            return count

    def ftruncate(descriptor: int, length: int) -> None:
        with recorder.lock:
            at, inside = time.monotonic_ns(), _inside(recorder, descriptor)
            real_truncate(descriptor, length)
            if inside is not None:
                _truncated(recorder, at, inside, descriptor, length)

    def posix_fallocate(descriptor: int, offset: int, length: int) -> None:
        with recorder.lock:
            at, inside = time.monotonic_ns(), _inside(recorder, descriptor)
            size = os.fstat(descriptor).st_size
            real_fallocate(descriptor, offset, length)
            if inside is not None and offset + length > size:
                _truncated(recorder, at, inside, descriptor, offset + length)

    def flushing(act: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(file: Any) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            with recorder.lock:
                at, inside = time.monotonic_ns(), _inside(recorder, descriptor)
                act(descriptor)
                if inside is not None:
                    inode = os.fstat(descriptor).st_ino
                    recorder.add("fsync", at, path=inside, inode=inode)

        return call

    def unseen(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any, **options: Any) -> Any:
            found = _inside(recorder, descriptor)
            assert found is None, f"os.{name} on {found} is not recorded"
            return act(descriptor, *rest, **options)

        return call

    left = {name: unseen(name, getattr(os, name)) for name in ("writev", "pwritev", "sendfile")}
    return left | {
        "open": open_,
        "write": write,
        "pwrite": pwrite,
        "ftruncate": ftruncate,
        "posix_fallocate": posix_fallocate,
        "fsync": flushing(os.fsync),
        "fdatasync": flushing(os.fdatasync),
    }


def _inside(recorder: Recorder, descriptor: int) -> str | None:
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    return recorder.inside(name) if name.startswith(recorder.root) else None


def _opened(
    recorder: Recorder, at: int, path: str, descriptor: int, was_there: bool, is_emptied: bool
) -> None:
    found = os.fstat(descriptor)
    if not was_there:
        recorder.add("create", at, path=path, inode=found.st_ino)
    elif is_emptied:
        recorder.add("truncate", at, path=path, inode=found.st_ino, offset=0)


def _written(
    recorder: Recorder,
    at: int,
    path: str,
    descriptor: int,
    offset: int | None,
    data: Any,
    count: int,
) -> None:
    content = memoryview(data).cast("B")[:count].tobytes()
    inode = os.fstat(descriptor).st_ino
    recorder.add("write", at, path=path, inode=inode, offset=offset, data=content)


def _truncated(recorder: Recorder, at: int, path: str, descriptor: int, length: int) -> None:
    inode = os.fstat(descriptor).st_ino
    recorder.add("truncate", at, path=path, inode=inode, offset=length)


class _File(io.FileIO):
    """A raw file whose writes are recorded; buffers and text lie over it as over any other."""

    def __init__(self, recorder: Recorder, path: Any, mode: str, opener: Any) -> None:
        self._recorder = recorder
        self._path = str(recorder.inside(path))
        with recorder.lock:
            at = time.monotonic_ns()
            was_there = os.path.lexists(path)
            super().__init__(path, mode, opener=opener)
            _opened(recorder, at, self._path, self.fileno(), was_there, "w" in mode)

    def write(self, data: Any) -> int:
        with self._recorder.lock:
            at = time.monotonic_ns()
            count = super().write(data)
            end = self.tell()  # after the call: a file opened to append writes at its end
            path = _inside(self._recorder, self.fileno()) or self._path
            arguments = (at, path, self.fileno(), end - count, data, count)
            _written(self._recorder, *arguments)
            return count

    def truncate(self, size: int | None = None) -> int:
        with self._recorder.lock:
            at = time.monotonic_ns()
            length = super().truncate(size)
            _truncated(self._recorder, at, self._path, self.fileno(), length)
            return length


def _opener(recorder: Recorder) -> Callable[..., IO[Any]]:
    real = builtins.open

    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> IO[Any]:
        is_read = not set(mode) & set("wax+")
        if is_read or isinstance(file, int) or recorder.inside(file) is None:
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw: Any = _File(recorder, file, mode.replace("b", "").replace("t", ""), opener)
        if buffering == 0:
            return raw  # type: ignore[no-any-return]
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered  # type: ignore[no-any-return]
        text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    return open_
