"""The interface of rewards: samples in; per sample a finite number, or the reason why there is none.

A `Reward` runs in the scoring process and never blocks for long. A `Verifier` runs code that may block, hang or crash:
it runs in worker processes (rlhfless.rewards.workers) and announces samples before it scores them, so that its parent
knows which samples killed it.
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
from rlhfless.util.text import legible, redacted_text

# Number of characters that a message quotes.
_QUOTED_CHARS = 60
# Rows that a message names; the others are counted.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response, as rewards get it."""

    prompt: str
    response: str
    response_tokens: int
    finish_reason: FinishReason
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    prompt_id: str = ""
    sample_index: int = 0
    source: str = ""
    """The data set of its prompt, which decides which rewards score it."""
    transcript: Sequence[Mapping[str, Any]] = ()
    """The turns of an episode as chat messages, with the environment's answers; empty in a run without an
    environment."""
    where: str = field(default="", compare=False, kw_only=True)
    """See Prompt; empty during a run."""

    def __str__(self) -> str:
        place = self.where or f"prompt {self.prompt_id!r}"
        return f"sample {self.sample_index} of {place} (response {quote(self.response)})"


ARGUMENTS = tuple(field.name for field in fields(RewardSample) if field.name not in ("source", "where"))
"""Arguments that every sample fills; a column of the same name is reached through `columns`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No number for a sample, with the cause."""

    cause: str
    """Without secrets, unprintable characters escaped: it goes to the trace and the log."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", redacted_text(legible(self.cause)))


Outcome = float | Failed

MAX_REWARD = 1e9
"""Largest absolute reward, before and after its weight.

Advantages are float32 (up to 3.4e38), and the gradient is squared and summed over all parameters: 1e9 squared leaves a
factor of 1e20 for what the model multiplies it by.
"""

Report = Callable[[int, Outcome], None]
"""Called once per sample with its index and outcome, in any order."""


VerifierSpec = CodeSpec | JsonSchemaSpec | MathSpec | PythonRewardSpec


class Checked(Protocol):
    """Checks before a run, which all rewards have."""

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return reasons why samples of these prompts could not be scored."""
        ...


class Reward(Protocol):
    """Scores samples in the scoring process. Calls may run concurrently."""

    async def __call__(self, samples: Sequence[RewardSample], report: Report) -> None:
        """Report the outcome of every sample. If cancelled, samples not yet reported have failed."""
        ...


