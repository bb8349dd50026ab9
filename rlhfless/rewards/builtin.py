"""Rewards that are pure functions of the response and its row. They run in the scoring function's own process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from rlhfless.records import Prompt
from rlhfless.rewards.answers import answer_faults, answer_of
from rlhfless.rewards.protocol import (
    LocalReward,
    RewardError,
    RewardSample,
    Unscorable,
)
from rlhfless.spec import ExactMatchSpec, FormatSpec, LengthPenaltySpec, RegexSpec


@dataclass(frozen=True)
class ExactMatch(LocalReward):
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
class Regex(LocalReward):
    """1 if the pattern is found and, if asked for, its first group equals the answer column, else 0.

    Group and answer are compared without white space at their ends. The package `regex` matches as `re` does, and
    can be given a time limit. Raises RewardError for the rare pattern that it interprets differently from `re`.
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
class Format(LocalReward):
    """1 if the response contains the tags, each once and in order, with text in each; else 0."""

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
class LengthPenalty(LocalReward):
    """The soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13)."""

    spec: LengthPenaltySpec

    def value(self, sample: RewardSample) -> float:
        """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens`."""
        free, most = self.spec.free_tokens, self.spec.max_tokens
        return 0.0 - min(1.0, max(0, sample.response_tokens - free) / (most - free))
