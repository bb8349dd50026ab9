"""Simulated responses per second on one core, with preemption, migration and faults on.

    python benchmarks/simulator.py [--steps 5] [--prompts 4096] [--samples 8] [--actors 16] [--policies static,...]
        [--smoke]

A fleet on spot machines, each with 256 slots and KV for about as many sequences of mean length, so that engines
preempt; one actor in eight is a straggler; interrupted actors start again. The policy moves samples from the fullest
to the emptiest actor at every heartbeat. Lengths are lognormal with a drift. The figure counts whole steps (generation,
scoring, learning, the bill), after one step that compiles and warms up.

Then steps of 8,192 responses on 64 actors under policies that people use, with all that they decide: the price of a
step, and of 1,000, by what takes it: the simulator, plans (and what is learned when a step ends), and looks
at a step while it is drawn.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from smoke import parsed
from where import machine

from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.accounting import summarise
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Action, Assign, Event, Heartbeat, Lost, Move, Policy, Start, StepBegan, StepView
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.policies import make_policy
from rlhfless.sim.run import LearnedStep, simulate
from rlhfless.sim.setup import ActorShape, LearnerShape, ServiceShape, Setup, SlotSetup, Transport
from rlhfless.sim.workloads.synthetic import LognormalLengths, SyntheticWorkload
from rlhfless.spec import SyncSpec

HEARTBEAT_S = 5.0
SPOT_MEAN_S = 1800.0
MAX_TOKENS = 8192
PLANNED_PROMPTS, PLANNED_ACTORS, PLANNED_STEPS = 1024, 64, 20


@dataclass(frozen=True)
class Model:
    """About a 7 B model on an H100: weights 14 GB, 57 kB of KV per token, at 3.35 TB/s."""

    context_s: float = 57_344 / (3.35e12 * 0.89)

    def iteration_s(self, sequences: int) -> float:
        return max(14e9 / (3.35e12 * 0.8), 14e9 * sequences / (989e12 * 0.8)) + 1e-4

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return 1e-4 + 14e9 * tokens / (989e12 * 0.8) + 1e-11 * tokens * context_tokens


class Level:
    """All actors up, the groups in turn; then a tenth of the difference goes from the fullest actor to the emptiest.
    What is lost goes to the emptiest too, and an actor that was lost is started again."""

    moved = 0

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:  # noqa: ARG002
        slots = view.fleet.generation()
        if isinstance(event, StepBegan):
            starts = [Start(slot) for slot in slots if view.slots[slot].state is None]
            shares = [np.flatnonzero(view.group % len(slots) == i) for i in range(len(slots))]
            return [*starts, *(Assign(slot, share) for slot, share in zip(slots, shares, strict=True))]
        load = {
            slot: view.slots[slot].running + view.slots[slot].waiting
            for slot in slots
            if view.slots[slot].state is ReplicaState.SERVING
        }
        full, empty = max(load, key=load.__getitem__, default=0), min(load, key=load.__getitem__, default=0)
        if isinstance(event, Lost):
            return (Start(event.slot), Assign(empty, event.samples))
        count = (load[full] - load[empty]) // 10 if load else 0
        if count == 0:
            return ()
        self.moved += count
        return (Move(full, empty, view.samples_at(full)[-count:]),)


def fleet(actors: int) -> Setup:
    def slot_setup(name: str, kind: str, node: int, start_s: float) -> SlotSetup:
        return SlotSetup(Allocation.of([Device(name, kind, 0)]), f"node-{node}", start_s)

    shape = EngineShape(max_sequences=256, kv_blocks=20_000, block_tokens=16, chunk_tokens=2048)
    prices = PricedModel(Model(), shape.max_sequences)
    generation = tuple(
        ActorShape(
            slot_setup(f"h100-{i}", "h100", i // 8, start_s=45.0),
            shape,
            prices,
            slowdown=1.3 if i % 8 == 7 else 1.0,
            spot_mean_s=SPOT_MEAN_S,
        )
        for i in range(actors)
    )
    scoring = ServiceShape(slot_setup("cpu-0", "cpu-core", 0, 1.0), FunctionName.SCORING, Work.SCORE, 1e-3, 0.0)
    learner = LearnerShape(slot_setup("learner", "h100", 0, 60.0), 1.0, 1e-6, 4e-6, 2.0)
    transport = Transport("auto", 50e9, 0.2, 14_000_000_000)
    return Setup(
        generation, (scoring,), learner, transport, HEARTBEAT_S, SyncSpec(), node_s=120.0, max_tokens=MAX_TOKENS, seed=0
    )


def workload(prompts: int, samples: int) -> SyntheticWorkload:
    """Four epochs' worth of prompts, of which each step draws some."""
    shape = LognormalLengths(median_tokens=700, spread=0.8, persistence=0.6)
    return SyntheticWorkload(shape, 4 * prompts, prompts, samples, 256, MAX_TOKENS, drift_per_step=0.01, seed=0)


