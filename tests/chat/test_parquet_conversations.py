"""Conversations of Parquet files and `datasets` are rendered and learned as the JSONL that they were made from."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from fakes.field_templates import BY_NAME
from rlhfless.prepare.data_rows import read_rows
from rlhfless.prepare.examples import load_examples
from rlhfless.records.rollouts import Example
from rlhfless.spec import RunSpec, SizesSpec
from rlhfless.spec.errors import InputError

Rows = list[dict[str, Any]]


def schema(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


WEATHER = schema("weather", {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, required=["city"])
DIARY = schema("diary", {"days": {"type": "array", "items": {"type": "integer"}}})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(*calls: dict[str, Any], tools: Rows | None = None) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "tool_calls": list(calls)},
        {"role": "tool", "content": "12 + 34", "name": calls[0]["function"]["name"], "tool_call_id": "123456789"},
        {"role": "assistant", "content": "Hello there, 12"},
    ]
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


OSLO, DAYS = call("weather", city="Oslo"), call("diary", days=[1, 2])
CASES: dict[str, Rows] = {
    "keys of another call": [conversation(OSLO), conversation(DAYS)],
    "several calls in a message": [conversation(OSLO, DAYS), conversation(call("diary", days=[]))],
    "schemas of other tools": [conversation(OSLO, tools=[WEATHER, DIARY]), conversation(DAYS, tools=[DIARY])],
    "nested structs and lists of them": [
        conversation(call("a", where={"city": "Oslo"}, stops=[{"x": 1}, {"y": {"z": True}}])),
        conversation(call("a", where={"country": {"code": "NO"}}, stops=[])),
    ],
    "nothing given": [conversation(call("a")), conversation(OSLO)],
    "arguments as JSON keep their null": [
        conversation({"type": "function", "function": {"name": "a", "arguments": '{"city": null, "days": 3}'}}),
        conversation({"id": "123456789", "type": "function", "function": {"name": "a", "arguments": "{}"}}),
    ],
    "items of a list may be null": [conversation(call("a", x=[1, None])), conversation(call("a", x=[None]))],
    "lists of lists": [conversation(call("a", x=[[{"p": 1}], [{"q": 2}, {"p": 3}]])), conversation(OSLO)],
}
NARROW = pa.struct([("city", pa.dictionary(pa.int32(), pa.string())), ("share", pa.float32())])


def write_jsonl(folder: Path, rows: Rows) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_parquet(folder: Path, rows: Rows, name: str = "rows.parquet", **options: Any) -> Path:
    pa.parquet.write_table(pa.Table.from_pylist(rows, options.pop("schema", None)), folder / name, **options)
    return folder / name


def sequences(template: str, file: Path) -> list[tuple[Any, ...]]:
    """The tokens of each example, and which of them are learned."""
    data = {"path": str(file), "chat_template": True, "prompt_field": "messages", "response_field": None}
    spec = RunSpec.model_validate({"type": "sft", "model": {"path": "m"}, "demonstrations": data})
    examples = load_examples(spec, BY_NAME[template].policy()).train
    assert all(isinstance(example, Example) for example in examples)
    return [(example.sequences, example.spans) for example in examples]  # type: ignore[attr-defined]


def values(path: Path) -> Rows:
    return [dict(row.values) for row in read_rows("prompts.path", str(path), "train", SizesSpec())]


TEMPLATES = {
    **dict.fromkeys(CASES, ("qwen2_5", "qwen3", "llama3_1", "mistral_v0_3", "harmony")),
    "several calls in a message": ("qwen2_5", "qwen3", "mistral_v0_3"),
    "schemas of other tools": ("qwen2_5", "qwen3"),
}
"""The templates that write what a case has."""


@pytest.mark.parametrize(("name", "template"), [(name, each) for name in CASES for each in TEMPLATES[name]])
def test_what_is_learned_of_parquet_is_what_is_learned_of_jsonl(tmp_path: Path, name: str, template: str) -> None:
    rows = CASES[name]
    right = sequences(template, write_jsonl(tmp_path, rows))
    assert sequences(template, write_parquet(tmp_path, rows)) == right


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"row_group_size": 1}, {"use_dictionary": False}])
def test_the_form_of_the_file_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = CASES["schemas of other tools"]
    assert values(write_parquet(tmp_path, rows, **options)) == rows


@pytest.mark.parametrize(
    ("kind", "given", "right"),
    [
        (pa.large_list(pa.struct([("a", pa.int64()), ("b", pa.int64())])), [{"a": 1}, None], [{"a": 1}, None]),
        (pa.list_(pa.struct([("a", pa.int64()), ("b", pa.int64())]), 2), [{"a": 1}, {}], [{"a": 1}, {}]),
        (NARROW, {"city": "Oslo", "share": 0.1}, {"city": "Oslo", "share": 0.1}),
        (NARROW, {}, {}),
        (pa.map_(pa.string(), pa.string()), [("a", "b"), ("c", None)], {"a": "b", "c": None}),
        (pa.map_(pa.string_view(), pa.string()), [("a", "b")], {"a": "b"}),
        (pa.map_(pa.string(), NARROW), [("a", {"share": 0.1})], {"a": {"share": 0.1}}),
        (pa.map_(pa.int64(), pa.string()), [(1, "b")], [(1, "b")]),
        (pa.struct([("m", pa.map_(pa.string(), pa.int64()))]), {"m": [("a", 1)]}, {"m": {"a": 1}}),
        (pa.json_(), '{"a": null, "b": 1.50}', {"a": None, "b": 1.5}),
        (pa.struct([("a", pa.decimal128(5, 2))]), {"a": decimal.Decimal("1.50")}, {"a": decimal.Decimal("1.50")}),
        (pa.struct([("a", pa.date32())]), {"a": datetime.date(2026, 1, 2)}, {"a": datetime.date(2026, 1, 2)}),
        (pa.struct([("a", pa.binary())]), {"a": b"\xff"}, {"a": b"\xff"}),
        (pa.null(), None, None),
    ],
    ids=str,
)
def test_values_of_each_type(tmp_path: Path, kind: pa.DataType, given: Any, right: Any) -> None:
    rows = pa.schema([("prompt", pa.string()), ("x", kind)])
    file = write_parquet(tmp_path, [{"prompt": "a", "x": given}, {"prompt": "b", "x": None}], schema=rows)
    if isinstance(kind, pa.FixedSizeListType):
        file = write_parquet(tmp_path, [{"prompt": "a", "x": given}], schema=rows)
        assert values(file) == [{"prompt": "a", "x": right}]
        return
    assert values(file) == [{"prompt": "a", "x": right}, {"prompt": "b", "x": None}], "a null column stays"


@pytest.mark.parametrize(
    "value", [decimal.Decimal("1.5"), datetime.date(2026, 1, 2), b"ab", datetime.datetime(2026, 1, 2, 3)], ids=str
)
def test_a_value_that_json_lacks_is_named(tmp_path: Path, value: Any) -> None:
    file = write_parquet(tmp_path, [conversation(OSLO), conversation(call("a", x=value))])
    with pytest.raises(InputError, match=r"rows.parquet row 2: message 2 \(assistant\): .*not JSON serializable"):
        sequences("qwen3", file)


def test_what_python_cannot_hold_is_named_with_its_column(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "day": pa.array([2**40], pa.timestamp("s"))})
    pa.parquet.write_table(table, tmp_path / "late.parquet")
    with pytest.raises(InputError, match="the column 'day' of type timestamp"):
        values(tmp_path / "late.parquet")
    pa.parquet.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["x", "x"]), tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="two columns are called 'x'"):
        values(tmp_path / "twice.parquet")
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    pa.parquet.write_table(pa.table({"x": twice}), tmp_path / "map.parquet")
    with pytest.raises(InputError, match="a map has a key twice"):
        values(tmp_path / "map.parquet")


@pytest.mark.parametrize("name", ["keys of another call", "schemas of other tools"])
def test_a_data_set_folder_is_read_as_its_jsonl(tmp_path: Path, name: str) -> None:
    for form in ("parquet", "jsonl"):
        folder = tmp_path / form
        folder.mkdir()
        if form == "parquet":
            write_parquet(folder, CASES[name], "train.parquet")
        else:
            write_jsonl(folder, CASES[name]).rename(folder / "train.jsonl")
        assert values(folder) == CASES[name]


def test_shards_of_other_schemas_are_refused_with_the_cause(tmp_path: Path) -> None:
    for index, row in enumerate(CASES["keys of another call"]):
        write_parquet(tmp_path, [row], f"train-0000{index}-of-00002.parquet")
    with pytest.raises(InputError, match="could not be loaded as a data set: TypeError: Couldn't cast"):
        values(tmp_path)
