"""JSON in responses, checked by a schema."""

import json

import pytest

from fakes.builders import value_of
from rlhfless.records import Prompt
from rlhfless.rewards import Failed
from rlhfless.rewards.builtin import JsonSchemaReward
from rlhfless.spec import JsonSchemaSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def value(response, columns=None, **options):
    reward = JsonSchemaReward(JsonSchemaSpec(type="json_schema", **({"json_schema": SCHEMA} | options)))
    return value_of(reward, response, columns or {})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"a": 1}', 1.0),
        ('{"a": "1"}', 0.0),
        ("[1]", 0.0),
        ('Here:\n```json\n{"a": 1}\n```', 1.0),
        ('```\n{"a": "x"}\n```\nbetter:\n```json\n{"a": 2}\n```', 1.0),
        ('I think {x} of {"a": {"b": 1}} and so {"a": 3}.', 1.0),
        ('{"a": 1} but then {"b": 1}', 0.0),
        ('{"a": 1', 0.0),
        ('```JSON\r\n{"a": 1}\r\n```\nRun it with\n```bash\nls\n```', 1.0),
        ('~~~json title="a"\n{"a": 1}\n~~~\n{"b": 2}', 1.0),
        ('1. So:\n\n   ```json\n   {"a": 1}\n   ```\n\n{"b": 2}', 1.0),
        ('<think>\n```json\n{"b": 1}\n```\n</think>\n```json\n{"a": 1}\n```\n```python\nf({})\n```', 1.0),
        ('```json\n{"a": 1, "b": "```"}\n```\n{"b": 2}', 1.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_the_json_of_a_response(response, expected):
    assert value(response) == expected


def test_nothing_may_stand_around_the_json_if_asked_for():
    assert value('so {"a": 1}', extraction="whole") == 0.0
    assert value(' {"a": 1}\n', extraction="whole") == 1.0


@pytest.mark.parametrize("column", [SCHEMA, json.dumps(SCHEMA)])
def test_each_row_may_have_its_own_schema(column):
    options = {"json_schema": None, "schema_field": "schema"}
    assert value('{"a": 1}', {"schema": column}, **options) == 1.0
    assert value('{"a": "x"}', {"schema": column}, **options) == 0.0


@pytest.mark.parametrize("column", [None, 3, "no json", {"type": "no such type"}])
def test_a_schema_that_is_none_marks_the_sample(column):
    assert isinstance(value("{}", {"schema": column}, json_schema=None, schema_field="schema"), Failed)


def test_a_schema_in_the_spec_that_is_none_is_found_before_the_run():
    with pytest.raises(ValueError, match="is no JSON schema: 'no such type' is not valid"):
        JsonSchemaSpec(type="json_schema", json_schema={"type": "no such type"})


def test_one_schema_is_needed():
    for both in ({}, {"json_schema": SCHEMA, "schema_field": "x"}):
        with pytest.raises(ValueError, match="either `json_schema` or `schema_field`"):
            JsonSchemaSpec(type="json_schema", **both)


def outside(where):
    """Schemas that refer to a document elsewhere, each in its own way."""
    reference = {"$ref": f"{where}/s.json"}
    return [
        reference,
        {"$dynamicRef": f"{where}/s.json#here"},
        {"properties": {"a": {"items": reference}}},
        {"$id": f"{where}/own", "$ref": "other"},
        {"$ref": "#/kept/aside", "kept": {"aside": reference}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "allOf": [{"not": reference}]},
        {"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"a": reference}},
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveRef": f"{where}/s.json"},
    ]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_schema_refers_to_nothing_outside_itself(listener, tmp_path, number, scheme):
    (tmp_path / "s.json").write_text("{}")
    where = listener.url if scheme == "http" else tmp_path.as_uri()
    schema = outside(where)[number]
    with pytest.raises(ValueError, match=r"`json_schema`: .*refers to .*, which is not in the schema itself"):
        JsonSchemaSpec(type="json_schema", json_schema=schema)
    of_rows = {"json_schema": None, "schema_field": "schema"}
    assert "is not in the schema itself" in value("{}", {"schema": schema}, **of_rows).cause
    reward = JsonSchemaReward(JsonSchemaSpec(type="json_schema", **of_rows))
    (problem,) = reward.problems([Prompt("p", (), "p", {"schema": {}}), Prompt("q", (), "q", {"schema": schema})])
    assert "is not in the schema itself" in problem
    assert "1 of 2 prompts" in problem
    assert listener.connections == 0


def test_a_schema_may_refer_to_its_own_parts():
    tree = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#"}}}}
    assert value('{"of": [{"of": []}]}', json_schema=tree) == 1.0
    assert value('{"of": [{"of": 3}]}', json_schema=tree) == 0.0
    named = {"$id": "http://x.example/s", "$ref": "part", "$defs": {"a": {"$id": "part", "type": "integer"}}}
    assert value("3", json_schema=named) == 1.0
    assert value("{}", json_schema={"$ref": "https://json-schema.org/draft/2020-12/schema"}) == 1.0


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"pattern": "("}, {"$ref": "#/a", "a": {"properties": 3}}])
def test_a_schema_that_cannot_be_applied_marks_the_sample(schema):
    outcome = value('"x"', {"schema": schema}, json_schema=None, schema_field="schema")
    assert isinstance(outcome, Failed)
