"""The state of a generation stage: its request, its samples in flight, and its rows of the journal.

A sample has the slot that the policy assigned (`rlhfless.scaling.assignment`), and is *on* a request to the actor that
generates it. The stage reconciles the two: it submits a sample without a request as soon as an actor serves at its
slot, and aborts a sample that is on a request to another slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.functions.calls import Call
from rlhfless.functions.generation.messages import Ended, SampleItem, SampleKey, Sampling
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import PREFIXES, Decision, FinishReason, Prompt, Rollout, Work, sample_seed
from rlhfless.records.journal import Journal
from rlhfless.scaling.assignment import Assignment
from rlhfless.scaling.policy import UNASSIGNED, FleetView, Ints, SlotView, StepView, read_only
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """The group selection of a step that does not wait for all groups, but learns from the first to complete."""

    groups: int
    must_include: frozenset[str]
    """Prompts whose groups the step waits for."""
    begun: Mapping[str, int]
    """The step that started each prompt, by prompt id. It is part of the seeds of the prompt's samples."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The samples to generate in one generation stage."""

    call: Call
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampling: Sampling
    work: Work
    seed: int
    seed_step: int
    """Part of every seed: the step, or the same number for all evaluations, so that they differ only in the weights."""
    selection: Selection | None = None
    """Set if the step does not wait for all groups."""

    @property
    def groups(self) -> int:
        """Number of groups that the step learns from."""
        return self.selection.groups if self.selection else len(self.prompts)

    def items(self, prompt: Prompt) -> tuple[SampleItem, ...]:
        """Return the samples of one prompt. Their seeds do not depend on the actor."""
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
    """Return the spec's sampling settings, or their greedy variant."""
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
    """The journal of one stage; with `None` as journal, all methods do nothing."""

    def __init__(self, journal: Journal | None, request: RolloutRequest) -> None:
        self._journal = journal
        self._request = request

    def load(self, items: Sequence[SampleItem]) -> Iterator[Rollout]:
        """Yield the rollouts of these samples. Rollouts with other seeds are ignored: the data set was edited."""
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
        """Write the tokens of deferred samples."""
        if self._request.selection is not None:
            self.add(aborted)

    def take(self, prompt_ids: Sequence[str]) -> None:
        """Record that the step learns from the groups of these prompts."""
        if self._journal is not None and (selection := self._request.selection) is not None:
            begun = [(selection.begun[prompt_id], prompt_id) for prompt_id in prompt_ids]
            self._journal.take_groups(self._request.call.step, begun)

    def _step_of(self, prompt_id: str) -> int:
        """Return the step under which a prompt's rows are stored: the step that started it."""
        selection = self._request.selection
        return selection.begun[prompt_id] if selection else self._request.call.step


@dataclass(slots=True)
class Replayed:
    """Compares engines: the new engine of a migrated sample regenerates its last token, with the same seed and the same
    preceding tokens. Equal engines generate the same token."""

    tokens: int = 0
    differ: int = 0
    """Number of replayed tokens that differ from the first engine's."""
    logprob_difference: float = 0.0
    """Largest logprob difference of equal tokens, in nats."""

    def add(self, before: Rollout, after: Rollout) -> None:
        """Compare a sample before and after its migration."""
        last = len(before.token_ids) - 1
        if _version_at(before, last) != _version_at(after, last):
            return  # other weights may generate another token
        if len(after.token_ids) <= last + (after.finish_reason == FinishReason.ABORT):
            return  # the new engine may have generated nothing
        self.tokens += 1
        if after.token_ids[last] != before.token_ids[last]:
            self.differ += 1
        else:
            difference = abs(float(after.logprobs[last]) - float(before.logprobs[last]))
            self.logprob_difference = max(self.logprob_difference, difference)

    def figures(self) -> dict[str, float]:
        """Return the comparison as metrics; empty if no token was compared."""
        if not self.tokens:
            return {}
        return {
            "replayed_tokens": float(self.tokens),
            "replayed_tokens_differ": float(self.differ),
            "replayed_logprob_difference_max": self.logprob_difference,
        }

    def decision(self, step: int, at_s: float) -> Decision:
        """Return the comparison as a row of the trace."""
        inputs: dict[str, float | int | str | bool] = {"tokens": self.tokens, "differ": self.differ}
        inputs["logprob_difference"] = self.logprob_difference
        return Decision(step, at_s, "replayed", f"{self.differ} of {self.tokens} tokens differ", inputs)


