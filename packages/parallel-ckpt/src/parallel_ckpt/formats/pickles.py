"""A reader of pickles that makes nothing but plain values; it calls and imports nothing.

DCP keeps its `.metadata`, and the description of each stored tensor, as pickles. Python's own
unpickler can be told which classes to make, but not how much memory to take (four bytes make it
reserve 32 GB) nor how long to hash a crafted key. So the few opcodes that these documents use are
read here: classes stay names, objects stay records of how they would be made, and time and memory
grow with the document's length alone.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from parallel_ckpt.formats.limits import MAX_OPCODES, MAX_STACK, shown


class MalformedPickle(ValueError):
    """The document uses an opcode or a global that these documents never need, or ends early."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the document names; nothing is imported for it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True)
class Made:
    """An object as the document describes it: what would be called, and the state given to it."""

    kind: Global
    args: tuple[Any, ...]
    state: Any = None
    items: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to something kept outside the document."""

    id: Any


class Pairs:
    """A dict, as its pairs in order: keys are hashed only once they are known to be strings."""

    __slots__ = ("flat",)

    def __init__(self, flat: list[Any]) -> None:
        self.flat = flat
        """Key, value, key, value: a tuple for each of millions of pairs would cost time."""

    def __len__(self) -> int:
        return len(self.flat) // 2

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.flat[::2], self.flat[1::2], strict=True)


def read_pickle(data: bytes, is_allowed: Callable[[str, str], bool]) -> Any:
    """The value in a pickle: None, bool, int, float, str, list, tuple and the classes here.

    `is_allowed(module, name)` says which globals may be named.

    Raises:
        MalformedPickle: names what was found.
    """
    machine = _Machine(data, is_allowed)
    try:
        with collector_paused():
            return machine.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise MalformedPickle(f"breaks off or is garbled near byte {machine.at}") from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the collector of cycles, which would walk all that was read so far again and again.

    A million chunks are ten million objects, none of them in a cycle: measured, it takes three
    quarters of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Mark:
    pass


_MARK = _Mark()


class _Machine:
    """The stack machine of the pickle format, cut down to data."""

    def __init__(self, data: bytes, is_allowed: Callable[[str, str], bool]) -> None:
        self.data = data
        self.at = 0
        self._is_allowed = is_allowed
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Where the marks lie on the stack."""
        self._memo: list[Any] = []

    def run(self) -> Any:
        steps, stack = self._steps(), self._stack
        for _ in range(MAX_OPCODES // _BATCH):
            if self._run_some(steps):
                return self._pop()
            if len(stack) > MAX_STACK:
                break
        raise MalformedPickle(f"has more than {MAX_OPCODES} opcodes or {MAX_STACK} open values")

    def _run_some(self, steps: Mapping[int, Callable[[], None]]) -> bool:
        """Take up to `_BATCH` steps; whether the document has ended.

        The opcodes that make up nine tenths of a large document are read right here, in the order
        of how often they come, and so are the runs of opcodes that torch's documents repeat for
        each object. A call for each opcode takes four times as long.
        """
        data, at, stack, memo, marks = self.data, self.at, self._stack, self._memo, self._marks
        push = stack.append
        for _ in range(_BATCH):
            code = data[at]
            at += 1
            if code == _LONG_BINGET:
                push(memo[_U4(data, at)[0]])
                at += 4
            elif code == _BINGET:
                push(memo[data[at]])
                at += 1
            elif code == _EMPTY_TUPLE and data.startswith(_NEW_WITH_DICT, at):
                made = Made(_a_class(stack.pop(), at), (), None, None)
                pairs = Pairs([])
                memo += (made, pairs)
                marks.append(len(stack) + 2)
                stack += (made, pairs, _MARK)
                at += len(_NEW_WITH_DICT)
            elif code == _SETITEMS and data[at] == _BUILD and self._has_new_dict():
                first = marks.pop() + 1
                made, pairs = stack[first - 3 : first - 1]
                pairs.flat = stack[first:]
                made.state = pairs
                del stack[first - 2 :]
                at += 1
            elif code == _SHORT_BINUNICODE:
                end = at + 1 + data[at]
                push(data[at + 1 : end].decode())
                at = end  # beyond the end of the data the next look at it says so
            elif code == _BININT1:
                push(data[at])
                at += 1
            elif code == _BININT2:
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == _BININT:
                push(_I4(data, at)[0])
                at += 4
            elif code == _MEMOIZE:
                memo.append(self._last())
            else:
                self.at = at
                if code == _STOP:
                    return True
                step = steps.get(code)
                if step is None:
                    raise MalformedPickle(f"uses opcode {bytes([code])!r} at byte {at - 1}")
                step()
                at = self.at
        self.at = at
        return False

    def _has_new_dict(self) -> bool:
        """Whether an object, its empty state, a mark and whole pairs lie on top of the stack."""
        stack, mark = self._stack, self._marks[-1]
        return (
            mark >= 2
            and type(stack[mark - 1]) is Pairs
            and not stack[mark - 1].flat
            and type(stack[mark - 2]) is Made
            and (len(stack) - mark) % 2 == 1
        )

    def _steps(self) -> dict[int, Callable[[], None]]:
        return {code: getattr(self, name) for code, name in _STEPS.items()}

    def _take(self, count: int) -> bytes:
        begin, end = self.at, self.at + count
        if end > len(self.data):
            raise IndexError
        self.at = end
        return self.data[begin:end]

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 256)
        if end < 0:
            raise IndexError
        return (self._take(end - self.at), self._take(1))[0].decode()

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError
        return value

    def _last(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:  # which only `mark` puts on the stack
            raise IndexError
        return value

    def _pop_to_mark(self) -> list[Any]:
        # The mark is there still: nothing else takes it off.
        index = self._marks.pop()
        values = self._stack[index + 1 :]
        del self._stack[index:]
        return values

    def _top(self, kind: type[Any]) -> Any:
        value = self._stack[-1]
        if not isinstance(value, kind):
            raise MalformedPickle(f"changes a {type(value).__name__} at byte {self.at - 1}")
        return value

    def _push_global(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise MalformedPickle(
                f"names a global by something else than text at byte {self.at - 1}"
            )
        if not self._is_allowed(module, name):
            raise MalformedPickle(
                f"names {shown(f'{module}.{name}')[1:-1]}, which checkpoints do not need"
            )
        self._stack.append(Global(module, name))

    # One method per opcode, named as in `pickletools`.
    def proto(self) -> None:
        self._take(1)

    def frame(self) -> None:
        self._take(8)

    def none(self) -> None:
        self._stack.append(None)

    def newtrue(self) -> None:
        self._stack.append(True)

    def newfalse(self) -> None:
        self._stack.append(False)

    def binint(self) -> None:
        self._stack.append(self._number("<i"))

    def long1(self) -> None:
        size = self._take(1)[0]
        if size > 9:
            raise MalformedPickle(f"has an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def binfloat(self) -> None:
        self._stack.append(self._number(">d"))

    def binunicode(self) -> None:
        self._stack.append(self._take(self._number("<I")).decode())

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_dict(self) -> None:
        self._stack.append(Pairs([]))

    def empty_tuple(self) -> None:
        self._stack.append(())

    def mark(self) -> None:
        self._marks.append(len(self._stack))
        self._stack.append(_MARK)

    def tuple(self) -> None:
        self._push_tuple(tuple(self._pop_to_mark()))

    def tuple1(self) -> None:
        self._push_tuple((self._pop(),))

    def tuple2(self) -> None:
        second, first = self._pop(), self._pop()
        self._push_tuple((first, second))

    def tuple3(self) -> None:
        third, second, first = self._pop(), self._pop(), self._pop()
        self._push_tuple((first, second, third))

    def _push_tuple(self, value: Any) -> None:
        # What is named `tuple` in this class is the opcode.
        if not self.data.startswith(_CALLED, self.at):
            self._stack.append(value)
            return
        self.at += len(_CALLED)
        args = (value,)
        made = Made(_a_class(self._pop(), self.at), args, None, None)
        self._memo += (value, args, made)
        self._stack.append(made)

    def append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def appends(self) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._pairs().flat.extend((key, value))

    def setitems(self) -> None:
        values = self._pop_to_mark()
        if len(values) % 2:
            raise MalformedPickle(f"has a key without a value at byte {self.at - 1}")
        self._pairs().flat.extend(values)

    def binput(self) -> None:
        self._put(self._take(1)[0])

    def long_binput(self) -> None:
        self._put(self._number("<I"))

    def _put(self, index: int) -> None:
        # Every writer numbers them one after the other.
        memo = self._memo
        if index == len(memo):
            memo.append(self._last())
        else:
            memo[index] = self._last()

    def named_global(self) -> None:
        self._push_global(self._line(), self._line())

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._push_global(module, name)

    def make(self) -> None:
        args, kind = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise MalformedPickle(f"calls a class without arguments at byte {self.at - 1}")
        self._stack.append(Made(_a_class(kind, self.at), args, None, None))

    def build(self) -> None:
        state = self._pop()
        self._top(Made).state = state

    def binpersid(self) -> None:
        self._stack.append(Persistent(self._pop()))

    def _pairs(self) -> Pairs:
        target = self._stack[-1]
        if isinstance(target, Made):
            target.items = target.items if target.items is not None else Pairs([])
            target = target.items
        if not isinstance(target, Pairs):
            raise MalformedPickle(
                f"sets items of something that is not a dict at byte {self.at - 1}"
            )
        return target


def _a_class(value: Any, at: int) -> Global:
    if type(value) is not Global:
        raise MalformedPickle(f"calls something that is not a class at byte {at - 1}")
    return value


_BATCH = 1000
"""Steps between two looks at how many values are open."""
_I4 = struct.Struct("<i").unpack_from
_U4 = struct.Struct("<I").unpack_from
_STOP = ord(".")
_MEMOIZE = 0x94
_BINGET = ord("h")
_LONG_BINGET = ord("j")
_BININT1 = ord("K")
_BININT2 = ord("M")
_BININT = ord("J")
_EMPTY_TUPLE = ord(")")
_NEW_WITH_DICT = b"\x81\x94}\x94("
"""After an empty tuple: a new object, remembered; its state, a dict, remembered; a mark."""
_CALLED = b"\x94\x85\x94R\x94"
"""After a tuple: it is remembered, is the one argument of a call, and so are both."""
_SETITEMS = ord("u")
_BUILD = ord("b")
_SHORT_BINUNICODE = 0x8C
_STEPS: Mapping[int, str] = {
    0x80: "proto",
    0x95: "frame",
    ord("N"): "none",
    0x88: "newtrue",
    0x89: "newfalse",
    ord("J"): "binint",
    0x8A: "long1",
    ord("G"): "binfloat",
    ord("X"): "binunicode",
    ord("]"): "empty_list",
    ord("}"): "empty_dict",
    ord(")"): "empty_tuple",
    ord("("): "mark",
    ord("t"): "tuple",
    0x85: "tuple1",
    0x86: "tuple2",
    0x87: "tuple3",
    ord("a"): "append",
    ord("e"): "appends",
    ord("s"): "setitem",
    ord("u"): "setitems",
    ord("q"): "binput",
    ord("r"): "long_binput",
    ord("c"): "named_global",
    0x93: "stack_global",
    0x81: "make",
    ord("R"): "make",
    ord("b"): "build",
    ord("Q"): "binpersid",
}
