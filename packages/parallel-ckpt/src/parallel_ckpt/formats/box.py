"""A box of a tensor: where it begins and how far it reaches, one number per dim each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor, cut along its dims. Everything that is stored or held is such a part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a tensor without dims."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What two boxes of one tensor have in common; None where they do not share an element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in an array whose elements are those of `outer`."""
        starts = [mine - first for mine, first in zip(self.offsets, outer.offsets, strict=True)]
        spans = zip(starts, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in spans)

    def is_rows_of(self, shape: Sequence[int]) -> bool:
        """Whether it is cut along dim 0 alone, so that its elements are one run of the tensor's."""
        return self.sizes[1:] == tuple(shape[1:])

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index behind the box, one per dim."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))
