"""The built-in rewards. Pure functions of the response and its row; nothing here waits.

Deliberately left out: a time limit on regular expressions. `re` holds the interpreter while it matches, so a
pattern that backtracks without end stalls the scoring function until its own call times out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.records import Prompt
from rlhfless.rewards.protocol import RewardError, Sample, column_problems, quote
from rlhfless.spec import ExactMatchSpec, LengthPenaltySpec, RegexSpec


@dataclass(frozen=True)
class ExactMatch:
    """1 if the response equals the answer column, else 0."""

    spec: ExactMatchSpec

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._matches(sample)) for sample in samples]

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        return column_problems(self.spec.answer_field, prompts, _is_answer)

    def _matches(self, sample: Sample) -> bool:
        expected = _answer(self.spec.label, self.spec.answer_field, sample)
        return self._normal(sample.response) == self._normal(expected)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.spec.strip else text
        return text.casefold() if self.spec.ignore_case else text


@dataclass(frozen=True)
class Regex:
    """1 if the pattern is found and, if asked for, its first group equals the answer column, else 0.

    Group and answer are compared without white space at their ends.
    """

    spec: RegexSpec

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._matches(sample)) for sample in samples]

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        field = self.spec.answer_field
        return [] if field is None else column_problems(field, prompts, _is_answer)

    def _matches(self, sample: Sample) -> bool:
        look = re.fullmatch if self.spec.full_match else re.search
        match = look(self.spec.pattern, sample.response)
        if match is None or self.spec.answer_field is None:
            return match is not None
        expected = _answer(self.spec.label, self.spec.answer_field, sample)
        return match[1] is not None and match[1].strip() == expected.strip()


@dataclass(frozen=True)
class LengthPenalty:
    """The soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13)."""

    spec: LengthPenaltySpec

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._penalty(sample.response_tokens) for sample in samples]

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:  # noqa: ARG002 (needs no column)
        return []

    def _penalty(self, response_tokens: int) -> float:
        """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens`."""
        free, most = self.spec.free_tokens, self.spec.max_tokens
        return 0.0 - min(1.0, max(0, response_tokens - free) / (most - free))


def _is_answer(value: Any) -> bool:
    """Texts and numbers can be compared with a response; lists, mappings and null cannot."""
    return isinstance(value, str | int | float)


def _answer(reward: str, field: str, sample: Sample) -> str:
    value = sample.columns.get(field)
    if not _is_answer(value):
        raise RewardError(
            reward, f"the column `{field}` must be a text or a number, got {quote(str(value))}, for {sample}"
        )
    return str(value)
