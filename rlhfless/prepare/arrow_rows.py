"""Rows of Arrow tables (Parquet files, `datasets`) as the JSON that they were made from.

An Arrow struct has every key of its type, and null where a row had no such key. A chat template would render those
nulls, and a policy would learn them, so a null inside a struct is left out. Nulls in lists, in maps, in values of the
type JSON and of whole columns are the author's, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rlhfless.util.text import parsed_json

_Read = Callable[[Any], Any]


def arrow_rows(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table. Raises ValueError for a value that Python does not have, or two columns of one name."""
    names = batch.schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two columns are called {twice[0]!r}")
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            values = column.to_pylist()
        except (ValueError, OverflowError) as error:  # bytes that are no text, a date after the year 9999
            raise ValueError(f"the column {field.name!r} of type {field.type}: {error}") from error
        read = _reader(field.type)
        columns.append(values if read is None else map(read, values))
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def _reader(kind: pa.DataType) -> _Read | None:
    """What changes a value of an Arrow type; None if it stays as pyarrow gives it."""
    types = pa.types
    if isinstance(kind, pa.JsonType):
        return lambda value: None if value is None else parsed_json(value, as_written=True)
    if types.is_dictionary(kind):
        return _reader(kind.value_type)
    if types.is_float16(kind) or types.is_float32(kind):
        # 0.1 as a person writes it, and not 0.10000000149
        narrow = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(narrow(value)))
    if types.is_struct(kind):
        readers = ((field.name, _reader(field.type)) for field in kind)
        return _struct_reader([(name, read) for name, read in readers if read is not None])
    if types.is_map(kind):
        return _map_reader(_reader(kind.item_type)) if _is_text(kind.key_type) else None
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if any(each(kind) for each in lists):
        read = _reader(kind.value_type)
        return None if read is None else lambda value: None if value is None else list(map(read, value))
    return None


def _is_text(kind: pa.DataType) -> bool:
    return any(each(kind) for each in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _struct_reader(readers: list[tuple[str, _Read]]) -> _Read:
    """`readers`: of the fields whose values change."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        given = {name: item for name, item in value.items() if item is not None}
        for name, change in readers:
            if name in given:
                given[name] = change(given[name])
        return given

    return read


def _map_reader(inner: _Read | None) -> _Read:
    """Pairs of a key and a value as one mapping."""

    def read(value: Any) -> Any:
        if value is None:
            return None
        mapping = {key: item if inner is None else inner(item) for key, item in value}
        if len(mapping) < len(value):
            raise ValueError(f"a map has a key twice: {[key for key, _ in value]}")
        return mapping

    return read
