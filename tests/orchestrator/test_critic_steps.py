"""Steps with a critic: the real loop, with fake functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes.fake_run import Scene, weights_of
from rlhfless.algorithms.batch import pack
from rlhfless.orchestrator.step import rollout, train
from rlhfless.orchestrator.token_batches import TokenBatches
from rlhfless.records import FunctionName

PPO = {"algorithm": "ppo", "critic": {}}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path, **PPO)
    scene.learner.gate.set()
    return scene


async def test_values_come_with_the_groups_and_the_critic_learns_before_the_policy(scene: Scene) -> None:
    context, experience = await scene.rolled_out(1)
    assert scene.critic.asked == [("compute", 1)]
    for sample in experience.samples:
        np.testing.assert_array_equal(sample.outputs["values"], np.ones(sample.model_tokens, np.float32))
    record = await train(scene.run, context, experience)
    assert scene.critic.asked == [("compute", 1), ("learn", 1)]
    assert scene.learner.asked == [("learn", 1), ("publish", 1)]
    order = [(function, method) for function, method, _ in scene.calls if function != "scoring"]
    assert order == [("critic", "compute"), ("critic", "learn"), ("learner", "learn"), ("learner", "publish")]
    assert record.metrics["value_loss"] == 0.25
    assert record.metrics["loss"] == 0.5
    (batch,) = scene.critic.learned
    # Rewards 0 and 1, gamma and lambda 1: the return of every token is its response's reward.
    rewards = batch.spread(np.array([0.0, 1.0]))
    np.testing.assert_allclose(batch.returns, rewards, atol=1e-6)
    assert scene.learner.learned[0].returns is not None


async def test_values_of_a_step_that_is_drawn_ahead_are_of_the_critic_that_learns_from_it(tmp_path: Path) -> None:
    """Its groups complete at an unknown time while the critic learns from another step."""
    scene = Scene(tmp_path, **PPO | {"schedule": "one_step_off"})
    scene.learner.gate.set()
    context, experience = await scene.rolled_out(1)
    assert scene.critic.asked == []
    await train(scene.run, context, experience)
    assert scene.critic.asked == [("compute", 1), ("learn", 1)]
    (batch,) = scene.critic.learned
    np.testing.assert_array_equal(batch.values[batch.response_mask], 1.0)


async def test_while_the_critic_warms_up_the_policy_stays_as_it_is(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **PPO | {"critic": {"warm_up_steps": 2}})
    scene.learner.gate.set()
    for step in (1, 2, 3):
        record = await train(scene.run, *await scene.rolled_out(step))
        assert record.metrics["value_loss"] == 0.25
        assert ("loss" in record.metrics) == (step == 3)
        assert scene.run.published == weights_of(step if step == 3 else 0)
    assert scene.learner.asked == [("learn", 3), ("publish", 3)]
    assert [call for call in scene.critic.asked if call[0] == "learn"] == [("learn", 1), ("learn", 2), ("learn", 3)]
    assert scene.weights.synced == [(1, 0), (2, 0), (3, 0)]


async def test_a_step_that_is_done_again_has_the_values_from_before_the_critic_learned(scene: Scene) -> None:
    """The critic has already learned the step when the learner's publication fails."""
    context, experience = await scene.rolled_out(1)
    batch = TokenBatches(scene.run.spec, scene.run.history).with_targets(1, pack(experience.groups))
    await scene.run.trainers.update_others(context.call, batch)
    again = await rollout(scene.run, scene.run.begin(1))  # its samples come from the journal
    assert scene.critic.computed == 1
    for first, second in zip(experience.samples, again.samples, strict=True):
        np.testing.assert_array_equal(first.outputs["values"], second.outputs["values"])


async def test_values_of_a_step_that_is_over_are_forgotten(scene: Scene) -> None:
    await train(scene.run, *await scene.rolled_out(1))
    await scene.rolled_out(2)
    assert scene.critic.computed == 2
    assert list(scene.run._outputs) == [(2, "values")]


async def test_the_critics_prompt_tokens_are_those_of_its_values_and_of_its_learning(scene: Scene) -> None:
    record = await train(scene.run, *await scene.rolled_out(1))
    assert record.metrics[f"prompt_tokens_unique/{FunctionName.CRITIC}"] == 6.0  # twice the 3 of one prompt
    assert record.metrics[f"prompt_tokens_unique/{FunctionName.LEARNER}"] == 3.0
