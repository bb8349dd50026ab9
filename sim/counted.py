"""The samples of a step, counted: numbers and lengths in arrays, without tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhfless.functions.calls import CallUsage
from rlhfless.scaling.assignment import Assignment
from rlhfless.scaling.policy import UNASSIGNED, FleetView, Ints, SlotView, StepView, read_only
from rlhfless.sim.samples import StepProgress

NONE = -1


class NothingReplayed:
    """The figures of samples that are read from a recorded run; here there are none."""

    tokens = 0

    def figures(self) -> dict[str, float]:
        return {}


class CountedSamples:
    """The samples that are being generated: the counting form of InFlightSamples."""

    def __init__(self, progress: StepProgress, slots: int) -> None:
        table, batch = progress.table, progress.batch
        self.progress_of_step = progress
        self.step = batch.step
        self.slots = slots
        self.request = np.full(batch.samples, NONE, np.int64)
        """The request of each running sample."""
        self.waits = np.zeros(batch.samples, np.bool_)
        """Whether each has a slot but no request."""
        self.order: list[Ints] = []
        """Samples that wait, in the order of their assignment; entries that no longer wait are skipped."""
        self.replayed = NothingReplayed()
        self.slot_of = table.home
        self.finished = table.finished
        self.assignment = Assignment(table.home, table.finished, slots)
        self._view = (
            batch.prompt_ids,
            read_only(batch.prompt_tokens),
            read_only(batch.group),
            read_only(table.tokens),
            read_only(table.finished),
            read_only(table.truncated),
            read_only(table.home),
        )
        self._prefixes = batch.tree.long()
        self._counts: tuple[list[int], list[int]] | None = None

    def prefixes_decision(self, at_s: float) -> None:
        return None

    @property
    def left(self) -> Ints:
        return np.flatnonzero(~self.finished)

    @property
    def unassigned(self) -> Ints:
        return self.assignment.unassigned

    def view(self, fleet: FleetView, slots: Sequence[SlotView]) -> StepView:
        ids, *columns = self._view
        self._counts = None
        return StepView(fleet, tuple(slots), self.step, ids, *columns, self._prefixes)

    def counts(self, slot: int) -> tuple[int, int]:
        if self._counts is None:
            home, begun = self.slot_of, self.progress_of_step.table.tokens > 0
            held = home >= 0
            running = np.bincount(home[held & begun], minlength=self.slots)
            waiting = np.bincount(home[held & ~begun], minlength=self.slots)
            self._counts = running.tolist(), waiting.tolist()
        return self._counts[0][slot], self._counts[1][slot]

    def give(self, samples: Ints, slot: int) -> None:
        self.assignment.give(samples, slot)
        waiting = samples[self.request[samples] == NONE]
        self.waits[waiting] = True
        if waiting.size:
            self.order.append(waiting)

    def lose(self, slot: int) -> Ints:
        samples = self.assignment.lose(slot)
        self.waits[samples] = False
        return samples

    def take_waiting(self, serving: np.ndarray) -> dict[int, Ints]:
        """Return the samples that wait at serving slots, in order, by slot; they wait no longer."""
        if not self.order:
            return {}
        order = np.concatenate(self.order)
        order = order[self.waits[order] & ~self.finished[order]]
        if order.size > np.count_nonzero(self.waits):  # given twice before it was submitted: the last time counts
            _, last = np.unique(order[::-1], return_index=True)
            order = order[np.sort(order.size - 1 - last)]
        slots = self.slot_of[order]
        ready = serving[slots]
        chosen, of = order[ready], slots[ready]
        self.order = [order[~ready]] if not ready.all() else []
        self.waits[chosen] = False
        return {int(slot): chosen[of == slot] for slot in np.unique(of)}

    def restart(self, samples: Ints) -> None:
        """Let samples that have left their actor wait at their slot."""
        left = samples[~self.finished[samples]]
        self.request[samples] = NONE
        there = left[self.slot_of[left] != UNASSIGNED]
        self.waits[there] = True
        if there.size:
            self.order.append(there)


@dataclass(slots=True, eq=False)
class CountedGroup:
    """A complete group."""

    prompt: SimpleNamespace
    number: int
    tokens: int
    batch: Any

    def adding(self, score: Any = None, **columns: Any) -> CountedGroup:
        return self


@dataclass(slots=True)
class CountedBatch:
    """What a step learns from."""

    tokens: int
    denominators: SimpleNamespace
    batch: Any
    groups: list[int]


@dataclass(slots=True, eq=False)
class CountedRequest:
    """The samples of one actor."""

    numbers: Ints
    ended: Any
    cached_tokens: int = 0

    def usage(self) -> CallUsage:
        return CallUsage(sequences=len(self.numbers))
