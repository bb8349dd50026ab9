"""The greedy response of ReMax: drawn beside the samples, a baseline of theirs, and in no figure of theirs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_redraws import Scene

from fakes import scene as scenes
from fakes.stage import until
from rlhfless.loop.step import rollout, train
from rlhfless.records import Group, Score
from rlhfless.records.traces import read_trace
from rlhfless.spec import ReMaxSpec


def scored(groups: list[Group]) -> list[list[Score]]:
    """The greedy response, the only sample of its group, gets 1/4; of two samples the first 0 and the second 1."""
    rewards = {1: [0.25], 2: [0.0, 1.0]}
    return [[Score(reward, {"r": reward}) for reward in rewards[len(group.samples)]] for group in groups]


async def test_it_is_the_baseline_and_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "scored", scored)
    scene = Scene(tmp_path, ReMaxSpec())
    context = scene.run.begin(1)
    drawing = asyncio.create_task(rollout(scene.run, context))
    actor = scene.actors["a"]
    await until(lambda: len(actor.running) == 3)
    assert sorted(actor.running) == [("p", 0), ("p", 1), ("p", 2)]
    actor.finish("p", tokens=4)
    experience = await drawing
    record = await train(scene.run, context, experience)
    (batch,) = scene.learner.learned
    assert batch.baselines.tolist() == [0.25, 0.25]
    assert batch.advantages[batch.response_mask].tolist() == [-0.25] * 4 + [0.75] * 4
    assert (record.metrics["reward_mean"], record.metrics["reward_greedy"]) == (0.5, 0.25)
    # Journal and trace have it, so a step done again does not draw it again.
    assert [rollout.sample_index for rollout in scene.journal.rollouts(1)] == [0, 1, 2]
    again = await rollout(scene.run, scene.run.begin(1))
    assert [group.samples[0].key for group in again.greedy] == [("p", 2)]
    scene.ledger.write([])
    assert [row.sample_index for row in read_trace(tmp_path / "trace").rollouts] == [0, 1, 2]
