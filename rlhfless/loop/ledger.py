"""The driver's ledger: every holding and invocation, on its way into the trace, with the cost so far."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from rlhfless.fleet.pool import Pool
from rlhfless.records import Decision, Group, Holding, Invocation, Score, StepRecord, Work
from rlhfless.records.traces import TraceWriter
from rlhfless.scaling.intervals import clip, length, union
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook


class Ledger:
    """Takes records as they come; `flush` writes them, once per step and at the end."""

    def __init__(self, writer: TraceWriter, prices: PriceBook) -> None:
        self._writer = writer
        self._prices = prices
        self._closed_usd = 0.0
        self._invocations: list[Invocation] = []

    def add_holding(self, holding: Holding) -> None:
        """A span of time in which a replica held a device, in one state."""
        self._writer.add_holding(holding)
        self._closed_usd += self._prices.cost_usd([holding])

    def add_invocation(self, invocation: Invocation) -> None:
        """A call of a function."""
        self._writer.add_invocation(invocation)
        self._invocations.append(invocation)

    def add_group(self, step: int, group: Group, scores: Iterable[Score]) -> None:
        """The rollouts of a group with their scores."""
        for rollout, score in zip(group.rollouts, scores, strict=True):
            self._writer.add_rollout(step, rollout, score, len(group.prompt.token_ids))

    def decide(self, step: int, kind: str, choice: str, **inputs: float | int | str | bool) -> None:
        """A decision, with all it was decided from."""
        self._writer.add_decision(Decision(step, time.time(), kind, choice, inputs))

    def add_step(self, record: StepRecord) -> None:
        """A finished step. Its invocations are not needed any more for `seconds_by_work`."""
        self._writer.add_step(record)
        self._invocations.clear()

    def cost_usd(self, pools: Iterable[Pool]) -> float:
        """Cost of the run up to now, with the holdings that are still open."""
        open_usd = sum(
            device_s * self._prices.price_usd_per_hour(kind) / SECONDS_PER_HOUR
            for pool in pools
            for replica in pool.replicas()
            for kind, device_s in replica.open_device_s.items()
        )
        return self._closed_usd + open_usd

    def seconds_by_work(self, start_s: float, end_s: float) -> dict[Work, float]:
        """Wall-clock seconds of the step in which each kind of work was under way on at least one replica."""
        spans: dict[Work, list[tuple[float, float]]] = defaultdict(list)
        for invocation in self._invocations:
            spans[invocation.work].append((invocation.start_s, invocation.end_s))
        return {work: length(clip(union(parts), start_s, end_s)) for work, parts in spans.items()}

    def outside_s(self, start_s: float, end_s: float) -> float:
        """Seconds of the step in which no learning or generating function's body ran: RPC, weight sync, probe, our
        own bookkeeping."""
        bodies = [(i.start_s, i.end_s) for i in self._invocations if i.work not in OVERHEAD]
        return (end_s - start_s) - length(clip(union(bodies), start_s, end_s))

    def flush(self, step: int) -> None:
        """Write all rows to disk."""
        self._writer.flush(step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


OVERHEAD = frozenset({Work.LOAD_WEIGHTS, Work.PUBLISH})
"""Work that exists only because learner and engine are separate: it counts as time outside function bodies."""
