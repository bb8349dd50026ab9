"""The interface of rewards: samples in, one outcome each out: a finite number, or the reason for its absence.

There are two kinds. A `Reward` is called by the scoring function in its own process; it never blocks for long. A
`Verifier` runs code that may block, hang or crash: it lives in worker processes (rlhfless.rewards.workers), and
announces samples before it scores them, so that its parent knows which samples caused its death.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from rlhfless.records import FinishReason, Prompt
from rlhfless.records.fields import MissingField, field_value
from rlhfless.spec import CodeSpec, JsonSchemaSpec, MathSpec, PythonRewardSpec
from rlhfless.util.errors import UserError
from rlhfless.util.redaction import redacted_text
from rlhfless.util.text import legible

# Number of characters that a message quotes.
_QUOTED_CHARS = 60
# Rows that a message names; the others are counted.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response, in the form that rewards get."""

    prompt: str
    response: str
    response_tokens: int
    finish_reason: FinishReason
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The data set's other columns of this row."""
    prompt_id: str = ""
    sample_index: int = 0
    source: str = ""
    """The set of its prompt, which decides which rewards score it."""
    where: str = field(default="", compare=False, kw_only=True)
    """See Prompt; empty during a run."""

    def __str__(self) -> str:
        place = self.where or f"prompt {self.prompt_id!r}"
        return f"sample {self.sample_index} of {place} (response {quote(self.response)})"


ARGUMENTS = tuple(field.name for field in fields(RewardSample) if field.name not in ("source", "where"))
"""The arguments that every sample fills; a data set's column of the same name is reached through `columns`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a sample for which a reward gave no number, with the cause."""

    cause: str
    """The cause without secrets, with unprintable characters escaped: it goes into the trace and the log."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", redacted_text(legible(self.cause)))


Outcome = float | Failed

MAX_REWARD = 1e9
"""Largest absolute value of a reward, before and after its weight; a larger one is a fault of the reward. Advantages
are float32, which ends at 3.4e38, and the gradient is squared and summed over all parameters: 1e9 squared leaves a
factor of 1e20 for what the model multiplies it by, and sums over parts stay far within float64."""

Report = Callable[[int, Outcome], None]
"""Takes the index of a sample and its outcome; called once per sample, in any order."""


VerifierSpec = CodeSpec | JsonSchemaSpec | MathSpec | PythonRewardSpec


class Checked(Protocol):
    """The checks before scoring that rewards of both kinds have."""

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Reasons for which samples of these prompts could not be scored, as far as can be found without a call."""
        ...


class Reward(Protocol):
    """Scores samples in the scoring function's own process. Several calls may run at once."""

    async def __call__(self, samples: Sequence[RewardSample], report: Report) -> None:
        """Report the outcome of every sample. May be cancelled: samples not reported by then have failed."""
        ...


