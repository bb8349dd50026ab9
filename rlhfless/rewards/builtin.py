"""Built-in rewards: exact_match, regex, format and length_penalty run in the scoring process, json_schema in a
worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex
from jsonschema.protocols import Validator

from rlhfless.records import Prompt
from rlhfless.records.fields import field_value, find_field
from rlhfless.rewards.answers import answer_faults, answer_of
from rlhfless.rewards.code import json_blocks_of
from rlhfless.rewards.protocol import (
    RewardError,
    RewardSample,
    SampleReward,
    Unscorable,
    column_problems,
    listed,
    quote,
    unscorable,
)
from rlhfless.spec import ExactMatchSpec, FormatSpec, JsonSchemaSpec, LengthPenaltySpec, RegexSpec
from rlhfless.spec.rewards import schema_validator


@dataclass(frozen=True)
class ExactMatch(SampleReward):
    """1 if the response equals the answer column, else 0."""

    spec: ExactMatchSpec

    def value(self, sample: RewardSample) -> float:
        expected = answer_of(sample.columns, self.spec)
        return float(self._normal(sample.response) == self._normal(expected))

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        return answer_faults(self.spec, prompts)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.spec.strip else text
        return text.casefold() if self.spec.ignore_case else text


@dataclass(frozen=True)
class Regex(SampleReward):
    """1 if the pattern matches and, with `answer_field`, its first group equals the answer; else 0.

    Uses the package `regex`, which supports a timeout. Raises RewardError for a pattern it rejects.
    """

    spec: RegexSpec

    def __post_init__(self) -> None:
        try:
            regex.compile(self.spec.pattern)
        except regex.error as error:
            raise RewardError(self.spec.label, f"not a pattern of the package `regex`: {error}") from error

    def value(self, sample: RewardSample) -> float:
        look = regex.fullmatch if self.spec.full_match else regex.search
        try:
            match = look(self.spec.pattern, sample.response, timeout=self.spec.timeout_s)
        except TimeoutError:
            raise Unscorable(f"the match took longer than timeout_s ({self.spec.timeout_s:g} s)") from None
        if match is None or self.spec.answer_field is None:
            return float(match is not None)
        expected = answer_of(sample.columns, self.spec)
        return float(match[1] is not None and match[1].strip() == expected.strip())

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        return [] if self.spec.answer_field is None else answer_faults(self.spec, prompts)


@dataclass(frozen=True)
class Format(SampleReward):
    """1 if the response has each tag once, in order and not empty; else 0."""

    spec: FormatSpec

    def value(self, sample: RewardSample) -> float:
        tags = self.spec.tags
        text = f"<{tags[0]}>{sample.response}" if self.spec.opened else sample.response
        # With the tags as a group, `split` gives text, tag, text, tag, ..., text.
        parts = re.split(f"(</?(?:{'|'.join(map(re.escape, tags))})>)", text)
        numbers, between = parts[1::2], parts[0::2]
        wanted = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        inside, outside = between[1::2], between[0::2]
        tidy = not self.spec.only or not "".join(outside).strip()
        return float(numbers == wanted and tidy and all(part.strip() for part in inside))


@dataclass(frozen=True)
class LengthPenalty(SampleReward):
    """The soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13)."""

    spec: LengthPenaltySpec

    def value(self, sample: RewardSample) -> float:
        """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens`."""
        free, most = self.spec.free_tokens, self.spec.max_tokens
        return 0.0 - min(1.0, max(0, sample.response_tokens - free) / (most - free))


# -- JSON schemas


# Number of distinct schemas that a worker caches.
_SCHEMA_CACHE = 1024
# Openings of an object or list that are tried, from the first: each is one parse of the rest of the text.
_OPENINGS = 64


class JsonSchemaReward(SampleReward):
    """1 if the JSON in the response is valid, else 0."""

    def __init__(self, spec: JsonSchemaSpec) -> None:
        self._spec = spec
        self.limit_s = spec.timeout_s

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        field = self._spec.schema_field
        if field is None:
            return []
        needed = "a mapping or its JSON text is needed"
        if problems := column_problems(field, prompts, _is_schema, needed):
            return [*problems]
        faults = unscorable(prompts, lambda prompt: _validator(_text(field_value(prompt.columns, field))))
        return [listed(f"the column `{field}` holds no schema", faults, len(prompts))] if faults else []

    def value(self, sample: RewardSample) -> float:
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


@lru_cache(maxsize=_SCHEMA_CACHE)
def _validator(text: str) -> Validator:
    """Compile a schema. Raises Unscorable."""
    try:
        return schema_validator(json.loads(text))
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {error}" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
        raise Unscorable(f"{quote(text)} {what}") from error


def _candidates(response: str) -> Iterator[str]:
    """Yield texts that may be the JSON, most likely first."""
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
