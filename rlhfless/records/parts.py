"""One file of a trace: written whole or not at all, read only if its columns are the expected ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhfless.records.schema import ADDED, NAME_KEY, TABLES, TRACE_VERSION, VERSION_KEY, TraceError


def write_part(path: Path, schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> None:
    """Writes rows, each in the order of the schema's columns, as one Parquet file."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, type=field.type) for field, column in zip(schema, columns, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=schema)
    # Dictionaries suit names, which repeat. For logprobs, which do not, they take ten times as long as all the rest.
    names = [field.name for field in schema if field.type == pa.string()]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=names)
    write_whole(path, sink.getvalue())


def write_whole(path: Path, content: Any) -> None:
    """Writes the bytes so that `path` is whole or absent, even if the machine loses power."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_part(path: Path, name: str) -> pa.Table:
    """Reads one file of the table `name`. Raises TraceError unless its columns and version are right."""
    try:
        with path.open("rb") as stream:  # pyarrow itself takes no path that is not UTF-8
            return _table(path, pq.ParquetFile(stream), name)
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path} is not a Parquet file ({error}); move it away to read the rest") from error


def _table(path: Path, file: pq.ParquetFile, name: str) -> pa.Table:
    metadata = file.schema_arrow.metadata or {}
    text = metadata.get(VERSION_KEY, b"").decode()
    version = int(text) if text.isdecimal() else -1
    check_version(path, version)
    if metadata.get(NAME_KEY) != name.encode():
        stored_name = metadata.get(NAME_KEY, b"").decode()
        raise TraceError(f"{path} holds the table {stored_name!r}, not {name!r}; move it to its own folder")
    schema, added = TABLES[name], ADDED.get(version, {}).get(name, {})
    for field in schema:
        if field.name in added:
            continue
        index = file.schema_arrow.get_field_index(field.name)
        if index < 0:
            raise TraceError(f"{path} has no column {field.name!r}; write it with the schema of {name!r}")
        stored_name = file.schema_arrow.field(index).type
        if not stored_name.equals(field.type):
            raise TraceError(f"{path}: column {field.name!r} is {stored_name}; write it as {field.type}")
    table = file.read(columns=[column for column in schema.names if column not in added])
    for column, value in added.items():
        table = table.append_column(column, pa.repeat(pa.scalar(value, schema.field(column).type), len(table)))
    return table.select(schema.names).cast(schema)


def check_version(path: Path, version: object) -> None:
    """Raises TraceError unless `version`, found in `path`, can be read."""
    known = (*ADDED, TRACE_VERSION)
    if version not in known:
        readable = f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
        raise TraceError(
            f"{path} has trace version {version}, and this reader knows {readable}; "
            "read it with the rlhfless that wrote it"
        )