@dataclass(frozen=True, slots=True)
class Begin:
    """A verifier starts on samples, and its next event comes within `limit_s` seconds, or it hangs."""

    indices: tuple[int, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of one sample."""

    index: int
    outcome: Outcome


class Verifier(Checked, Protocol):
    """Scores samples in a worker process, in its main thread, one call at a time."""

    @property
    def whole(self) -> bool:
        """Whether it needs all samples that are scored together in one call; else it gets a few at a time."""
        ...

    def prepare(self) -> None:
        """Do slow imports. Called once in each worker."""

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        """One Done per sample, each after a Begin that names it."""
        ...


class LocalReward:
    """Base of rewards that are quick and pure: one function of a sample."""

    async def __call__(self, samples: Sequence[RewardSample], report: Report) -> None:
        for index, sample in enumerate(samples):
            report(index, attempt(self.value, sample))

    def value(self, sample: RewardSample) -> float:
        """The sample's number. Raises Unscorable."""
        raise NotImplementedError

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:  # noqa: ARG002
        """See Checked; by default a reward needs no column."""
        return []


class Unscorable(Exception):
    """A sample for which a reward can give no number. The message is the cause."""


class RewardError(UserError):
    """A reward cannot be made, or its failures stop the run. The message names the reward and the cause."""

    def __init__(self, reward: str, what: str) -> None:
        what = redacted_text(legible(what))
        super().__init__(reward, what)
        self.reward = reward
        self.what = what

    def __str__(self) -> str:
        return f"reward {self.reward!r}: {self.what}"


def finite(value: Any) -> float | None:
    """A real number as float; None if it is NaN, infinite, too large for a float, or not a number."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def within_range(reward: str, weight: float, outcome: Outcome) -> Outcome:
    """The outcome of a reward, or Failed if it, or its product with the weight, is beyond MAX_REWARD."""
    if isinstance(outcome, Failed):
        return outcome
    for value, what in ((outcome, ""), (weight * outcome, f" times its weight ({weight:g})")):
        if not abs(value) <= MAX_REWARD:
            return Failed(f"{reward!r} gave {outcome:g}{what}, beyond the range from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return outcome


def attempt(function: Callable[[RewardSample], float], sample: RewardSample) -> Outcome:
    """The result of a function for a sample; Failed if it raises Unscorable."""
    try:
        return function(sample)
    except Unscorable as error:
        return Failed(str(error))


def pieces(samples: Sequence[RewardSample], indices: Iterable[int]) -> list[tuple[int, ...]]:
    """Smaller calls with the samples of a call that failed as a whole: one per prompt; with one prompt, one per sample.

    By prompt first, because a reward may compare the samples of a prompt with each other.
    """
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(samples[index].prompt_id, []).append(index)
    return [tuple(group) for group in groups.values()] if len(groups) > 1 else [(index,) for index in indices]


def quote(text: str) -> str:
    """The text in quotes, cut to a length that fits a message."""
    return repr(text if len(text) <= _QUOTED_CHARS else text[: _QUOTED_CHARS - 1] + "…")


def described(value: Any) -> str:
    """A value of the data with its type: `'42' (a text)`, `[7] (a list)`, `null`."""
    names = {str: "text", list: "list", dict: "mapping", bytes: "bytes", bool: "truth value"}
    if value is None:
        return "null"
    name = names.get(type(value), type(value).__name__)
    return f"{quote(str(value))} ({'an' if name[0] in 'aeiou' else 'a'} {name})".replace("(a bytes)", "(bytes)")


def column_problems(
    column: str, prompts: Sequence[Prompt], usable: Callable[[Any], bool], needed: str = "a text or a number is needed"
) -> list[RowFaults]:
    """A message if some prompts lack the column, or have a value there that is not usable."""
    missing, bad, hint = [], [], ""
    for prompt in prompts:
        try:
            value = field_value(prompt.columns, column)
        except MissingField as error:
            hint = hint or error.hint
            missing.append((prompt, error.what))
            continue
        if not usable(value):
            first = "; name an item of it, such as " + f"`{column}.0`" if isinstance(value, list) and value else ""
            bad.append((prompt, f"it holds {described(value)}, and {needed}{first}"))
    problems = [listed(f"the column `{column}` is missing", missing, len(prompts), hint)] if missing else []
    return problems + ([listed(f"the column `{column}` cannot be used", bad, len(prompts))] if bad else [])


class RowFaults(str):
    """A message about rows that are each faulty by themselves, with the rows and the fault of each."""

    faults: tuple[tuple[Prompt, str], ...]

    def __new__(cls, text: str, faults: Iterable[tuple[Prompt, str]]) -> RowFaults:
        message = super().__new__(cls, text)
        message.faults = tuple(faults)
        return message


def listed(what: str, faults: Sequence[tuple[Prompt, str]], total: int, hint: str = "") -> RowFaults:
    """A message about rows: how many, and the first with each fault, with its place in the data."""
    first = {why: prompt for prompt, why in reversed(faults)}
    each = dict.fromkeys(why for _, why in faults)
    named = [f"{first[why].where or quote(first[why].text)}: {why}" for why in list(each)[:_MOST_NAMED]]
    more = f"; and {len(faults) - len(named)} more" if len(faults) > len(named) else ""
    end = f". {hint[0].upper()}{hint[1:]}" if hint else ""
    text = f"{what} in {len(faults)} of {total} prompts: {'; '.join(named)}{more}{end}".rstrip()
    return RowFaults(text, ((prompt, f"{what}: {why}") for prompt, why in faults))


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has made and prepared its rewards."""

    whole: tuple[bool, ...]
    """Per reward: `Verifier.whole`."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A worker cannot make a reward; it ends after this."""

    reward: str
    what: str


@dataclass(frozen=True, slots=True)
class Task:
    """Score these samples with reward number `reward`."""

    reward: int
    samples: tuple[RewardSample, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The task is done."""
