"""A random run, and what holds for the trace of every one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from fakes.simple_policies import Restless
from fakes.small_fleet import (
    PRICES,
)
from rlhfless.records import Holding, Invocation
from rlhfless.scaling.accounting import Interval, clip, length, summarise, union
from rlhfless.scaling.policy import Policy
from rlhfless.sim.generation import Generation
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import Setup
from rlhfless.sim.simulation import Simulation
from rlhfless.spec import CheapestSpec, FastestSpec, WeightedSpec


@dataclasses.dataclass(frozen=True)
class Run:
    """A fleet, what it draws, and a policy's seed."""

    setup: Setup
    batches: list[RolloutBatch]
    seed: int

    def restless(self) -> Restless:
        return Restless(self.seed)


def check_books(run: Run, policy: Policy) -> None:
    """Plays a run: every sample is drawn once, and the bill is what was held."""
    simulation, drawn = play(run.setup, run.batches, policy)
    trace = simulation.close()
    for batch, generation in zip(run.batches, drawn, strict=True):
        table = generation.progress.table
        assert table.tokens.tolist() == batch.response_tokens.tolist()
        assert table.finished.all()
        assert np.isfinite(table.finish_s).all()
        assert (table.actor >= 0).all()
    assert [step.step for step in trace.steps] == [batch.step for batch in run.batches]
    total = summarise(trace, PRICES).total  # raises if holdings overlap
    held_s = math.fsum(holding.device_s for holding in trace.holdings)
    assert total.provisioned_device_s == pytest.approx(held_s, rel=1e-9)
    assert unheld_s(trace.holdings, trace.invocations) == pytest.approx(0.0, abs=1e-6)
    assert total.cost_usd == pytest.approx(PRICES.cost_usd(trace.holdings))
    assert crowd(trace.holdings) <= 1.0 + 1e-9
    drawn_tokens = sum(call.output_tokens for call in trace.invocations)
    needed = sum(int(batch.response_tokens.sum()) for batch in run.batches)
    crashes = any(actor.spot_mean_s < math.inf for actor in run.setup.actors)
    assert drawn_tokens >= needed if crashes else drawn_tokens == needed


def unheld_s(holdings: Sequence[Holding], invocations: Sequence[Invocation]) -> float:
    """Seconds of invocations outside every holding of their incarnation."""
    held: dict[str, list[Interval]] = defaultdict(list)
    for holding in holdings:
        held[holding.incarnation].append((holding.start_s, holding.end_s))
    whole = {incarnation: union(intervals) for incarnation, intervals in held.items()}
    return math.fsum(
        call.duration_s
        - length(piece for begin, end in whole.get(call.incarnation, []) for piece in clip(worked, begin, end))
        for call in invocations
        for worked in [[(call.start_s, call.end_s)]]
    )


CONTRACTS = st.one_of(
    st.builds(WeightedSpec, time_weight=st.sampled_from([0.0, 0.5, 1.0])),
    st.builds(CheapestSpec, deadline_s=st.sampled_from([0.5, 5.0, 500.0]), per=st.sampled_from(["step", "run"])),
    st.builds(FastestSpec, budget_usd=st.sampled_from([1e-6, 0.01, 1.0]), per=st.sampled_from(["step", "run"])),
)


def play(setup: Setup, batches: Sequence[RolloutBatch], policy: Policy) -> tuple[Simulation, list[Generation]]:
    simulation = Simulation(setup, policy, PRICES)
    simulation.reserve(batches)
    return simulation, [simulation.step(batch) for batch in batches]


def crowd(holdings: Sequence[Holding]) -> float:
    """The largest share of a device that is billed at any instant."""
    edges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for holding in holdings:
        edges[holding.device] += [(holding.start_s, holding.share), (holding.end_s, -holding.share)]
    sums = (itertools.accumulate(share for _, share in sorted(changes)) for changes in edges.values())
    return max(total for device in sums for total in device)
