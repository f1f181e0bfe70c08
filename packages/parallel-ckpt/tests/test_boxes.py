"""Boxes of tensors: what two have in common, and where it lies in an array."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from parallel_ckpt.formats.box import Box

SHAPE = (3, 4)
SPANS = [[(start, size) for start in range(n) for size in range(n + 1 - start)] for n in SHAPE]
BOXES = [
    Box((rows[0], columns[0]), (rows[1], columns[1])) for rows, columns in itertools.product(*SPANS)
]


def mask(box: Box) -> np.ndarray:
    """The tensor's elements, true for those in the box."""
    found = np.zeros(SHAPE, bool)
    found[box.within(Box.whole(SHAPE))] = True
    return found


def test_the_common_part_is_what_both_hold() -> None:
    for one, other in itertools.product(BOXES, BOXES):
        wanted = mask(one) & mask(other)
        common = one.overlap(other)
        assert (common is None) == (not wanted.any())
        if common is not None:
            assert (mask(common) == wanted).all()
            assert common.volume == wanted.sum()


def test_a_part_is_found_in_an_array_of_another_part() -> None:
    whole = np.arange(12).reshape(SHAPE)
    outer = Box((1, 1), (2, 3))
    held = whole[outer.within(Box.whole(SHAPE))]
    inner = Box((2, 2), (1, 2))
    assert held[inner.within(outer)].tolist() == [[10, 11]]


def test_a_tensor_without_dims_is_one_element() -> None:
    assert Box.whole(()).volume == 1
    assert Box.whole(()).overlap(Box.whole(())) == Box((), ())
    assert np.array(7)[Box.whole(()).within(Box.whole(()))] == 7


@pytest.mark.parametrize(
    ("box", "is_rows"), [(Box((1, 0), (2, 4)), True), (Box((0, 0), (3, 2)), False)]
)
def test_rows_are_cut_along_the_first_dim_alone(box: Box, is_rows: bool) -> None:
    assert box.is_rows_of(SHAPE) == is_rows
    assert Box.whole(()).is_rows_of(())
