"""Seeded runs of the live loop in virtual time: each seed draws a fleet, a policy and faults at any await.

    cd tests && PYTHONPATH=..:. python -m one_loop.seeded 0 10000     # plays these seeds, and prints those that fail
    cd tests && PYTHONPATH=..:. python -m one_loop.seeded 4711        # plays one, with its log

A seed replays exactly. No fault of a replica or a call ends a run. A full disk ends an attempt, as live; the next one
resumes from the journal and the checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from fakes.naive_engine import LinearModel
from fakes.tiny_scenario import SLEEP_S, WAKE_S, slot_setup
from fakes.views import Restless
from rlhfless.fleet.heartbeat import LeaseRenewal
from rlhfless.orchestrator import step as rlhf
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.start_run import start_run, stop_functions
from rlhfless.records import FunctionName, Holding, Work
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.records.journal import JournalError
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.cluster import version_of
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.faults import SimulatedFaults, Strike
from rlhfless.sim.policies import make_policy
from rlhfless.sim.run import SimulatedSession, SimulatedStages, SimulatedWorld, advance_engines, spec_of
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import ActorShape, LearnerShape, ServiceShape, Setup, SlotSetup, Transport
from rlhfless.sim.trained import TrainedState
from rlhfless.sim.virtual_loop import run_virtual
from rlhfless.sim.workloads.synthetic import LognormalLengths, SyntheticWorkload
from rlhfless.spec import OneStepOffSpec, SyncSpec
from rlhfless.util.tasks import to_the_end

STEPS = 3
LIMIT_S = 1e6
"""Virtual seconds after which a run has no end. A run takes up to some thousand."""
MAX_TOKENS = 1024
PRICES = load_price_book()
PRICED = PricedModel(LinearModel(), 16)
RECOVERIES = 30
"""Per step: more than there are faults."""
ATTEMPTS = 10
FULL = (JournalError, CheckpointError)


@dataclass(slots=True)
class Drawn:
    """What a seed draws."""

    seed: int
    setup: Setup
    faults: SimulatedFaults
    full_at: frozenset[int]
    batches: list[RolloutBatch]
    policy: str
    saves_every: int | None

    def make_policy(self) -> Policy:
        return (
            Restless(self.seed) if self.policy == "restless" else make_policy(self.policy, run=RunContract(steps=STEPS))
        )


def drawn_of(seed: int) -> Drawn:
    """Draw a fleet, kills, slow and lost calls, late heartbeats, full disks, lengths and a policy."""
    draw = random.Random(seed)
    setup = _setup(draw, seed)
    faults = SimulatedFaults(
        slow_share=draw.choice([0.0, 0.02, 0.2]),
        slow_s=draw.choice([1.0, 30.0]),
        lost_share=draw.choice([0.0, 0.0, 0.005, 0.02]),
        beat_s=20.0,
        late_share=draw.choice([0.0, 0.1]),
        late_s=draw.choice([5.0, 60.0]),
        strikes=tuple(
            Strike(draw.randrange(1, 4000), draw.randrange(100), hangs=draw.random() < 0.3)
            for _ in range(draw.choice([0, 1, 3, 6]))
        ),
    )
    lengths = LognormalLengths(median_tokens=draw.choice([50, 300]), spread=0.8, persistence=0.6)
    workload = SyntheticWorkload(lengths, 32, 8, 4, 64, MAX_TOKENS, 0.0, seed=seed)
    return Drawn(
        seed,
        setup,
        faults,
        frozenset(draw.randrange(1, 60) for _ in range(draw.choice([0, 0, 1, 2]))),
        list(workload.batches(STEPS)),
        draw.choice(["static", "cost_aware", "queue_reactive_ray_serve", "restless", "restless"]),
        draw.choice([None, 1, 2]),
    )


def _setup(draw: random.Random, seed: int) -> Setup:
    """Return a fleet whose actors, reference and learner take turns on their devices, or have devices of their own."""
    shape = EngineShape(max_sequences=16, kv_blocks=400, block_tokens=16, chunk_tokens=512)
    actors, shared = draw.randint(1, 4), draw.random() < 0.4
    spot_s = draw.choice([60.0, 150.0, 400.0, 1e4, math.inf])
    generation = tuple(
        ActorShape(slot_setup(i, start_s=20.0, node=i // 2), shape, PRICED, 1.3 if i == 3 else 1.0, spot_s)
        for i in range(actors)
    )

    def at(device: int, start_s: float) -> SlotSetup:
        node = 0 if shared else device
        return slot_setup(0 if shared else device, start_s=start_s, node=node, sleep_s=SLEEP_S, wake_s=WAKE_S)

    scoring = ServiceShape(slot_setup(0, "cpu-core", 1.0), FunctionName.SCORING, Work.SCORE, 0.004, 0.0)
    reference = ServiceShape(at(8, 15.0), FunctionName.REFERENCE, Work.LOGPROBS, 0.01, 1e-6)
    teacher = ServiceShape(at(7, 10.0), "teacher_big", Work.LOGPROBS, 0.02, 1e-6)
    services = (scoring, reference) if draw.random() < 0.5 else (scoring,)
    if seed % 3 == 0:
        services = (*services, teacher) if seed % 2 else (*services[1:], teacher)  # without rewards, or with
    learner = LearnerShape(at(9, 30.0), 1.0, 1e-6, 1e-4, 2.0)
    schedule = SyncSpec() if shared else draw.choice([SyncSpec(), OneStepOffSpec()])
    heartbeat_s, node_s = draw.choice([0.5, 5.0]), draw.choice([0.0, 5.0, 60.0])
    transport, fewest = Transport("auto", 1e9, 0.2, 200_000_000), draw.choice([0, 1])
    return Setup(
        generation, services, learner, transport, heartbeat_s, schedule, node_s, MAX_TOKENS, seed, fewest_actors=fewest
    )


@dataclass(slots=True)
class Played:
    """A run that has ended, over all its attempts."""

    world: SimulatedWorld
    attempts: int = 0
    faults: list[str] = field(default_factory=list)
    """Faults that ended an attempt."""
    learned: TrainedState | None = None
    """What the last checkpoint has learned."""
    unseen: list[str] = field(default_factory=list)
    """Errors of tasks that nobody awaits."""


def play(drawn: Drawn) -> Played:
    """Run what was drawn, and check it. Raises AssertionError, or the error that ended the run."""
    played, left = run_virtual(_play(drawn))
    check(drawn, played)
    assert not left, f"tasks go on after the end: {left}"
    return played


async def _play(drawn: Drawn) -> tuple[Played, list[str]]:
    loop, spec = asyncio.get_running_loop(), spec_of(drawn.setup, drawn.batches[-1], times_out=True)
    spec = spec.model_copy(
        update={
            "checkpoint": spec.checkpoint.model_copy(update={"every_steps": drawn.saves_every}),
            "recovery": spec.recovery.model_copy(update={"per_step": RECOVERIES}),
        }
    )
    world = SimulatedWorld(
        setup=drawn.setup, prices=PRICES, batches=drawn.batches, faults=drawn.faults, full_at=drawn.full_at
    )
    advance_engines(world.engines, LIMIT_S)
    played = Played(world)
    loop.set_exception_handler(lambda _, context: played.unseen.append(str(context)))
    try:
        while True:
            played.attempts += 1
            try:
                await _attempt(world, drawn, SimulatedSession(spec))
                played.learned = world.checkpoints.final
                break
            except FULL as fault:
                played.faults.append(f"{type(fault).__name__}: {fault}")
                if played.attempts == ATTEMPTS:
                    raise
    finally:
        world.checkpoints.close()
    await asyncio.sleep(0)
    left = [str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return played, left


async def _attempt(world: SimulatedWorld, drawn: Drawn, session: SimulatedSession) -> None:
    """Run one attempt, as rlhfless.orchestrator.session does."""
    run = world.run(drawn.make_policy(), session.spec, lambda _: None, strict=False)
    pools, call = [*run.pools.values()], run.call(0)
    renewal = asyncio.create_task(
        LeaseRenewal(pools, world.devices, call, session.spec.recovery.lease_s, lambda: None).run()
    )
    try:
        if run.attempt == 1:
            run.published = version_of(call, TrainedState())
            world.cluster.published.add(run.published.version.label)
            await drive_steps(session, run, 1, SimulatedStages(run))
        else:
            await drive_steps(session, run, await start_run(run, session.console), rlhf)
    finally:
        renewal.cancel()
        await to_the_end(stop_functions(pools))
        await asyncio.gather(renewal, return_exceptions=True)


def check(drawn: Drawn, played: Played) -> None:
    """Check the invariants of a run that has ended."""
    world, trace = played.world, played.world.trace()
    assert not world.cluster.broken, world.cluster.broken
    assert not played.unseen, played.unseen
    # Each step has learned once from each sample, and none is lost.
    state = TrainedState()
    for batch in drawn.batches:
        tokens = int((batch.prompt_tokens[batch.group] + batch.response_tokens).sum())
        state = state.after(batch.step, range(batch.groups), tokens)
    assert played.learned == state, f"the last checkpoint has {played.learned}, not {state}"
    assert [step.step for step in trace.steps] == [*range(1, STEPS + 1)]
    # Nothing is left, and what was held is paid for once.
    assert not world.cluster.handles, [*world.cluster.handles]
    assert not world.devices.in_use, world.devices.in_use
    check_ledger(world)


def check_ledger(world: SimulatedWorld) -> None:
    """Check that holdings follow each other without gaps, and that calls are within those of their replica."""
    holdings: dict[tuple[str, str], list[Holding]] = defaultdict(list)
    spans: dict[str, tuple[float, float]] = {}
    for holding in world.rows.holdings:
        holdings[holding.incarnation, holding.device].append(holding)
        first_s, last_s = spans.get(holding.incarnation, (math.inf, -math.inf))
        spans[holding.incarnation] = min(first_s, holding.start_s), max(last_s, holding.end_s)
    for (incarnation, _), rows in holdings.items():
        for before, after in pairwise(rows):
            follows = before.end_s == after.start_s or incarnation.endswith("-never-up")  # its name may be used again
            assert follows, f"{incarnation}: {before} then {after}"
    for row in world.rows.holdings:
        assert row.start_s <= row.end_s, row
    for call in world.rows.invocations:
        first_s, last_s = spans[call.incarnation]
        assert first_s <= call.start_s <= call.end_s <= last_s + 1e-6, f"{call} is outside of {first_s} to {last_s}"


def main(arguments: list[str]) -> int:
    """Play seeds; return the number of those that fail."""
    first, last = int(arguments[0]), int(arguments[-1]) + (len(arguments) == 1)
    logging.basicConfig(level=logging.INFO if last - first == 1 else logging.CRITICAL, format="%(message)s")
    ends, failed, began_s = Counter[str](), 0, time.process_time()
    for seed in range(first, last):
        try:
            played = play(drawn_of(seed))
            ends[f"{played.attempts} attempt(s)"] += 1
        except (Exception, asyncio.CancelledError) as error:
            failed += 1
            ends[type(error).__name__] += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if last - first == 1:
                raise
    print(f"{last - first} seeds in {time.process_time() - began_s:.0f} s: {dict(ends)}")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
