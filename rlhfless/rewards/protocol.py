"""What a reward is: samples in, one number each out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhfless.records import FinishReason, Prompt
from rlhfless.spec.errors import UserError

# Characters of a text that a message quotes.
_QUOTED_CHARS = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, as a reward sees it."""

    prompt: str
    response: str
    response_tokens: int
    finish_reason: FinishReason
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The data set's other columns of this row."""
    prompt_id: str = ""
    sample_index: int = 0

    def __str__(self) -> str:
        return f"sample {self.sample_index} of prompt {self.prompt_id!r} (response {quote(self.response)})"


class Reward(Protocol):
    """Scores samples. Stateless between calls; several calls may be under way at once."""

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """One finite number per sample, in their order. Raises RewardError."""
        ...

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Why samples of these prompts could not be scored, as far as it shows without calling anything."""
        ...


class RewardError(UserError):
    """A reward cannot be made, or gave no usable number. Names the reward, the sample and the cause."""

    def __init__(self, reward: str, what: str) -> None:
        super().__init__(reward, what)
        self.reward = reward
        self.what = what

    def __str__(self) -> str:
        return f"reward {self.reward!r}: {self.what}"


def quote(text: str) -> str:
    """The text in quotes, cut to what a message can hold."""
    return repr(text if len(text) <= _QUOTED_CHARS else text[: _QUOTED_CHARS - 1] + "…")


def column_problems(column: str, prompts: Sequence[Prompt], usable: Callable[[Any], bool]) -> list[str]:
    """A message if some prompt lacks the column, or has a value there that is not usable."""
    bad = [prompt for prompt in prompts if not usable(prompt.columns.get(column))]
    if not bad:
        return []
    first = bad[0]
    if column not in first.columns:
        columns = ", ".join(sorted(first.columns)) or "none"
        fault = f"the column `{column}` is missing (columns there: {columns})"
    else:
        fault = f"the column `{column}` holds {quote(str(first.columns[column]))}, which cannot be used"
    return [f"{fault} in {len(bad)} of {len(prompts)} prompts; the first is {quote(first.text)}"]