def _version_at(rollout: Rollout, token: int) -> str | None:
    """Return the version that generated a token; None if the engine does not report it."""
    return next((span.version for span in rollout.version_spans if span.start <= token < span.end), None)


class InFlightSamples:
    """The samples of one step. Samples are identified by numbers, consecutive for the samples of a prompt."""

    def __init__(self, step: int, items: Sequence[SampleItem], slots: int) -> None:
        token_ids = {item.prompt_id: item.prompt_token_ids for item in items}
        prompts = {prompt_id: len(tokens) for prompt_id, tokens in token_ids.items()}
        rank = {prompt_id: number for number, prompt_id in enumerate(prompts)}
        self.step = step
        self.items = list(items)
        """The item of each sample, with the tokens to continue from."""
        self.request_of: dict[int, int] = {}
        """The request of each running sample."""
        self.waiting: dict[int, None] = {}
        """Samples with a slot but no request, in order of submission."""
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
        """Return the prompts' shared prefixes as a row of the trace; None without any. Replays need them, because the
        trace has no prompts."""
        if not len(self.prefixes):
            return None
        texts = {prompt_id: self.prefixes.text(number) for number, prompt_id in enumerate(self._prompt_ids)}
        inputs: dict[str, float | int | str | bool] = {name: text for name, text in texts.items() if text}
        return Decision(self.step, at_s, PREFIXES, f"{len(self.prefixes)} shared by {len(inputs)} prompts", inputs)

    @property
    def progress(self) -> dict[SampleKey, int]:
        """Token counts of the unfinished samples that have tokens."""
        running = np.flatnonzero((self._tokens > 0) & ~self._finished)
        return {self.items[number].key: int(self._tokens[number]) for number in running.tolist()}

    @property
    def left(self) -> Ints:
        """Unfinished samples."""
        return np.flatnonzero(~self._finished)

    @property
    def unassigned(self) -> Ints:
        """Unfinished samples without a slot."""
        return self.assignment.unassigned

    def view(self, fleet: FleetView, slots: Sequence[SlotView]) -> StepView:
        """Return the policy's current view of the step. Its arrays are read-only views, not copies."""
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
        """Return the number of unfinished samples of a slot with at least one token, and without any."""
        unfinished = (self.slot_of == slot) & ~self._finished
        drawing = int(np.count_nonzero(unfinished & (self._tokens > 0)))
        return drawing, int(np.count_nonzero(unfinished)) - drawing

    # -- messages of the actors

    def apply_heartbeat(self, request: int, tokens: Mapping[SampleKey, int], ended: Mapping[SampleKey, Ended]) -> None:
        """Apply a heartbeat of a request. Heartbeats may be late, so they never lower a count."""
        for key, count in tokens.items():
            number = self._numbers[key]
            if self.is_on(request, key) and not self._finished[number]:
                self._tokens[number] = max(self._tokens[number], count)
        for key, end in ended.items():
            if self.is_on(request, key):
                self._end(self._numbers[key], end.tokens, truncated=end.truncated)

    def is_on(self, request: int, key: SampleKey) -> bool:
        """Return whether a sample is still on this request. Messages about other samples must be ignored."""
        return self.request_of.get(self._numbers[key]) == request

    def take_back(self, rollout: Rollout) -> None:
        """Remove a sample from its request. An unfinished sample will continue from its tokens."""
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
        """Restart the samples of a lost request from their tokens at its start, and return them."""
        lost = np.array([number for number, on in self.request_of.items() if on == request], np.int64)
        for number in lost.tolist():
            del self.request_of[number]
            self._finished[number] = self._truncated[number] = False  # it may have finished without being delivered
            self._restart(number)
        return lost

    def defer_unfinished(self) -> list[Rollout]:
        """Defer unfinished samples to a later step, and return their tokens. The policy sees them end truncated."""
        left = self.left.tolist()
        self.request_of.clear()
        for number in left:
            self._end(number, int(self._tokens[number]), truncated=True)
        return [prior for number in left if (prior := self.items[number].prior) is not None]

    # -- actions of the policy

    def give(self, samples: Ints, slot: int) -> None:
        """Assign unfinished samples to a slot; those without a request wait there."""
        self.assignment.give(samples, slot)
        for number in samples.tolist():
            self.waiting.pop(number, None)
            if number not in self.request_of:
                self.waiting[number] = None

    def lose(self, slot: int) -> Ints:
        """Unassign the samples of a slot, and return them."""
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
