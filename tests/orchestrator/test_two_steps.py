"""Two concurrent steps: the real loop, with fake functions."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from fakes.fake_run import Scene, until, weights_of
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.host import Host
from rlhfless.orchestrator.run_steps import RunSteps
from rlhfless.orchestrator.schedules import schedule_of
from rlhfless.orchestrator.step import rollout, train
from rlhfless.records import PublishedWeights
from rlhfless.records.traces import read_trace
from rlhfless.spec import CheckpointSpec, EvaluationSpec
from rlhfless.util.tasks import gather_or_cancel
from rlhfless.weights.check import WeightCheckFailed


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
    assert scene.weights.synced == [(1, 0), (2, 0)]  # the second step was generated with weights one step older
    assert scene.learner.asked == [("learn", 1), ("publish", 1), ("learn", 2), ("publish", 2)]
    assert scene.run.published == weights_of(2)
    for record, tokens in ((one, 4.0), (two, 5.0)):  # each has the metrics of its own samples
        assert record.metrics["response_tokens_mean"] == tokens
        assert record.metrics["actors_wanted"] == 1.0
        assert record.metrics["policy_faults"] == 0.0
        assert record.metrics["generation_tokens_per_s"] >= 0
    assert one.end_s == two.start_s < two.end_s, "its time begins when the step before has ended"
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


async def test_a_rollout_goes_on_while_the_learner_of_another_step_is_lost_and_replaced(tmp_path: Path) -> None:
    scene = Scene(tmp_path, schedule="one_step_off")
    steps = RunSteps(scene.run, session_of(scene), 1)  # type: ignore[arg-type]
    actor = scene.actors["a"]
    drive = asyncio.create_task(schedule_of(scene.run.spec.schedule).drive(steps, 1, 2))
    await until(lambda: bool(actor.running))
    actor.finish(tokens=4)
    await until(lambda: {key[0] for key in actor.running} == {"q"})
    scene.learner.dies = ReplicaLost("the learner was lost")
    scene.learner.gate.set()
    with pytest.raises(ReplicaLost):
        await drive
    steps.restart_at(1)
    assert sorted(scene.run.under_way) == [2]
    scene.learner.dies = None
    drive = asyncio.create_task(schedule_of(scene.run.spec.schedule).drive(steps, 1, 2))
    await until(lambda: ("publish", 1) in scene.learner.asked)
    assert {key[0] for key in actor.running} == {"q"}, "it was never called off"
    actor.finish(tokens=5)
    await drive
    assert len(actor.requests) == 2, "nothing was drawn twice: step 1 came from the journal"
    assert scene.weights.synced == [(1, 0), (2, 0)]
    assert [learned for learned in scene.learner.asked if learned[0] == "learn"] == [("learn", 1), ("learn", 2)]


def session_of(scene: Scene) -> SimpleNamespace:
    scene.run.spec = scene.run.spec.model_copy(
        update={"steps": 3, "checkpoint": CheckpointSpec(every_steps=None), "evaluation": EvaluationSpec()}
    )
    console = SimpleNamespace(stage=lambda _: nullcontext())
    return SimpleNamespace(spec=scene.run.spec, host=Host(), console=console)


async def test_what_is_published_while_a_step_is_drawn_in_flight_is_loaded_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, schedule="async")
    scene.learner.gate.set()
    first, learned_from = await scene.rolled_out(1)
    drawing = asyncio.create_task(rollout(scene.run, scene.run.begin(2)))
    await until(lambda: bool(scene.actors["a"].running))
    assert scene.weights.synced == [(1, 0), (2, 0)]
    await train(scene.run, first, learned_from)
    await until(lambda: len(scene.weights.synced) == 3)
    assert scene.weights.synced[-1] == (2, 1)
    (request,) = scene.actors["a"].requests[1:]
    assert request.or_newer
    scene.actors["a"].finish(tokens=4)
    await drawing
    scene.run.published = weights_of(2)
    await asyncio.sleep(0)
    assert len(scene.weights.synced) == 3, "between two draws none is loaded"


async def test_wrong_weights_that_are_loaded_in_flight_end_the_draw(tmp_path: Path) -> None:
    scene = Scene(tmp_path, schedule="async")
    drawing = asyncio.create_task(rollout(scene.run, scene.run.begin(1)))
    await until(lambda: bool(scene.actors["a"].running))

    async def fail(published: PublishedWeights, call: Call) -> None:
        raise WeightCheckFailed("probe", published.version, "is off")

    scene.weights.sync = fail  # type: ignore[method-assign]
    scene.run.published = weights_of(1)
    with pytest.raises(WeightCheckFailed, match="is off"):
        await drawing


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
