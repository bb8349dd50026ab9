"""What a generation stage works on: its request, the samples in flight, and what the journal has of them.

A sample belongs to the slot that the policy gave it (`rlhfless.scaling.assignment`), and is *on* a request to the actor
that generates it. The stage brings the two together: a sample on no request goes to its slot as soon as an actor serves
there, and a sample on a request to another slot is aborted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.functions.base import Call
from rlhfless.functions.generation.messages import Ended, SampleItem, SampleKey, Sampling
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import PREFIXES, Decision, FinishReason, Prompt, Rollout, Work, sample_seed
from rlhfless.records.journal import Journal
from rlhfless.scaling.assignment import Assignment
from rlhfless.scaling.policy import UNASSIGNED, FleetView, Ints, SlotView, StepView, read_only
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the groups that a step draws it learns from, if it does not wait for all."""

    groups: int
    """So many: those that are complete first."""
    must_include: frozenset[str]
    """Prompts that are among them in any case."""
    begun: Mapping[str, int]
    """By prompt, the step that began it, which is part of its samples' seeds."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The samples that one generation stage is to draw."""

    call: Call
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampling: Sampling
    work: Work
    seed: int
    seed_step: int
    """Part of every seed: the step, or one number for all evaluations, which then differ by the weights alone."""
    selection: Selection | None = None
    """If its step does not wait for all groups."""

    @property
    def groups(self) -> int:
        """Groups that come of it."""
        return self.selection.groups if self.selection else len(self.prompts)

    def items(self, prompt: Prompt) -> tuple[SampleItem, ...]:
        """The samples of one prompt. Their seeds do not depend on where they are drawn."""
        begun = self.selection.begun[prompt.prompt_id] if self.selection else self.seed_step
        return tuple(
            SampleItem(
                prompt.prompt_id,
                index,
                prompt.token_ids,
                sample_seed(self.seed, begun, prompt.prompt_id, index),
            )
            for index in range(self.samples_per_prompt)
        )


def sampling_of(spec: RunSpec, *, greedy: bool = False) -> Sampling:
    """The spec's sampling settings, or their greedy variant."""
    generation = spec.generation
    return Sampling(
        max_tokens=generation.max_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_p=1.0 if greedy else generation.top_p,
        top_k=0 if greedy else generation.top_k,
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids,
    )


class StageJournal:
    """The journal, as one draw reads and writes it; without a journal nothing is read nor written."""

    def __init__(self, journal: Journal | None, request: RolloutRequest) -> None:
        self._journal = journal
        self._request = request

    def load(self, items: Sequence[SampleItem]) -> Iterator[Rollout]:
        """The rollouts of these samples. Another seed means another draw, for example because the data set has been
        edited since."""
        if self._journal is None:
            return
        seeds = {item.key: item.seed for item in items}
        rollouts = self._journal.rollouts(*{self._step_of(item.prompt_id) for item in items})
        yield from (rollout for rollout in rollouts if seeds.get(rollout.key) == rollout.seed)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Write finished rollouts. Raises JournalError, StaleAttempt."""
        if self._journal is None:
            return
        for step in sorted({self._step_of(rollout.prompt_id) for rollout in rollouts}):
            self._journal.add(step, [rollout for rollout in rollouts if self._step_of(rollout.prompt_id) == step])

    def keep(self, aborted: Sequence[Rollout]) -> None:
        """Write the tokens of samples that are left to later steps."""
        if self._request.selection is not None:
            self.add(aborted)

    def take(self, prompt_ids: Sequence[str]) -> None:
        """Write that the step learns from the groups of these prompts."""
        if self._journal is not None and (selection := self._request.selection) is not None:
            begun = [(selection.begun[prompt_id], prompt_id) for prompt_id in prompt_ids]
            self._journal.take_groups(self._request.call.step, begun)

    def _step_of(self, prompt_id: str) -> int:
        """The step of a prompt's rows: the one that began it."""
        selection = self._request.selection
        return selection.begun[prompt_id] if selection else self._request.call.step


