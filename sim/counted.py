"""The samples of a step, counted: numbers and lengths in arrays, without tokens.

They implement rlhfless.orchestrator.stage_samples.StageSamples. The engines (rlhfless.sim.engines) write to the same
arrays, and report for all actors at once, in one message, the groups that are complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless.functions.generation.messages import Progress
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.scaling.assignment import Assignment
from rlhfless.scaling.policy import UNASSIGNED, FleetView, Ints, SlotView, StepView, read_only
from rlhfless.sim.counted_prompts import CountedJournal, CountedPrompt, samples_left
from rlhfless.sim.engines import StepEngines
from rlhfless.sim.samples import RolloutBatch
from rlhfless.util.clock import unix_s

NONE = -1
"""The request of a sample that is on none, and of a message of all engines."""

NO_SAMPLES = np.empty(0, np.int64)

ROUNDING_S = 1e-9


class NothingReplayed:
    """The figures of samples that are read from a recorded run; here there are none."""

    tokens = 0

    def figures(self) -> dict[str, float]:
        return {}


@dataclass(slots=True, eq=False)
class CountedRequest:
    """See GenerateRequest, of which this is the counting form. The actor waits until it has `ended`."""

    step: int
    numbers: Ints
    version: str
    ended: asyncio.Future[float]
    """Has the time at which the last sample ended or left, which may have passed (see REPORT_S)."""
    aborted: Callable[[Ints], None]
    """To be called with samples that have left the engine."""
    prefixes: list[int]
    """Shared prefixes that an actor computes before the samples: nodes of the step's engines."""
    prompts: tuple[()] = ()
    environments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CountedFinished:
    """See GroupsFinished, of which this is the counting form."""

    groups: Ints = field(default_factory=lambda: NO_SAMPLES)
    """Groups that have become complete since the last message."""
    aborted: Ints = field(default_factory=lambda: NO_SAMPLES)
    parked: Ints = field(default_factory=lambda: NO_SAMPLES)
    """Samples of all requests that wait for their environment, and have left their engines."""


