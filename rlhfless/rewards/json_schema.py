"""The reward for responses that hold JSON which follows a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema.protocols import Validator

from rlhfless.records import Prompt
from rlhfless.records.fields import field_value, find_field
from rlhfless.rewards.code_blocks import json_blocks_of
from rlhfless.rewards.protocol import Begin, Done, RewardSample, Unscorable, attempt, column_problems, listed, quote
from rlhfless.spec import JsonSchemaSpec
from rlhfless.spec.json_schemas import schema_validator

# Number of distinct schemas that a worker caches.
_SCHEMA_CACHE = 1024
# Openings of an object or list that are tried, from the first: each is one parse of the rest of the text.
_OPENINGS = 64


class JsonSchemaReward:
    """1 if the JSON in the response is valid, else 0."""

    whole = False

    def __init__(self, spec: JsonSchemaSpec) -> None:
        self._spec = spec

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        field = self._spec.schema_field
        if field is None:
            return []
        needed = "a mapping or its JSON text is needed"
        return [*column_problems(field, prompts, _is_schema, needed)] or _schema_problems(field, prompts)

    def prepare(self) -> None:
        """Nothing to prepare."""

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        for index, sample in enumerate(samples):
            yield Begin((index,), self._spec.timeout_s)
            yield Done(index, attempt(self._value, sample))

    def _value(self, sample: RewardSample) -> float:
        validator = self._validator_of(sample)
        candidates = _candidates(sample.response) if self._spec.extraction == "any" else (sample.response,)
        for text in candidates:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                continue
            try:
                return float(validator.is_valid(value))
            except Exception as error:  # of a pattern, or of a schema that leads back to itself for ever
                raise Unscorable(f"the schema cannot be applied: {type(error).__name__}: {error}") from error
        return 0.0

    def _validator_of(self, sample: RewardSample) -> Validator:
        if self._spec.schema_field is None:
            return _validator(json.dumps(self._spec.json_schema))
        value = find_field(sample.columns, self._spec.schema_field)
        if not _is_schema(value):
            raise Unscorable(f"the column `{self._spec.schema_field}` holds no schema: {quote(str(value))}")
        return _validator(_text(value))


def _is_schema(value: Any) -> bool:
    return isinstance(value, str | Mapping)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _schema_problems(field: str, prompts: Sequence[Prompt]) -> list[str]:
    """A message if the schemas of some rows cannot be used; each distinct one is looked at once."""
    faults: dict[str, str] = {}
    texts = [_text(field_value(prompt.columns, field)) for prompt in prompts]
    for text in dict.fromkeys(texts):
        try:
            _validator(text)
        except Unscorable as error:
            faults[text] = str(error)
    bad = [(prompt, faults[text]) for prompt, text in zip(prompts, texts, strict=True) if text in faults]
    return [listed(f"the column `{field}` holds no schema", bad, len(prompts))] if bad else []


@lru_cache(maxsize=_SCHEMA_CACHE)
def _validator(text: str) -> Validator:
    """Raises Unscorable if the text is no JSON schema."""
    try:
        return schema_validator(json.loads(text))
    except (ValueError, RecursionError) as error:
        what = f"is no JSON: {error}" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
        raise Unscorable(f"{quote(text)} {what}") from error


def _candidates(response: str) -> Iterator[str]:
    """Candidate texts, best first: the first that is JSON is used."""
    yield response
    yield from json_blocks_of(response)
    last = None
    decoder = json.JSONDecoder()
    position = 0
    for _ in range(_OPENINGS):
        opening = re.compile(r"[{\[]").search(response, position)
        if opening is None:
            break
        try:
            _, position = decoder.raw_decode(response, opening.start())
            last = response[opening.start() : position]
        except (ValueError, RecursionError):
            position = opening.end()
    if last is not None:
        yield last
