"""Choose the prompts of each step, from the data's order, the history of each prompt, and deferred groups.

`PromptHistory` is one record of lengths, signals and responses of each prompt, whichever actors generated them:


- `lengths`: what forecasts of the prompt's next samples need. The scaling policy adds to it where it sees a step's
  samples, because it forecasts from the same view, and the simulator, which has no rollouts, runs the same code.
- Whether the prompt's samples differed in their rewards, by step, without those whose reward failed: `prompts` draws a
  prompt less often that was without signal. A step's own filter of such groups needs no record (`Redraws`).
- The newest responses: drafts for an engine, which gets those of a prompt with the first request of it and indexes them
  beside what it is drawing (functions/generation/vllm/drafter.py).
  They change no sample, so they may be lost: of each prompt the newest are
  kept, so that older weights fade, and of all prompts those that were drawn last, up to a number of tokens.

A resumed run reads all of it from the trace, which has the rollouts of each step once, and at a checkpoint those of all
steps before it; responses only with `logging.record_tokens`. The journal gives back the responses of steps since then.

Of the prompts that a step would draw, one that was without signal k times in a row stays with a chance of
max(floor, factor^k); another takes the place of one that does not. So hard prompts come back once the policy can solve
them sometimes, and easy ones now and then. A prompt with a signal is drawn as before at once.

Invariant: the prompts of a step follow from the seed, the step, and what the steps up to step - 1 - max_staleness drew,
which have been learned from whenever it begins. So a step that is done again has the same prompts.

With `schedule: partial` (`select`) steps do not learn from all groups that they start. Prompts are started in the order
of the data, and no more than the run's steps learn from. A group that a step defers is finished by a later one, so at
the end of the run none is left: a run learns from all groups that it starts, whatever their lengths. Invariants: each
step learns from `prompts_per_step` groups; which groups a step starts, and which it learns from, is in the journal
before they have any effect, so a step that is repeated has the same groups.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from rlhfless.orchestrator.experience import differ, usable
from rlhfless.orchestrator.in_flight_samples import Selection
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import IntArray, Prompt, Rollout
from rlhfless.records.journal import BegunGroup, Journal
from rlhfless.records.traces import Trace, TracedRollout, newest_responses
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.lengths.recorded import samples_at, steps_of
from rlhfless.scaling.selection import is_due, new_groups
from rlhfless.spec import DrawLessSpec, PartialSpec, RunSpec

MOST_RESPONSES = 16
"""Of a prompt. More find hardly more, and travel with each request."""

MOST_TOKENS = 1 << 24
"""Of the responses to all prompts: 64 MiB."""


class PromptHistory:
    """Lengths, signals and responses of each prompt, by its id. If prompts of several data sets share an id, drafts are
    worse and samples the same."""

    def __init__(self, spec: RunSpec, most_tokens: int = MOST_TOKENS) -> None:
        """Signals and responses are kept if the spec uses them."""
        assert spec.prompts is not None, "a run that generates has prompts"
        self._spec, self._draw_less = spec, spec.prompts.draw_less
        self.lengths = LengthPredictor(spec.generation.max_tokens)
        self._signals: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        """By prompt and step: whether its samples differed in reward."""
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
            if len(of_samples) > 1:  # fewer say nothing about the prompt
                self._signals[prompt_id][step] = differ([*of_samples.values()])

    def ended(self, rollouts: Iterable[Rollout]) -> None:
        """Record finished responses."""
        if self._spec.generation.speculation.remembers:
            for rollout in rollouts:
                self._remember(rollout.prompt_id, rollout.token_ids)

    def responses(self, prompt_ids: Iterable[str]) -> dict[str, tuple[IntArray, ...]]:
        """Return the responses to these prompts, newest last; without prompts that have none."""
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
    """Choose the prompts of a step, oldest first, and which groups it learns from; None if from all.

    Raises JournalError, and InputError for a started prompt that is no longer in the data.
    """
    schedule, wanted = spec.schedule, spec.prompts_per_step
    if not isinstance(schedule, PartialSpec):
        return history.prompts(order, step, wanted), None
    known = journal.groups(step)
    if taken := [group for group in known if group.taken == step]:
        return _selection(schedule, step, order, taken, wanted)
    left = [group for group in known if group.begun < step]
    began = wanted * (step - 1) + len(left)
    """Groups that earlier steps started; they learned from them or deferred them."""
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
    """Yield the run's prompts in order, batch after batch, without the first `began`."""
    batch, place = divmod(began, wanted)
    while True:
        yield from history.prompts(order, batch + 1, wanted)[place:]
        batch, place = batch + 1, 0


def _distinct(sequence: Iterator[Prompt], order: PromptOrder, step: int, used: set[str]) -> Iterator[Prompt]:
    """Yield the prompts of a sequence, each once: another prompt takes the place of one that is `used`."""
    for prompt in sequence:
        chosen = prompt if prompt.prompt_id not in used else order.others(step - 1, 1, used)[0]
        used.add(chosen.prompt_id)
        yield chosen
