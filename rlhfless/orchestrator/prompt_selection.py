"""Choose the prompts of each step from the data's order, the history of each prompt, and deferred groups.

`PromptHistory` records lengths, signals and responses of each prompt, independent of the actors that generated them:

- Lengths, for forecasts of the prompt's next samples. The scaling policy updates them when it sees a step's samples, so
  that the simulator, which has no rollouts, can run the same code.
- Signals: for each step, whether the rewards of the prompt's samples differed. Samples whose reward failed are ignored.
  `prompts` chooses prompts without a signal less often. A step's own filter of such groups (`with_redraws`) needs no
  record.
- The newest responses, as drafts for engines. An engine gets the responses of a prompt with each request for it, and
  indexes them together with the samples in progress (functions/generation/vllm/drafting.py). They change no sample, so
  they may be lost. The newest responses of each prompt are kept, so that those of older weights disappear, for the most
  recently generated prompts, up to a total number of tokens.

A resumed run reads the history from the trace, which has the rollouts of each step once, and at a checkpoint those of
all steps before it. It has responses only with `logging.record_tokens`. The journal returns the responses of later
steps.

A prompt of a step that had no signal k times in a row is kept with a probability of max(floor, factor^k), and otherwise
replaced by another prompt. Hard prompts thus return when the policy can solve them sometimes, and easy ones now and
then. A single signal restores a prompt at once.

Invariant: the prompts of a step depend only on the seed, the step, and the results of the steps up to
step - 1 - max_staleness, which the run has always learned from when the step starts. A repeated step has the same
prompts.

With `schedule: partial` (`select`), steps do not learn from all groups that they start. Prompts are started in the
order of the data, and only as many in total as the run's steps learn from. A later step finishes deferred groups, so
none is left at the end: a run learns from all groups that it starts, whatever their lengths. Invariants: each step
learns from `prompts_per_step` groups. The groups that a step starts and those it learns from are journaled before they
have any effect, so a repeated step has the same groups.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from rlhfless.orchestrator.experience import differ, usable
from rlhfless.orchestrator.rollout_request import Selection
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import IntArray, Prompt, Rollout
from rlhfless.records.journal import BegunGroup, Journal
from rlhfless.records.traces import Trace, TracedRollout, newest_responses
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.lengths.recorded import samples_at, steps_of
from rlhfless.scaling.selection import is_due, new_groups
from rlhfless.spec import DrawLessSpec, PartialSpec, RunSpec

MOST_RESPONSES = 16
"""Maximum responses per prompt. More would hardly improve drafts, and are sent with each request."""

MOST_TOKENS = 1 << 24
"""Maximum tokens of all responses: 64 MiB."""


class PromptHistory:
    """Lengths, signals and responses of each prompt, by prompt id. If prompts of several data sets share an id, drafts
    are worse, but samples do not change."""

    def __init__(self, spec: RunSpec, most_tokens: int = MOST_TOKENS) -> None:
        """Signals and responses are recorded only if the spec uses them."""
        assert spec.prompts is not None, "a run that generates has prompts"
        self._spec, self._draw_less = spec, spec.prompts.draw_less
        self.lengths = LengthPredictor(spec.generation.max_tokens)
        self._signals: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        """Whether a prompt's samples differed in reward, by prompt and step."""
        self._responses: OrderedDict[str, deque[IntArray]] = OrderedDict()
        self._most_tokens, self._tokens = most_tokens, 0

    def read(self, trace: Trace, folder: Path) -> None:
        """Read the trace of earlier attempts from `folder`. Raises TraceError."""
        for rollouts in steps_of(trace):
            self.lengths.learn(samples_at(rollouts))
        self.learned(trace.rollouts)
        if self._spec.generation.speculation.remembers:
            for prompt_id, token_ids in reversed(list(newest_responses(folder, self._most_tokens))):
                self._remember(prompt_id, token_ids)

    def learned(self, rollouts: Iterable[TracedRollout]) -> None:
        """Record the rewards of whole steps."""
        if self._draw_less is None:
            return
        rewards: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for rollout in rollouts:
            if usable(rollout.reward_failures, self._spec.scoring):
                rewards[rollout.prompt_id, rollout.step][rollout.sample_index] = rollout.reward
        for (prompt_id, step), of_samples in rewards.items():
            if len(of_samples) > 1:  # a single sample says nothing about the prompt
                self._signals[prompt_id][step] = differ([*of_samples.values()])

    def ended(self, rollouts: Iterable[Rollout]) -> None:
        """Record finished responses."""
        if self._spec.generation.speculation.remembers:
            for rollout in rollouts:
                self._remember(rollout.prompt_id, rollout.token_ids)

    def responses(self, prompt_ids: Iterable[str]) -> dict[str, tuple[IntArray, ...]]:
        """Return the responses to these prompts, newest last, for the prompts that have any."""
        return {name: tuple(self._responses[name]) for name in prompt_ids if name in self._responses}

    def prompts(self, order: PromptOrder, step: int, n: int) -> list[Prompt]:
        """Choose the n prompts of a step (counted from 1); they repeat only if the data has fewer."""
        drawn = order.batch(step - 1, n)
        if (spec := self._draw_less) is None:
            return drawn
        kept = {prompt.prompt_id for prompt in drawn if self._stays(spec, prompt.prompt_id, step)}
        used = {prompt.prompt_id for prompt in drawn}
        others = order.others(step - 1, len(order), used) if len(kept) < n else []
        places = (prompt for prompt in others if self._stays(spec, prompt.prompt_id, step))
        return [prompt if prompt.prompt_id in kept else next(places, prompt) for prompt in drawn]

    def _stays(self, spec: DrawLessSpec, prompt_id: str, step: int) -> bool:
        known = step - 1 - self._spec.schedule.max_staleness
        signals = [signal for number, signal in sorted(self._signals.get(prompt_id, {}).items()) if number <= known]
        streak = [*reversed(signals), True].index(True)
        text = f"{self._spec.seed}/{step}/{prompt_id}/draw_less".encode()
        chance = max(spec.floor, spec.factor**streak)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") < chance * 2**64

    def _remember(self, prompt_id: str, token_ids: IntArray) -> None:
        if not len(token_ids):
            return
        responses = self._responses.setdefault(prompt_id, deque())
        responses.append(token_ids.astype(np.int32))
        self._tokens += len(token_ids)
        if len(responses) > MOST_RESPONSES:
            self._tokens -= len(responses.popleft())
        self._responses.move_to_end(prompt_id)
        while self._tokens > self._most_tokens:
            _, oldest = self._responses.popitem(last=False)
            self._tokens -= sum(map(len, oldest))


