"""The columns of a trace, and reading and writing its files.

Any change of a column (name, type, unit, meaning) raises the version. A reader accepts this version and those in ADDED,
because a misread bill is worse than a refusal. Units are in column names (`_s`, `_tokens`, `_bytes`); times are unix
time. Enums are text, so files can be read without this package. Mixed types (`Decision.inputs`, prompt columns) are
JSON text. docs/trace.md explains every column.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhfless.util.errors import UserError

TRACE_VERSION = 8

_DRAFT_TIMES: Mapping[str, Any] = {"draft_s": 0.0, "verify_s": 0.0}
_DRAFTS: Mapping[str, Any] = {"drafted": [], "accepted": [], **_DRAFT_TIMES}
_EPISODE: Mapping[str, Any] = {
    "turns": 1,
    "environment_tokens": 0,
    "environment_s": 0.0,
    "episode_status": "",
    "episode": None,
    "turn_spans": [],
}
_EPISODES: Mapping[str, Mapping[str, Any]] = {"rollouts": _EPISODE}
_TEXT: Mapping[str, Mapping[str, Any]] = {"rollouts": {"text": None, **_EPISODE}}

ADDED: Mapping[int, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        2: {"invocations": {"evicted_tokens": 0, **_DRAFTS}, **_TEXT},
        3: {"invocations": _DRAFTS, **_TEXT},
        4: {"invocations": _DRAFT_TIMES, **_TEXT},
        5: _TEXT,
        6: _EPISODES,
        7: {"rollouts": {"turn_spans": []}},
    }
)
"""Readable earlier versions: the columns that each table lacked, with the value for all rows."""

NAME_KEY = b"rlhfless.table"
"""Parquet metadata: the table's name."""
VERSION_KEY = b"rlhfless.trace_version"
"""Parquet metadata: the writer's TRACE_VERSION."""


class TraceError(UserError):
    """A trace cannot be written or read. The message names the file, the fault and the hint."""


def _columns(name: str, columns: Mapping[str, pa.DataType], nullable: tuple[str, ...] = ()) -> pa.Schema:
    fields = [pa.field(column, kind, nullable=column in nullable) for column, kind in columns.items()]
    return pa.schema(fields, metadata={NAME_KEY: name.encode(), VERSION_KEY: str(TRACE_VERSION).encode()})


RECORDED = ("token_ids", "logprobs", "text", "episode")
"""Columns of `rollouts` that are null without `logging.record_tokens`. Text is a large string, without a dictionary."""

_TURN_SPAN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("context_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("started_s", pa.float64()),
        ("ended_s", pa.float64()),
        ("wait_s", pa.float64()),
    ]
)

_VERSION_SPAN = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])

TABLES: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "holdings": _columns(
            "holdings",
            {
                "function": pa.string(),
                "replica": pa.string(),
                "incarnation": pa.string(),
                "device": pa.string(),
                "device_kind": pa.string(),
                "share": pa.float64(),
                "state": pa.string(),
                "start_s": pa.float64(),
                "end_s": pa.float64(),
            },
        ),
        "invocations": _columns(
            "invocations",
            {
                "function": pa.string(),
                "replica": pa.string(),
                "incarnation": pa.string(),
                "work": pa.string(),
                "step": pa.int64(),
                "start_s": pa.float64(),
                "end_s": pa.float64(),
                "input_tokens": pa.int64(),
                "output_tokens": pa.int64(),
                "cached_tokens": pa.int64(),
                "evicted_tokens": pa.int64(),
                "sequences": pa.int64(),
                "size_bytes": pa.int64(),
                "version": pa.string(),
                "drafted": pa.list_(pa.int64()),
                "accepted": pa.list_(pa.int64()),
                "draft_s": pa.float64(),
                "verify_s": pa.float64(),
            },
        ),
        "prompts": _columns(
            "prompts",
            {
                "prompt_id": pa.string(),
                "source": pa.string(),
                "text": pa.large_string(),
                "token_ids": pa.list_(pa.int32()),
                "columns": pa.large_string(),
            },
        ),
        "rollouts": _columns(
            "rollouts",
            {
                "step": pa.int64(),
                "prompt_id": pa.string(),
                "sample_index": pa.int32(),
                "seed": pa.int64(),
                "prompt_tokens": pa.int32(),
                "response_tokens": pa.int32(),
                "cached_tokens": pa.int32(),
                "reward": pa.float64(),
                "reward_parts": pa.map_(pa.string(), pa.float64()),
                "reward_failures": pa.map_(pa.string(), pa.string()),
                "finish_reason": pa.string(),
                "version_spans": pa.list_(_VERSION_SPAN),
                "actor": pa.string(),
                "started_s": pa.float64(),
                "finished_s": pa.float64(),
                "token_ids": pa.list_(pa.int32()),
                "logprobs": pa.list_(pa.float32()),
                "text": pa.large_string(),
                "turns": pa.int32(),
                "environment_tokens": pa.int32(),
                "environment_s": pa.float64(),
                "episode_status": pa.string(),
                "episode": pa.large_string(),
                "turn_spans": pa.list_(_TURN_SPAN),
            },
            nullable=RECORDED,
        ),
        "decisions": _columns(
            "decisions",
            {
                "step": pa.int64(),
                "at_s": pa.float64(),
                "kind": pa.string(),
                "choice": pa.string(),
                "inputs": pa.string(),
            },
        ),
        "steps": _columns(
            "steps",
            {
                "step": pa.int64(),
                "start_s": pa.float64(),
                "end_s": pa.float64(),
                "metrics": pa.map_(pa.string(), pa.float64()),
            },
        ),
    }
)
"""The tables, each a folder of the trace. Tables are written in this order, so a step's records are on disk before its
row in `steps`."""


# -- files


def write_part(path: Path, schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> None:
    """Write rows, with values in schema order, as one Parquet file."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, type=field.type) for field, column in zip(schema, columns, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=schema)
    # Dictionaries suit names, which repeat. For logprobs, which do not, they take ten times as long as everything else.
    names = [field.name for field in schema if field.type == pa.string()]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=names)
    write_whole(path, sink.getvalue())


def write_whole(path: Path, content: Any) -> None:
    """Write bytes so that `path` is complete or absent, even after a power failure."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_part(path: Path, name: str) -> pa.Table:
    """Read one file of the table `name`. Raises TraceError unless its columns and version are right."""
    try:
        with path.open("rb") as stream:  # pyarrow itself accepts no path that is not UTF-8
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
    """Require a readable trace version, as found in `path`. Raises TraceError."""
    known = (*ADDED, TRACE_VERSION)
    if version not in known:
        readable = f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
        raise TraceError(
            f"{path} has trace version {version}, and this reader knows {readable}; "
            "read it with the rlhfless that wrote it"
        )
