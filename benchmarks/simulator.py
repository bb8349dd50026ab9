"""Simulated responses per second on one core, with preemption, migration and faults on.

    python benchmarks/simulator.py [--steps 5] [--prompts 4096] [--samples 8] [--actors 16]

A fleet on spot machines, each with 256 places and KV for about as many sequences of mean length, so that engines
preempt; one actor in eight is a straggler; interrupted actors start again. The policy moves samples from the fullest
to the emptiest actor at every beat. Lengths are lognormal with a drift. The figure counts whole steps (generation,
scoring, learning, the bill), after one step that compiles and warms up.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from where import machine

from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.accounting import summarise
from rlhfless.scaling.placement import Seat, Slot
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.fleet import Place, Transport, TransportKind
from rlhfless.sim.generation import Links
from rlhfless.sim.policy import Action, Assign, Event, KeepGoing, Move, PlaceView
from rlhfless.sim.step import LearnerShape, ServiceShape, Setup, Simulation
from rlhfless.sim.workloads.synthetic import LognormalLengths, SyntheticWorkload

BEAT_S = 5.0
SPOT_MEAN_S = 1800.0


@dataclass(frozen=True)
class Model:
    """About a 7 B model on an H100: weights 14 GB, 57 kB of KV per token, at 3.35 TB/s."""

    context_s: float = 57_344 / (3.35e12 * 0.89)

    def iteration_s(self, sequences: int) -> float:
        return max(14e9 / (3.35e12 * 0.8), 14e9 * sequences / (989e12 * 0.8)) + 1e-4

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return 1e-4 + 14e9 * tokens / (989e12 * 0.8) + 1e-11 * tokens * context_tokens


class Level(KeepGoing):
    """Moves a tenth of the difference from the fullest actor to the emptiest."""

    moved = 0

    def decide(self, at_s: float, event: Event, places: Mapping[int, PlaceView]) -> Sequence[Action]:
        actions = list(super().decide(at_s, event, places))
        load = {i: p.running + p.waiting for i, p in places.items() if p.state is ReplicaState.SERVING}
        if any(isinstance(action, Assign) for action in actions) or len(load) < 2:
            return actions
        full, empty = max(load, key=load.__getitem__), min(load, key=load.__getitem__)
        count = (load[full] - load[empty]) // 10
        if count > 0:
            self.moved += count
            actions.append(Move(full, empty, places[full].samples[-count:]))
        return actions


def fleet(actors: int) -> Setup:
    def seat(name: str, kind: str) -> Seat:
        return Seat((Slot(name, kind, 0),), 1.0)

    shape = EngineShape(max_sequences=256, kv_blocks=20_000, block_tokens=16, chunk_tokens=2048)
    prices = PricedModel(Model(), shape.max_sequences)
    places = tuple(
        Place(
            seat(f"h100-{i}", "h100"),
            f"node-{i // 8}",
            shape,
            prices,
            start_s=45.0,
            wake_s={},
            slowdown=1.3 if i % 8 == 7 else 1.0,
            spot_mean_s=SPOT_MEAN_S,
        )
        for i in range(actors)
    )
    scoring = ServiceShape(FunctionName.SCORING, Work.SCORE, seat("cpu-0", "cpu-core"), 1.0, 1e-3, 0.0)
    learner = LearnerShape(seat("learner", "h100"), 60.0, 1.0, 1e-6, 4e-6, 2.0)
    transport = Transport(TransportKind.NCCL, 50e9, 0.2, 14_000_000_000)
    links = Links(BEAT_S, 0.01, 57_344, 50e9)
    return Setup(places, (scoring,), learner, transport, links, "sync", node_s=120.0, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--actors", type=int, default=16)
    arguments = parser.parse_args()
    shape = LognormalLengths(median_tokens=700, spread=0.8, persistence=0.6)
    work = SyntheticWorkload(
        shape, 4 * arguments.prompts, arguments.prompts, arguments.samples, 256, 8192, drift_per_step=0.01, seed=0
    )
    policy, prices = Level(), load_price_book()
    simulation, preempted, begun_s = Simulation(fleet(arguments.actors), policy), 0, 0.0
    for batch in list(work.batches(arguments.steps + 1)):
        plan = {i: np.flatnonzero(batch.group % arguments.actors == i) for i in range(arguments.actors)}
        started_s = time.perf_counter()
        begun_s = begun_s or (started_s if batch.step == 2 else 0.0)
        _, generation = simulation.step(batch, plan)
        preempted += generation.preemptions
        took_s = time.perf_counter() - started_s
        print(f"step {batch.step}: {batch.samples / took_s:12,.0f} responses/s{' (warm-up)' * (batch.step == 1)}")
    stepped_s = time.perf_counter() - begun_s
    trace = simulation.close(prices)
    summary = summarise(trace, prices)
    spent_s = time.perf_counter() - begun_s
    responses = arguments.steps * arguments.prompts * arguments.samples
    lost = sum(holding.state is ReplicaState.STARTING for holding in trace.holdings) - arguments.actors - 2
    print(f"{machine()}, one core used")
    print(f"{responses / spent_s:,.0f} responses/s: {responses} in {spent_s:.3f} s, {arguments.actors} actors")
    print(f"{responses / stepped_s:,.0f} responses/s without the bill")
    print(f"{preempted} preemptions, {policy.moved} moves, {lost} interruptions, beat {BEAT_S} s")
    print(f"simulated {trace.steps[-1].end_s / 3600:.2f} h, {summary.cost_usd:.2f} USD")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