class CountedSamples:
    """The samples of one request (implements StageSamples)."""

    def __init__(
        self, request: RolloutRequest, engines: StepEngines, journal: CountedJournal, slots: int, *, planned: bool
    ) -> None:
        """`request`: of CountedPrompts. `slots`: number of slots for generation actors. `planned`: see PrefixUse."""
        self.request = request
        self._engines = engines
        self.step = request.call.step
        prompts: Any = request.prompts
        self._prompts: Sequence[CountedPrompt] = prompts
        self._journal = journal
        self._left = left = samples_left(self.step, self._prompts, journal)
        batch, progress = left.batch, engines.begin(left.batch, self._report, self._park)
        progress.set_tokens(np.arange(batch.samples), left.tokens)
        progress.safe_tokens[:] = left.tokens
        progress.await_groups(max(request.groups - len(left.complete), 1))
        table = progress.table
        fed_tokens = left.whole.context_tokens + left.whole.response_tokens
        self._group_tokens = np.bincount(left.whole.group, fed_tokens, left.whole.groups).astype(np.int64).tolist()
        self.from_earlier = [self._group(number, unix_s()) for number in left.complete]
        resumes = left.tokens > 0
        self.resumed = int(np.count_nonzero(resumes)), int(left.tokens[resumes].sum())
        self.receive: Callable[[int, Any], None] = lambda *_: None
        """Takes the messages of the engines: GenerationStage.receive."""
        self.progress = progress
        self.replayed = NothingReplayed()
        self.slot_of = table.home
        self.assignment = Assignment(table.home, table.finished, np.zeros(batch.samples, np.bool_), slots)
        self._parked: list[int] = []
        """Samples that were parked, and not yet asked for."""
        self._came_from = np.full(batch.samples, UNASSIGNED, np.int64)
        """`[samples]`: the slot that each had before it was parked."""
        self._slots = slots
        self._request_of = np.full(batch.samples, NONE, np.int64)
        self._back = np.zeros(batch.samples, np.bool_)
        """`[samples]`: has left its engine; the message is on its way."""
        self._waits = np.zeros(batch.samples, np.bool_)
        """`[samples]`: has a slot but no request."""
        self._order: dict[int, list[Ints]] = {}
        """By slot: the samples that wait there, in the order of their assignment; those that no longer do are
        skipped."""
        self._open: dict[int, asyncio.Future[float]] = {}
        """By request: set when none of its samples is on the engine."""
        self._requests = self._complete = 0
        """Number of requests so far, and of complete groups."""
        self._prefixes = batch.tree.long() if planned else None

    def prefixes_decision(self, at_s: float) -> None:
        return None

    @property
    def left(self) -> Ints:
        return np.flatnonzero(~self._finished)

    @property
    def _finished(self) -> Any:
        return self.progress.table.finished

    @property
    def ended(self) -> int:
        return int(np.count_nonzero(self._finished))

    @property
    def complete(self) -> bool:
        return self._complete == self._left.batch.groups

    @property
    def unassigned(self) -> Ints:
        return self.assignment.unassigned

    def view(self, fleet: FleetView, slots: Sequence[SlotView]) -> StepView:
        self._engines.settle()
        batch, table = self._left.batch, self.progress.table
        return StepView(
            fleet,
            tuple(slots),
            self.step,
            batch.prompt_ids,
            read_only(batch.prompt_tokens),
            read_only(batch.group),
            read_only(table.tokens),
            read_only(table.finished),
            read_only(table.truncated),
            read_only(table.home),
            self._prefixes,
            read_only(self.assignment.parked),
            None if batch.turns is None else read_only(table.sample["waited_s"]),
        )

    def counts(self) -> tuple[Ints, Ints]:
        return self.assignment.counts(self.progress.table.tokens > 0)

    def give(self, samples: Ints, slot: int) -> None:
        self.assignment.give(samples, slot)
        self._wait(samples[self._request_of[samples] == NONE], slot)

    def lose(self, slot: int) -> Ints:
        samples = self.assignment.lose(slot)
        self._waits[samples] = False
        return samples

    def _wait(self, samples: Ints, slot: int) -> None:
        self._waits[samples] = True
        if samples.size:
            self._order.setdefault(slot, []).append(samples)

    # -- requests to actors

    def take_waiting(self, serves: Callable[[int], bool]) -> list[tuple[int, Ints]]:
        taken = []
        for slot in sorted(filter(serves, self._order)):
            order = np.concatenate(self._order.pop(slot))
            order = order[self._waits[order] & (self.slot_of[order] == slot)]
            _, last = np.unique(order[::-1], return_index=True)  # of those given twice, the last time counts
            order = order[np.sort(order.size - 1 - last)]
            self._waits[order] = False
            if order.size:
                taken.append((slot, order))
        return taken

    def submit(self, samples: Ints, request: int, actor: str, version: str) -> CountedRequest:
        self._request_of[samples] = request
        self._requests = request + 1
        ended = self._open[request] = asyncio.get_running_loop().create_future()
        return CountedRequest(
            self.step,
            samples,
            version,
            ended,
            lambda aborted: self._aborted(request, aborted),
            self._shared_by(samples),
        )

    def _shared_by(self, samples: Ints) -> list[int]:
        """Return the prefixes to compute before these samples; none if the run does not know them."""
        batch = self._left.batch
        if self._prefixes is None or not len(batch.tree):
            return []
        return [batch.groups + prefix for prefix in batch.tree.to_precompute(np.unique(batch.group[samples]))]

    def on(self, requests: Collection[int]) -> dict[int, Ints]:
        return self._by_request(np.flatnonzero(np.isin(self._request_of, [*requests]) & ~self._finished))

    def strays(self, slot_of: Callable[[int], int]) -> dict[int, Ints]:
        held = np.flatnonzero((self.slot_of != UNASSIGNED) & (self._request_of != NONE))
        requests, of = np.unique(self._request_of[held], return_inverse=True)
        on = np.array(list(map(slot_of, requests.tolist())), np.int64)[of]
        return self._by_request(held[on != self.slot_of[held]])

    def _by_request(self, samples: Ints) -> dict[int, Ints]:
        if not samples.size:
            return {}
        of = self._request_of[samples]
        return {request: samples[of == request] for request in np.unique(of).tolist()}

    def names(self, samples: Ints) -> list[int]:
        names: list[int] = samples.tolist()
        return names

    def session(self, sample: int) -> int:
        return sample

    def take_parked(self) -> list[int]:
        parked, self._parked = self._parked, []
        return parked

    def answered(self, samples: Ints) -> tuple[Ints, Ints]:
        back = self.assignment.unpark(samples)
        return back, self._came_from[back]

    # -- messages of actors

    def take(self, request: int, message: CountedFinished | Progress) -> list[CountedGroup]:
        if isinstance(message, Progress):
            return []  # the engines write to the view
        self._leave(message.aborted[self._request_of[message.aborted] == request])
        if (parked := message.parked[self._request_of[message.parked] != NONE]).size:
            self._came_from[parked] = self.slot_of[parked]
            self.assignment.park(parked)
            self._parked += parked.tolist()
            self._leave(parked)
        self._complete += message.groups.size
        numbers, complete_s = self._left.groups[message.groups], self.progress.table.complete_s[message.groups]
        groups = [self._group(number, at_s) for number, at_s in zip(numbers.tolist(), complete_s.tolist(), strict=True)]
        for group in groups:
            self._keep(group.number, group.prompt.response_tokens)
        return groups

    def _group(self, number: int, complete_s: float) -> CountedGroup:
        return CountedGroup(self._prompts[number], number, self._group_tokens[number], complete_s, self._left.whole)

    def _keep(self, number: int, tokens: Ints) -> None:
        """Write the tokens of a group's samples to the journal."""
        prompt_id, selection = self._prompts[number].prompt_id, self.request.selection
        self._journal.add(self.step if selection is None else selection.begun[prompt_id], prompt_id, tokens)

    def restart_lost(self, request: int) -> Ints:
        lost = np.flatnonzero((self._request_of == request) & ~self._finished)
        self._open.pop(request, None)
        self._leave(lost)
        return lost

    def _leave(self, samples: Ints) -> None:
        """Let samples that have left their actor wait at their slot."""
        self._request_of[samples], self._back[samples] = NONE, False
        slots = self.slot_of[samples]
        for slot in np.unique(slots[slots != UNASSIGNED]).tolist():
            self._wait(samples[slots == slot], slot)

    def _report(self, groups: Ints) -> None:
        """Send a message: these groups have become complete."""
        self._end_requests()
        self.receive(NONE, CountedFinished(groups))

    def _aborted(self, request: int, samples: Ints) -> None:
        """Send a message: these samples of a request have left its engine."""
        self._back[samples[self._request_of[samples] == request]] = True
        self._end_requests()
        self.receive(request, CountedFinished(aborted=samples))

    def _park(self, samples: Ints) -> None:
        """Send a message: these samples have left their engines, to wait for their environment."""
        samples = samples[self._request_of[samples] != NONE]
        self._back[samples] = True
        self._end_requests()
        self.receive(NONE, CountedFinished(parked=samples))

    def _end_requests(self) -> None:
        """End the requests without a sample on their engines. Engines may be ahead of the clock."""
        now_s, finish_s = unix_s(), self.progress.table.finish_s
        ended = self._back | (self._finished & (finish_s <= now_s + ROUNDING_S))
        left = np.bincount(self._request_of[(self._request_of != NONE) & ~ended], minlength=self._requests)
        for request in [request for request in self._open if not left[request]]:
            samples = np.flatnonzero(self._request_of == request)
            aborted = not samples.size or self._back[samples].any()
            if not (future := self._open.pop(request)).done():
                future.set_result(now_s if aborted else min(float(finish_s[samples].max()), now_s))

    # -- the end of the stage

    def defer(self) -> int:
        left, table = self.left, self.progress.table
        begun = int(np.count_nonzero(table.tokens[left]))
        tokens = self._left.whole.response_tokens.copy()
        tokens[self._left.samples] = table.tokens
        of = np.split(tokens, np.flatnonzero(np.diff(self._left.whole.group)) + 1)
        for number in self._left.groups.tolist():
            self._keep(number, of[number])
        self._request_of[:] = NONE
        table.finished[left] = table.truncated[left] = True
        table.home[left] = UNASSIGNED
        self.assignment.parked[left] = False
        return begun

    def learned(self, prompt_ids: Sequence[str]) -> None:
        if (selection := self.request.selection) is not None:
            self._journal.take_groups(self.step, [(selection.begun[prompt_id], prompt_id) for prompt_id in prompt_ids])


@dataclass(slots=True, eq=False)
class CountedGroup:
    """A complete group."""

    prompt: CountedPrompt
    number: int
    """Its number in `batch`."""
    tokens: int
    """Those that functions get: its responses, each with the prompt."""
    complete_s: float
    batch: RolloutBatch

    def adding(self, score: Any = None, **columns: Any) -> CountedGroup:
        return self