@dataclass(slots=True)
class Replayed:
    """A comparison of engines: the last token of each moved sample is drawn again by its new engine, with the same seed
    after the same tokens. Equal engines draw the same token."""

    tokens: int = 0
    differ: int = 0
    """Number of them that differ from the first draw."""
    logprob_difference: float = 0.0
    """Largest difference between the logprobs of a token that both drew, in nats."""

    def add(self, before: Rollout, after: Rollout) -> None:
        """Compare a moved sample before and after its move."""
        last = len(before.token_ids) - 1
        if _version_at(before, last) != _version_at(after, last):
            return  # newer weights may draw another token
        if len(after.token_ids) <= last + (after.finish_reason == FinishReason.ABORT):
            return  # the new engine may have drawn nothing
        self.tokens += 1
        if after.token_ids[last] != before.token_ids[last]:
            self.differ += 1
        else:
            difference = abs(float(after.logprobs[last]) - float(before.logprobs[last]))
            self.logprob_difference = max(self.logprob_difference, difference)

    def figures(self) -> dict[str, float]:
        """The comparison as metrics; none if nothing was compared."""
        if not self.tokens:
            return {}
        return {
            "replayed_tokens": float(self.tokens),
            "replayed_tokens_differ": float(self.differ),
            "replayed_logprob_difference_max": self.logprob_difference,
        }

    def decision(self, step: int, at_s: float) -> Decision:
        """The comparison as a row of the trace."""
        inputs: dict[str, float | int | str | bool] = {"tokens": self.tokens, "differ": self.differ}
        inputs["logprob_difference"] = self.logprob_difference
        return Decision(step, at_s, "replayed", f"{self.differ} of {self.tokens} tokens differ", inputs)


def _version_at(rollout: Rollout, token: int) -> str | None:
    """The version that drew a token; None if the engine does not say."""
    return next((span.version for span in rollout.version_spans if span.start <= token < span.end), None)


