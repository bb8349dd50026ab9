"""JSON in responses, checked by a schema."""

import json

import pytest
from reward_samples import samples_of

from rlhfless.rewards import Failed, RewardError
from rlhfless.rewards.json_schema import JsonSchemaReward
from rlhfless.rewards.protocol import Done
from rlhfless.spec import JsonSchemaSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def value(response, columns=None, **options):
    reward = JsonSchemaReward(JsonSchemaSpec(type="json_schema", **({"json_schema": SCHEMA} | options)))
    (event,) = [event for event in reward.run(samples_of(response, **(columns or {}))) if isinstance(event, Done)]
    return event.outcome


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
    with pytest.raises(RewardError, match="is no JSON schema: 'no such type' is not valid"):
        value("{}", json_schema={"type": "no such type"})


def test_one_schema_is_needed():
    for both in ({}, {"json_schema": SCHEMA, "schema_field": "x"}):
        with pytest.raises(ValueError, match="either `json_schema` or `schema_field`"):
            JsonSchemaSpec(type="json_schema", **both)
