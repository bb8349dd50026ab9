"""Two steps under way at once: the real loop, with stand-ins for the functions."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.scene import Scene, weights_of
from fakes.stage import until
from rlhfless.loop.step import rollout, train
from rlhfless.records.traces import read_trace
from rlhfless.tasks import gather_or_cancel


async def test_a_step_is_drawn_while_the_learner_is_at_work_on_the_step_before_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first, learned_from = await scene.rolled_out(1)
    training = asyncio.create_task(train(scene.run, first, learned_from))
    second, drawn_meanwhile = await scene.rolled_out(2)
    assert sorted(scene.run.under_way) == [1, 2]
    assert scene.learner.asked == []
    scene.learner.gate.set()
    one = await training
    assert sorted(scene.run.under_way) == [2]
    two = await train(scene.run, second, drawn_meanwhile)
    assert scene.weights.synced == [(1, 0), (2, 0)]  # the second was drawn with weights one step older
    assert scene.learner.asked == [("learn", 1), ("publish", 1), ("learn", 2), ("publish", 2)]
    assert scene.run.published == weights_of(2)
    for record, tokens in ((one, 4.0), (two, 5.0)):  # each has the figures of its own samples
        assert record.metrics["response_tokens_mean"] == tokens
        assert record.metrics["actors_wanted"] == 1.0
        assert record.metrics["policy_faults"] == 0.0
    assert two.start_s < one.end_s < two.end_s
    scene.ledger.write([])
    trace = read_trace(tmp_path / "trace")
    assert [(row.step, row.prompt_id, row.response_tokens) for row in trace.rollouts] == [
        (1, "p", 4),
        (1, "p", 4),
        (2, "q", 5),
        (2, "q", 5),
    ]
    assert [step.step for step in trace.steps] == [1, 2]
    assert [rollout.prompt_id for rollout in scene.journal.rollouts(2)] == ["q", "q"]


async def test_two_steps_can_be_drawn_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    contexts = [scene.run.begin(step) for step in (1, 2)]
    drawing = asyncio.create_task(gather_or_cancel(*(rollout(scene.run, context) for context in contexts)))
    actor = scene.actors["a"]
    await until(lambda: {key[0] for key in actor.running} == {"p", "q"})
    actor.finish("q", tokens=7)
    actor.finish("p", tokens=4)
    experiences = await drawing
    drawn = [[(sample.key[0], sample.model_tokens) for sample in experience.samples] for experience in experiences]
    assert drawn == [[("p", 4), ("p", 4)], [("q", 7), ("q", 7)]]