class InFlightSamples:
    """The samples of one step. A sample is a number, in the order of the draw: siblings one after the other."""

    def __init__(self, step: int, items: Sequence[SampleItem], slots: int) -> None:
        token_ids = {item.prompt_id: item.prompt_token_ids for item in items}
        prompts = {prompt_id: len(tokens) for prompt_id, tokens in token_ids.items()}
        rank = {prompt_id: number for number, prompt_id in enumerate(prompts)}
        self.step = step
        self.items = list(items)
        """Each item with the tokens from which the sample continues."""
        self.request_of: dict[int, int] = {}
        """The request that each sample is on, or none."""
        self.waiting: dict[int, None] = {}
        """Samples with a slot that are on no request, in the order in which they go to the engine."""
        self.replayed = Replayed()
        self._numbers = {item.key: number for number, item in enumerate(items)}
        self._prompt_ids = tuple(prompts)
        self._prompt_tokens = np.array(list(prompts.values()), np.int64)
        self.prefixes = PrefixTree.of_prompts(list(token_ids.values()))
        self._long_prefixes = self.prefixes.long()
        self._group = np.array([rank[item.prompt_id] for item in items], np.int64)
        self._tokens = np.array([0 if item.prior is None else len(item.prior.token_ids) for item in items], np.int64)
        self._finished = np.zeros(len(items), bool)
        self._truncated = np.zeros(len(items), bool)
        self.slot_of: Ints = np.full(len(items), UNASSIGNED, np.int64)
        self.assignment = Assignment(self.slot_of, self._finished, slots)

    def prefixes_decision(self, at_s: float) -> Decision | None:
        """The shared prefixes of the prompts as a row of the trace, for replays, because the trace has no prompts; None
        without shared prefixes."""
        if not len(self.prefixes):
            return None
        texts = {prompt_id: self.prefixes.text(number) for number, prompt_id in enumerate(self._prompt_ids)}
        inputs: dict[str, float | int | str | bool] = {name: text for name, text in texts.items() if text}
        return Decision(self.step, at_s, PREFIXES, f"{len(self.prefixes)} shared by {len(inputs)} prompts", inputs)

    @property
    def progress(self) -> dict[SampleKey, int]:
        """Tokens so far of the samples that have drawn some and not ended."""
        running = np.flatnonzero((self._tokens > 0) & ~self._finished)
        return {self.items[number].key: int(self._tokens[number]) for number in running.tolist()}

    @property
    def left(self) -> Ints:
        """Samples that have not ended."""
        return np.flatnonzero(~self._finished)

    @property
    def unassigned(self) -> Ints:
        """Samples that have not ended and belong to no slot."""
        return self.assignment.unassigned

    def view(self, fleet: FleetView, slots: Sequence[SlotView]) -> StepView:
        """The step at this instant. The columns are read-only views, without a copy."""
        return StepView(
            fleet,
            tuple(slots),
            self.step,
            self._prompt_ids,
            read_only(self._prompt_tokens),
            read_only(self._group),
            read_only(self._tokens),
            read_only(self._finished),
            read_only(self._truncated),
            read_only(self.slot_of),
            self._long_prefixes,
        )

    def counts(self, slot: int) -> tuple[int, int]:
        """The number of samples of a slot with at least one token, and the number without."""
        unfinished = (self.slot_of == slot) & ~self._finished
        drawing = int(np.count_nonzero(unfinished & (self._tokens > 0)))
        return drawing, int(np.count_nonzero(unfinished)) - drawing

    # -- messages of the actors

    def apply_heartbeat(self, request: int, tokens: Mapping[SampleKey, int], ended: Mapping[SampleKey, Ended]) -> None:
        """Apply a heartbeat of a request. It may come late, so it never lowers a count."""
        for key, count in tokens.items():
            number = self._numbers[key]
            if self.is_on(request, key) and not self._finished[number]:
                self._tokens[number] = max(self._tokens[number], count)
        for key, end in ended.items():
            if self.is_on(request, key):
                self._end(self._numbers[key], end.tokens, truncated=end.truncated)

    def is_on(self, request: int, key: SampleKey) -> bool:
        """Whether a sample is still on this request. A message of a request about any other sample is ignored."""
        return self.request_of.get(self._numbers[key]) == request

    def take_back(self, rollout: Rollout) -> None:
        """Take a sample back from its request. A sample that has not ended continues from its tokens."""
        number = self._numbers[rollout.key]
        del self.request_of[number]
        if (prior := self.items[number].prior) is not None:
            self.replayed.add(prior, rollout)
        if rollout.finish_reason != FinishReason.ABORT:
            self._end(number, len(rollout.token_ids), truncated=rollout.finish_reason == FinishReason.LENGTH)
            return
        if len(rollout.token_ids):
            self.items[number] = replace(self.items[number], prior=rollout)
        self._restart(number)

    def restart_lost(self, request: int) -> Ints:
        """Restart the samples of a lost request, from the tokens that they had when it began. Returns the samples."""
        lost = np.array([number for number, on in self.request_of.items() if on == request], np.int64)
        for number in lost.tolist():
            del self.request_of[number]
            self._finished[number] = self._truncated[number] = False  # the sample may have ended, but was not delivered
            self._restart(number)
        return lost

    def defer_unfinished(self) -> list[Rollout]:
        """Leave all samples that have not ended to another step, with the tokens that they have: for a policy they end
        as if they were truncated there. Returns what was drawn of them."""
        left = self.left.tolist()
        self.request_of.clear()
        for number in left:
            self._end(number, int(self._tokens[number]), truncated=True)
        return [prior for number in left if (prior := self.items[number].prior) is not None]

    # -- actions of the policy

    def give(self, samples: Ints, slot: int) -> None:
        """Give samples that have not ended to a slot; samples on no request wait there."""
        self.assignment.give(samples, slot)
        for number in samples.tolist():
            self.waiting.pop(number, None)
            if number not in self.request_of:
                self.waiting[number] = None

    def lose(self, slot: int) -> Ints:
        """Take its samples from a slot. Returns them."""
        samples = self.assignment.lose(slot)
        for number in samples.tolist():
            self.waiting.pop(number, None)
        return samples

    def _end(self, number: int, tokens: int, *, truncated: bool) -> None:
        self._tokens[number], self._truncated[number] = tokens, truncated
        self._finished[number] = True
        self.slot_of[number] = UNASSIGNED
        self.waiting.pop(number, None)

    def _restart(self, number: int) -> None:
        prior = self.items[number].prior
        self._tokens[number] = 0 if prior is None else len(prior.token_ids)
        if self.slot_of[number] != UNASSIGNED:
            self.waiting[number] = None
