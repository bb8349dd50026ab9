"""Whatever a policy decides and whichever actor dies, every sample comes out once, with its seed and no token twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_cluster import FakeFleet, FakePool
from fakes.fake_run import Reader, draw, stage_of
from fakes.set_clock import TickingClock, reading
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.records import Rollout, sample_seed
from rlhfless.scaling.policy import Action, Assign, Event, Move, StepView

NAMES, SAMPLES = "pqrs", 3
ALL = len(NAMES) * SAMPLES


class Dice:
    """A policy that assigns work randomly, omits and moves samples, names slots and samples that do not exist, and
    raises."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        actions: list[Action] = []
        for _ in range(self._random.randint(0, 4)):
            samples = np.array(self._random.sample(range(ALL + 1), self._random.randint(1, 5)), np.int64)
            source, target = self._random.randint(0, 3), self._random.randint(0, 3)
            actions.append(self._random.choice((Assign(target, samples), Move(source, target, samples))))
        if self._random.random() < 0.1:
            raise RuntimeError("dice under the table")
        return actions


async def play(random: Random) -> list[Rollout]:
    """Generate all samples while the test plays the actors."""
    pool, lost = FakePool("a", "b", "c"), 0
    runner = PolicyRunner(Dice(random), FakeFleet(pool), lambda _: None)
    stage = stage_of(pool, draw(NAMES, SAMPLES), policy=runner)
    reader = Reader(stage)
    turns = 0
    while not reader.task.done():
        await asyncio.sleep(0)
        assert turns < 5000, "the stage waits for no actor"
        actor = random.choice(list(pool.actors.values()))
        turns += 1
        chance = random.random() if turns < 400 else 0.0  # from then on all remaining samples end
        if not actor.state.holds_device or not actor.running:
            continue
        if chance < 0.3:
            actor.finish(random.choice(sorted(actor.running))[0])
        elif chance < 0.6:
            actor.heartbeat({key: random.randint(1, 5) for key in actor.running})
        elif chance < 0.62 and lost < 2:
            lost += 1
            actor.die()
            pool.join(f"n{lost}")
            stage.joined(pool.slot_of(f"n{lost}"))
    await reader.task
    return [rollout for group in reader.groups for rollout in group.rollouts]


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_no_sample_is_lost_or_doubled_under_any_decisions(seed: int) -> None:
    logging.disable(logging.ERROR)
    try:
        with reading(TickingClock()):
            rollouts = asyncio.run(play(Random(seed)))
    finally:
        logging.disable(logging.NOTSET)
    assert sorted(rollout.key for rollout in rollouts) == [(name, i) for name in NAMES for i in range(SAMPLES)]
    for rollout in rollouts:
        assert rollout.seed == sample_seed(11, 3, *rollout.key)
        assert len(rollout.token_ids) == 9