class Timed:
    """A policy, and what its answers take: when a step begins or ends, and while it is drawn."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.plans_s = self.looks_s = 0.0

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        began_s = time.process_time()
        actions = self._policy.decide(at_s, event, view)
        took_s = time.process_time() - began_s
        if isinstance(event, Heartbeat):
            self.looks_s += took_s
        else:
            self.plans_s += took_s
        return actions


def planned(name: str) -> None:
    """Prints what steps under a policy take, after one that warms up."""
    policy = Timed(make_policy(name, run=RunContract(steps=PLANNED_STEPS)))
    batches = list(workload(PLANNED_PROMPTS, 8).batches(PLANNED_STEPS + 1))
    began_s = 0.0

    def on_step(step: LearnedStep) -> None:
        nonlocal began_s
        if step.record.step == 1:
            policy.plans_s = policy.looks_s = 0.0
            began_s = time.process_time()

    simulate(fleet(PLANNED_ACTORS), policy, load_price_book(), batches, on_step=on_step)
    step_s = (time.process_time() - began_s) / PLANNED_STEPS
    plans_s, looks_s = policy.plans_s / PLANNED_STEPS, policy.looks_s / PLANNED_STEPS
    print(
        f"{name:26} {1e3 * step_s:6.0f} s of processor time for 1,000 steps: simulator "
        f"{1e3 * (step_s - plans_s - looks_s):.0f}, plans {1e3 * plans_s:.0f}, looks in mid-step {1e3 * looks_s:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--actors", type=int, default=16)
    parser.add_argument("--policies", default="static,queue_reactive_ray_serve,rlhfless_published,cost_aware")
    arguments = parsed(parser, steps=1, prompts=64, actors=4, policies="static,cost_aware")
    work = workload(arguments.prompts, arguments.samples)
    policy, prices = Level(), load_price_book()
    batches, ends_s = list(work.batches(arguments.steps + 1)), [time.perf_counter()]

    def on_step(step: LearnedStep) -> None:
        ends_s.append(time.perf_counter())
        number, took_s = step.record.step, ends_s[-1] - ends_s[-2]
        print(f"step {number}: {len(batches[0].group) / took_s:12,.0f} responses/s{' (warm-up)' * (number == 1)}")

    trace = simulate(fleet(arguments.actors), policy, prices, batches, on_step=on_step)
    begun_s, stepped_s = ends_s[1], ends_s[-1] - ends_s[1]
    summary = summarise(trace, prices)
    spent_s = time.perf_counter() - begun_s
    responses = arguments.steps * arguments.prompts * arguments.samples
    lost = sum(holding.state is ReplicaState.STARTING for holding in trace.holdings) - arguments.actors - 2
    print(f"{machine()}, one core used")
    print(f"{responses / spent_s:,.0f} responses/s: {responses} in {spent_s:.3f} s, {arguments.actors} actors")
    print(f"{responses / stepped_s:,.0f} responses/s without the bill")
    print(f"{policy.moved} moves, {lost} interruptions, heartbeat {HEARTBEAT_S} s")
    print(f"simulated {trace.steps[-1].end_s / 3600:.2f} h, {summary.cost_usd:.2f} USD")
    print(f"{PLANNED_PROMPTS * 8} responses a step, {PLANNED_ACTORS} actors, planning included:")
    for name in filter(None, arguments.policies.split(",")):
        planned(name)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
