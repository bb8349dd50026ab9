"""The samples of a generation stage in a live run: their tokens, journal rows and complete groups.

Finished samples are journaled before they count, and journaled samples are not generated again. Of deferred samples,
the journal keeps the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.functions.generation.messages import (
    Ended,
    GenerateRequest,
    GenerationEvent,
    GroupsFinished,
    Progress,
    SampleItem,
    SampleKey,
)
from rlhfless.orchestrator.prompt_selection import PromptHistory
from rlhfless.orchestrator.rollout_request import RolloutRequest, StageJournal
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import PREFIXES, Decision, EpisodeStatus, FinishReason, Group, Rollout
from rlhfless.records.journal import Journal
from rlhfless.scaling.assignment import Assignment, pieces
from rlhfless.scaling.policy import UNASSIGNED, FleetView, Ints, SlotView, StepView, read_only
from rlhfless.spec import RunSpec


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
    """The samples of one request (implements rlhfless.orchestrator.stage_samples.StageSamples).

    The numbers of a prompt's samples are consecutive."""

    def __init__(
        self,
        request: RolloutRequest,
        spec: RunSpec,
        slots: int,
        journal: Journal | None = None,
        history: PromptHistory | None = None,
        *,
        in_pieces: bool = False,
    ) -> None:
        """`slots`: number of slots for generation actors. `history` supplies earlier responses for drafting.
        `in_pieces`: split the samples of an actor into several requests, so that the first runs while others wait for
        their prompts.

        Finished samples in the journal are not generated again. Raises JournalError.
        """
        self.request = request
        self.step = request.call.step
        self.ended = 0
        self.request_of: dict[int, int] = {}
        """The request of each running sample."""
        self.waiting: dict[int, None] = {}
        """Samples with a slot but no request, in order of submission."""
        self.replayed = Replayed()
        self._spec, self._in_pieces = spec, in_pieces
        self._journal, self._history = StageJournal(journal, request), history or PromptHistory(spec)
        self._prompts = {prompt.prompt_id: prompt for prompt in request.prompts}
        self._delivered: dict[str, list[Rollout]] = {prompt_id: [] for prompt_id in self._prompts}
        """Finished samples by prompt, without those of complete groups."""
        self.from_earlier: list[Group] = []
        self.items = self._from_journal([item for prompt in request.prompts for item in request.items(prompt)])
        """The item of each sample, with the tokens to continue from."""
        priors = [item.prior for item in self.items if item.prior is not None]
        self.resumed = len(priors), sum(len(prior.token_ids) for prior in priors)

        token_ids = {item.prompt_id: item.prompt_token_ids for item in self.items}
        prompts = {prompt_id: len(tokens) for prompt_id, tokens in token_ids.items()}
        rank = {prompt_id: number for number, prompt_id in enumerate(prompts)}
        count = len(self.items)
        self._numbers = {item.key: number for number, item in enumerate(self.items)}
        self._prompt_ids = tuple(prompts)
        self._prompt_tokens = np.array(list(prompts.values()), np.int64)
        self.prefixes = PrefixTree.of_prompts(list(token_ids.values()))
        self._long_prefixes = self.prefixes.long()
        self._group = np.array([rank[item.prompt_id] for item in self.items], np.int64)
        self._tokens = np.array(list(map(self._resumed_tokens, range(count))), np.int64)
        self._finished = np.zeros(count, bool)
        self._truncated = np.zeros(count, bool)
        self.slot_of: Ints = np.full(count, UNASSIGNED, np.int64)
        self.assignment = Assignment(self.slot_of, self._finished, np.zeros(count, bool), slots)
        self._waited_s = np.zeros(count)
        self._parked: list[int] = []
        """Samples that were parked, and not yet asked for."""
        self._came_from: dict[int, int] = {}
        """By parked sample: the slot that it had."""

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
    def complete(self) -> bool:
        """See StageSamples."""
        return not self._delivered

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
            read_only(self.assignment.parked),
            read_only(self._waited_s),
        )

    def counts(self) -> tuple[Ints, Ints]:
        """Return the numbers of unfinished samples with at least one token, and without any, by slot `[slots]`."""
        return self.assignment.counts(self._tokens > 0)

    # -- requests to the actors

    def take_waiting(self, serves: Callable[[int], bool]) -> list[tuple[int, Ints]]:
        """See StageSamples."""
        waiting: dict[int, list[int]] = {}
        for number in self.waiting:
            waiting.setdefault(int(self.slot_of[number]), []).append(number)
        ready = {slot: numbers for slot, numbers in waiting.items() if serves(slot)}
        for number in (number for numbers in ready.values() for number in numbers):
            del self.waiting[number]
        return [(slot, np.array(part)) for slot, numbers in ready.items() for part in self._parts(numbers)]

    def _parts(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        if not self._in_pieces:
            return [numbers]
        prompts = [self.items[number].prompt_token_ids for number in numbers]
        parts = pieces(prompts, list(map(len, prompts)), self._spec.generation.engine.batch_tokens)
        return [[numbers[index] for index in part] for part in parts]

    def submit(self, samples: Ints, request: int, actor: str, version: str) -> GenerateRequest:
        """See StageSamples."""
        spec, items = self._spec, tuple(self.items[number] for number in samples)
        self.request_of.update(dict.fromkeys(samples.tolist(), request))
        return GenerateRequest(
            items=items,
            sampling=self.request.sampling,
            version=version,
            actor=actor,
            progress_interval_s=spec.generation.progress_interval_s,
            heartbeat_s=spec.recovery.heartbeat_s,
            timeout_s=spec.timeouts.generate_s,
            or_newer=spec.schedule.in_flight,
            earlier=self._history.responses({item.prompt_id for item in items}),
        )

    def on(self, requests: Collection[int]) -> dict[int, Ints]:
        """See StageSamples."""
        return self._by_request(number for number, request in self.request_of.items() if request in requests)

    def strays(self, slot_of: Callable[[int], int]) -> dict[int, Ints]:
        """See StageSamples."""
        slots = {request: slot_of(request) for request in set(self.request_of.values())}
        return self._by_request(
            number
            for number, request in self.request_of.items()
            if self.slot_of[number] not in (UNASSIGNED, slots[request])
        )

    def _by_request(self, numbers: Iterable[int]) -> dict[int, Ints]:
        found: dict[int, list[int]] = {}
        for number in numbers:
            found.setdefault(self.request_of[number], []).append(number)
        return {request: np.array(numbers) for request, numbers in found.items()}

    def names(self, samples: Ints) -> list[SampleKey]:
        """See StageSamples."""
        return [self.items[number].key for number in samples]

    def session(self, sample: int) -> str:
        """See StageSamples."""
        return self.items[sample].session

    def take_parked(self) -> list[int]:
        """See StageSamples."""
        parked, self._parked = self._parked, []
        return parked

    def answered(self, samples: Ints) -> tuple[Ints, Ints]:
        """See StageSamples."""
        back = self.assignment.unpark(samples)
        return back, np.array([self._came_from.pop(sample) for sample in back.tolist()], np.int64)

    # -- messages of the actors

    def take(self, request: int, message: GenerationEvent) -> list[Group]:
        """See StageSamples. Raises JournalError, StaleAttempt."""
        match message:
            case Progress(tokens=tokens, ended=ended):
                self.apply_heartbeat(request, tokens, ended)
            case GroupsFinished(groups=groups):
                for rollouts in groups:
                    self._take(request, rollouts)
                return [group for rollouts in groups for group in self._completed(rollouts[0].prompt_id)]
        return []

    def _take(self, request: int, rollouts: Sequence[Rollout]) -> None:
        """Journal finished samples, and let aborted ones wait for another actor."""
        current = [rollout for rollout in rollouts if self.is_on(request, rollout.key)]
        ended = [rollout for rollout in current if rollout.finish_reason != FinishReason.ABORT]
        self.ended += len(ended)
        self._journal.add(ended)
        self._history.ended(ended)
        for rollout in current:
            self.take_back(rollout)
        for rollout in ended:
            self._delivered[rollout.prompt_id].append(rollout)

    def _completed(self, prompt_id: str) -> Iterable[Group]:
        """Yield the prompt's group, once, if all its samples are there."""
        if len(self._delivered.get(prompt_id, ())) == self.request.samples_per_prompt:
            rollouts = sorted(self._delivered.pop(prompt_id), key=lambda rollout: rollout.sample_index)
            yield Group.of(self._prompts[prompt_id], rollouts)

    def _from_journal(self, items: Sequence[SampleItem]) -> list[SampleItem]:
        """Take the samples that the journal has, in the order of completion; return the items of the others."""
        missing = {item.key: item for item in items}
        for rollout in self._journal.load(items):
            if rollout.finish_reason == FinishReason.ABORT:
                missing[rollout.key] = replace(missing[rollout.key], prior=rollout)
            else:
                self._delivered[rollout.prompt_id].append(rollout)
                self._history.ended([rollout])
                del missing[rollout.key]
                self.from_earlier += self._completed(rollout.prompt_id)
        return [*missing.values()]

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
        if rollout.episode is not None:
            self._waited_s[number] = rollout.episode.wait_s
        if rollout.finish_reason != FinishReason.ABORT:
            self._end(number, len(rollout.token_ids), truncated=rollout.finish_reason == FinishReason.LENGTH)
            return
        if len(rollout.token_ids):
            self.items[number] = replace(self.items[number], prior=rollout)
        if rollout.episode is not None and rollout.episode.status is EpisodeStatus.WAITING:
            self._park(number)
        self._restart(number)

    def _park(self, number: int) -> None:
        self._parked.append(number)
        self._came_from[number] = int(self.slot_of[number])
        self.assignment.park(np.array([number]))

    def restart_lost(self, request: int) -> Ints:
        """Restart the samples of a lost request from their tokens at its start, and return them."""
        lost = np.array([number for number, on in self.request_of.items() if on == request], np.int64)
        for number in lost.tolist():
            del self.request_of[number]
            self._finished[number] = self._truncated[number] = False  # it may have finished without being delivered
            self._restart(number)
        return lost

    def defer(self) -> int:
        """See StageSamples. Raises JournalError, StaleAttempt."""
        left = self.left.tolist()
        self.request_of.clear()
        for number in left:
            self._end(number, int(self._tokens[number]), truncated=True)
        begun = [prior for number in left if (prior := self.items[number].prior) is not None]
        self._journal.keep(begun)
        return len(begun)

    def learned(self, prompt_ids: Sequence[str]) -> None:
        """See StageSamples. Raises JournalError, StaleAttempt."""
        self._journal.take(prompt_ids)

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
        self.slot_of[number], self.assignment.parked[number] = UNASSIGNED, False
        self.waiting.pop(number, None)

    def _restart(self, number: int) -> None:
        self._tokens[number] = self._resumed_tokens(number)
        if self.slot_of[number] != UNASSIGNED:
            self.waiting[number] = None

    def _resumed_tokens(self, number: int) -> int:
        """Return the number of tokens that a sample continues from."""
        prior = self.items[number].prior
        return 0 if prior is None else len(prior.token_ids)