def select(
    spec: RunSpec, step: int, order: PromptOrder, history: PromptHistory, journal: Journal
) -> tuple[Sequence[Prompt], Selection | None]:
    """Choose the prompts of a step, oldest first, and its group selection; None if it learns from all groups.

    Raises JournalError, or InputError if the data no longer has a started prompt.
    """
    schedule, wanted = spec.schedule, spec.prompts_per_step
    if not isinstance(schedule, PartialSpec):
        return history.prompts(order, step, wanted), None
    known = journal.groups(step)
    if taken := [group for group in known if group.taken == step]:
        return _selection(schedule, step, order, taken, wanted)
    left = [group for group in known if group.begun < step]
    began = wanted * (step - 1) + len(left)
    """Number of groups that earlier steps started, learned or deferred."""
    count = new_groups(schedule, wanted, len(left), wanted * spec.steps - began, len(order))
    new = [group for group in known if group.begun == step]
    if not new and count:
        sequence = _sequence(order, history, wanted, began)
        used = {group.prompt_id for group in left}
        prompt_ids = [prompt.prompt_id for prompt in islice(_distinct(sequence, order, step, used), count)]
        journal.begin_groups(step, prompt_ids)
        new = [BegunGroup(step, prompt_id, None) for prompt_id in prompt_ids]
    return _selection(schedule, step, order, [*left, *new], wanted)


def _selection(
    schedule: PartialSpec, step: int, order: PromptOrder, groups: Sequence[BegunGroup], wanted: int
) -> tuple[Sequence[Prompt], Selection]:
    begun = {group.prompt_id: group.begun for group in groups}
    due = frozenset(prompt_id for prompt_id, by in begun.items() if is_due(schedule, by, step))
    return [order.prompt(prompt_id) for prompt_id in begun], Selection(wanted, due, begun)


def _sequence(order: PromptOrder, history: PromptHistory, wanted: int, began: int) -> Iterator[Prompt]:
    """Yield the run's prompts in order, batch after batch, after the first `began`."""
    batch, place = divmod(began, wanted)
    while True:
        yield from history.prompts(order, batch + 1, wanted)[place:]
        batch, place = batch + 1, 0


def _distinct(sequence: Iterator[Prompt], order: PromptOrder, step: int, used: set[str]) -> Iterator[Prompt]:
    """Yield the prompts of a sequence, with each `used` prompt replaced by another, so that none repeats."""
    for prompt in sequence:
        chosen = prompt if prompt.prompt_id not in used else order.others(step - 1, 1, used)[0]
        used.add(chosen.prompt_id)
        yield chosen
