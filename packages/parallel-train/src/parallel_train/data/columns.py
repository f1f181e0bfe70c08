"""Reads one column of a data file as an array of numbers, whatever Arrow type its writer chose."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from parallel_train.data.metadata import BOOKKEEPING, COPY, Metadata, folder_error
from parallel_train.data.spec import NUMBERS, Feature

Column = npt.NDArray[Any]
DTYPES = {
    name: np.float32 if name.startswith("float") else np.bool_ if name == "bool" else np.int64
    for name in NUMBERS
}
"""Dtypes of info.json that are read, and what they become."""


def stored_shape(name: str, feature: Feature) -> tuple[int, ...]:
    """Shape of one frame's value in memory."""
    # info.json declares [1] for the bookkeeping, which is read as plain numbers.
    return () if name in BOOKKEEPING else feature.shape


def read_column(
    metadata: Metadata, table: pa.Table, file: str, name: str, feature: Feature
) -> Column:
    """The column `name` of `file`, which was read into `table`: [rows, *shape].

    Raises:
        ConfigError: it is missing, has empty rows, or is of another kind or shape than declared.
    """
    if name not in table.column_names:
        raise folder_error(
            metadata.root,
            f"{file} does not have the column {name!r} that meta/info.json declares.",
            COPY,
        )
    column = table[name].combine_chunks()
    if column.null_count:
        raise folder_error(
            metadata.root,
            f"{file}: {name} is empty in {column.null_count} frames.",
            "Fill them, or leave their episodes out: --dataset.episodes with the others.",
        )
    values, widths, kind = _flat(column)
    if values is None:
        raise folder_error(
            metadata.root,
            f"{file}: {name} holds values of Arrow type {kind}, but meta/info.json declares "
            f"{feature.dtype}: a number, or lists of numbers.",
            "Write the column as numbers or lists of them, or correct meta/info.json.",
        )
    shape = stored_shape(name, feature)
    width = int(np.prod(shape, dtype=np.int64))
    # A file without rows has no widths to compare.
    if widths != {width} and table.num_rows:
        raise folder_error(
            metadata.root,
            f"feature {name!r} is declared with shape {list(feature.shape)}, but {file} holds "
            f"{' or '.join(str(w) for w in sorted(widths)[:5])} values per frame.",
            "Correct meta/info.json, or record again.",
        )
    cast: Column = values.astype(DTYPES[feature.dtype], copy=False)
    # 0.7 that is declared int64 would become 0.
    if cast.dtype.kind in "ib" and values.dtype.kind != cast.dtype.kind:
        changed = np.flatnonzero(cast != values)
        if changed.size:
            raise folder_error(
                metadata.root,
                f"{file}: {name} holds {values[changed[0]]}, but meta/info.json declares "
                f"{feature.dtype}.",
                "Correct the dtype in meta/info.json.",
            )
    return cast.reshape(table.num_rows, *shape)


def _flat(column: Any) -> tuple[Column | None, set[int], Any]:
    """All values of a column one after another, how many a frame has, and their Arrow type.

    Writers differ: lists of fixed, small or large size, views of lists, dictionaries, and types of
    their own (a matrix per frame). None stands for values that are not numbers.
    """
    widths = {1}
    while True:
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            column = column.storage
        elif pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
        elif pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
            column = pa.array(column.to_pylist(), pa.list_(kind.value_type))
        elif (
            pa.types.is_fixed_size_list(kind)
            or pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
        ):
            lengths = set(pc.list_value_length(column).to_pylist())
            # Lists may lie in lists: a matrix per frame.
            widths = {outer * (inner or 0) for outer in widths for inner in lengths}
            column = column.flatten()
        else:
            break
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None, widths, kind
    # An empty entry of a list becomes NaN, which is refused where the column is read.
    return column.to_numpy(zero_copy_only=False), widths, kind