@dataclass(frozen=True, slots=True)
class Begin:
    """A verifier starts on samples; unless its next event comes within `limit_s`, it hangs."""

    indices: tuple[int, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of one sample."""

    index: int
    outcome: Outcome


class Verifier(Checked, Protocol):
    """Scores samples in a worker process's main thread, one call at a time."""

    @property
    def whole(self) -> bool:
        """Whether one call needs all samples that are scored together; else it gets a few at a time."""
        ...

    def prepare(self) -> None:
        """Do slow imports; called once per worker."""

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        """Yield one Done per sample, each after a Begin that names it."""
        ...


class SampleReward:
    """Base of rewards that are a function of one sample: as a Reward if it is quick and pure, else as a Verifier."""

    whole = False
    limit_s = math.inf
    """Seconds that a verifier may take for a sample."""

    def value(self, sample: RewardSample) -> float:
        """Return the sample's number. Raises Unscorable."""
        raise NotImplementedError

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:  # noqa: ARG002
        return []

    def prepare(self) -> None: ...

    async def __call__(self, samples: Sequence[RewardSample], report: Report) -> None:
        for index, sample in enumerate(samples):
            report(index, attempt(self.value, sample))

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        for index, sample in enumerate(samples):
            yield Begin((index,), self.limit_s)
            yield Done(index, attempt(self.value, sample))


class Unscorable(Exception):
    """A reward gives no number for a sample; the message is the cause."""


class RewardError(UserError):
    """A reward cannot be created, or its failures stop the run. The message names reward and cause."""

    def __init__(self, reward: str, what: str) -> None:
        what = redacted_text(legible(what))
        super().__init__(reward, what)
        self.reward = reward
        self.what = what

    def __str__(self) -> str:
        return f"reward {self.reward!r}: {self.what}"


def finite(value: Any) -> float | None:
    """Return a real number as float; None if it is not a finite number."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def within_range(reward: str, weight: float, outcome: Outcome) -> Outcome:
    """Return the outcome, or Failed if it or its weighted value is beyond MAX_REWARD."""
    if isinstance(outcome, Failed):
        return outcome
    for value, what in ((outcome, ""), (weight * outcome, f" times its weight ({weight:g})")):
        if not abs(value) <= MAX_REWARD:
            return Failed(f"{reward!r} gave {outcome:g}{what}, beyond the range from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return outcome


def attempt(function: Callable[[RewardSample], float], sample: RewardSample) -> Outcome:
    """Call a function for a sample; Failed if it raises Unscorable."""
    try:
        return function(sample)
    except Unscorable as error:
        return Failed(str(error))


def pieces(samples: Sequence[RewardSample], indices: Iterable[int]) -> list[tuple[int, ...]]:
    """Split a failed call into smaller ones: by prompt, or by sample if there is only one prompt.

    By prompt first, because a reward may compare the samples of a prompt.
    """
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(samples[index].prompt_id, []).append(index)
    return [tuple(group) for group in groups.values()] if len(groups) > 1 else [(index,) for index in indices]


def quote(text: str) -> str:
    """Quote a text, cut to fit a message."""
    return repr(text if len(text) <= _QUOTED_CHARS else text[: _QUOTED_CHARS - 1] + "…")


def described(value: Any) -> str:
    """Describe a value with its type: `'42' (a text)`, `[7] (a list)`, `null`."""
    names = {str: "text", list: "list", dict: "mapping", bytes: "bytes", bool: "truth value"}
    if value is None:
        return "null"
    name = names.get(type(value), type(value).__name__)
    return f"{quote(str(value))} ({'an' if name[0] in 'aeiou' else 'a'} {name})".replace("(a bytes)", "(bytes)")


def column_problems(
    column: str, prompts: Sequence[Prompt], usable: Callable[[Any], bool], needed: str = "a text or a number is needed"
) -> list[RowFaults]:
    """Report prompts that lack the column, or whose value is not usable."""
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


def unscorable(prompts: Iterable[Prompt], check: Callable[[Prompt], object]) -> list[tuple[Prompt, str]]:
    """Return the prompts for which `check` raises Unscorable, with the causes."""
    faults = []
    for prompt in prompts:
        try:
            check(prompt)
        except Unscorable as error:
            faults.append((prompt, str(error)))
    return faults


class RowFaults(str):
    """A message about faulty rows, with each row and its fault."""

    faults: tuple[tuple[Prompt, str], ...]

    def __new__(cls, text: str, faults: Iterable[tuple[Prompt, str]]) -> RowFaults:
        message = super().__new__(cls, text)
        message.faults = tuple(faults)
        return message


def listed(what: str, faults: Sequence[tuple[Prompt, str]], total: int, hint: str = "") -> RowFaults:
    """Describe faulty rows: their number, and the first of each fault with its place."""
    first = {why: prompt for prompt, why in reversed(faults)}
    each = dict.fromkeys(why for _, why in faults)
    named = [f"{first[why].where or quote(first[why].text)}: {why}" for why in list(each)[:_MOST_NAMED]]
    more = f"; and {len(faults) - len(named)} more" if len(faults) > len(named) else ""
    end = f". {hint[0].upper()}{hint[1:]}" if hint else ""
    text = f"{what} in {len(faults)} of {total} prompts: {'; '.join(named)}{more}{end}".rstrip()
    return RowFaults(text, ((prompt, f"{what}: {why}") for prompt, why in faults))
