"""What may be on disk of a file that was written and not flushed since: some of its blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from parallel_testing.power_loss.disk import Node

BLOCKS = (4096, 512)
"""Bytes that reach the disk as a whole: a page of memory, or a sector of the disk."""
MAX_SUBSETS = 6
"""A file of at most this many blocks is torn in every way; of a longer one, see `torn_ways`."""


class Torn(NamedTuple):
    """Which blocks of a file reached the disk. The others hold what was flushed last, or zeros."""

    block: int
    there: int
    """Bit k: block k. -1 is all of them."""
    size: int = -1
    """Of the file on disk; -1 is the size that it has in memory."""
    version: int = -1
    """Which content the blocks are of: -1 the newest, others by their place in `Node.former`."""


KEPT = Torn(512, -1)
LOST = Torn(512, 0, -2)
"""Neither data nor size: what was flushed last."""


def content_of(node: Node, torn: Torn) -> bytes:
    """What a reader finds in the file."""
    new = node.content if torn.version == -1 else node.former[torn.version]
    size = {-1: len(node.content), -2: len(node.durable)}.get(torn.size, torn.size)
    if torn.there == -1 and torn.size == -1 and torn.version == -1:
        return new
    found = bytearray(node.durable[:size].ljust(size, b"\0"))
    for index in range(-(-min(size, len(new)) // torn.block)):
        if torn.there >> index & 1:
            begin = index * torn.block
            piece = new[begin : min(begin + torn.block, size)]
            found[begin : begin + len(piece)] = piece
    return bytes(found)


def torn_ways(node: Node) -> Iterator[Torn]:
    """The bound: what is made of one file, with blocks of either length.

    Lost; the contents of earlier writes; every beginning, with its own size or the whole one; every
    end; each block missing; each block alone. All subsets of a file of few blocks.
    """
    yield LOST
    for version in range(len(node.former)):
        yield Torn(512, -1, len(node.former[version]), version)
        yield Torn(512, -1, -1, version)
    # The size may be on disk before the data, and the data before the size.
    yield Torn(512, -1, len(node.durable))
    for block in BLOCKS:
        count = -(-len(node.content) // block)
        everything = (1 << count) - 1
        for there in _subsets(count):
            yield Torn(block, there)
        for first in range(1, count):
            yield Torn(block, everything, first * block)


def _subsets(count: int) -> Iterator[int]:
    if count <= MAX_SUBSETS:
        yield from range((1 << count) - 1)
        return
    everything = (1 << count) - 1
    yield 0
    for index in range(count):
        yield 1 << index
        yield everything ^ 1 << index
        yield (1 << index) - 1
        yield everything ^ ((1 << index) - 1)


def random_torn(node: Node, generator: random.Random) -> Torn:
    """Whole, lost, or any blocks of any content with any size that a block ends at."""
    if (kind := generator.randrange(4)) < 2:
        return (KEPT, LOST)[kind]
    block = generator.choice(BLOCKS)
    count = -(-len(node.content) // block)
    version = generator.randrange(-1, len(node.former)) if node.former else -1
    size = -1 if kind == 2 else min(generator.randrange(count + 1) * block, len(node.content))
    return Torn(block, generator.getrandbits(max(count, 1)), size, version)
