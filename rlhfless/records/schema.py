"""The columns of a trace, declared once.

The version is one integer. Any change of a column (its name, type, unit or meaning; added or taken away)
raises it, and a reader reads exactly the versions it knows, this one and those of ADDED: a bill that is misread
silently is worse than a refusal. Units are in the column names (`_s` seconds, `_tokens`, `_bytes`); times are unix
time. docs/trace.md explains every column.

Enums are stored as their text, so that files can be read without this package. `Decision.inputs` and the columns of a
prompt mix types, which no Arrow map holds: they are JSON text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from rlhfless.util.errors import UserError

TRACE_VERSION = 6

_DRAFT_TIMES: Mapping[str, Any] = {"draft_s": 0.0, "verify_s": 0.0}
_DRAFTS: Mapping[str, Any] = {"drafted": [], "accepted": [], **_DRAFT_TIMES}
_TEXT: Mapping[str, Mapping[str, Any]] = {"rollouts": {"text": None}}

ADDED: Mapping[int, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        2: {"invocations": {"evicted_tokens": 0, **_DRAFTS}, **_TEXT},
        3: {"invocations": _DRAFTS, **_TEXT},
        4: {"invocations": _DRAFT_TIMES, **_TEXT},
        5: _TEXT,
    }
)
"""The earlier versions that can be read: the columns that a table did not have yet, with the value of all their
rows."""

NAME_KEY = b"rlhfless.table"
"""Parquet metadata: the name of the table."""
VERSION_KEY = b"rlhfless.trace_version"
"""Parquet metadata: TRACE_VERSION of the writer."""


class TraceError(UserError):
    """A trace that cannot be written or read. The message names the file, what is wrong, and the hint."""


def _columns(name: str, columns: Mapping[str, pa.DataType], nullable: tuple[str, ...] = ()) -> pa.Schema:
    fields = [pa.field(column, kind, nullable=column in nullable) for column, kind in columns.items()]
    return pa.schema(fields, metadata={NAME_KEY: name.encode(), VERSION_KEY: str(TRACE_VERSION).encode()})


RECORDED = ("token_ids", "logprobs", "text")
"""Columns of `rollouts` that are null unless the spec has `logging.record_tokens`. Text is a large string: it is not
written with a dictionary, as names are."""

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
"""Each table is a folder of the trace; each file in it has exactly these columns. Tables are written in this order: the
records of a step are on disk before its row in `steps`."""
