"""A KL coefficient that follows a target, across steps, repeated steps and restores."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import fake_run as scenes
from fakes.fake_cluster import group
from fakes.fake_run import OLD_LOGPROB, Scene
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.kl import next_kl_coefficient
from rlhfless.orchestrator.step import train
from rlhfless.orchestrator.token_batches import AlgorithmState, learned_batch
from rlhfless.records import Experience, FinishReason, Rollout, Sample, Score
from rlhfless.spec import GRPOSpec, Needs, PPOSpec, ReinforcePlusPlusSpec, RewardKLSpec, RLOOSpec
from rlhfless.util.errors import UserError


def test_the_coefficient_by_hand() -> None:
    # Half above the target is clipped to 20 %; 100 of 1000 samples: 2 % more.
    # A quarter below the target is clipped to 20 %: 2 % less.
    assert next_kl_coefficient(0.1, 1.5, 1.0, samples=100, horizon=1000) == pytest.approx(0.1 * 1.02)
    assert next_kl_coefficient(0.1, 0.75, 1.0, samples=100, horizon=1000) == pytest.approx(0.1 * 0.98)
    assert next_kl_coefficient(0.1, 1.1, 1.0, samples=100, horizon=1000) == pytest.approx(0.1 * 1.01)
    assert next_kl_coefficient(0.1, 1.0, 1.0, samples=100, horizon=1000) == 0.1
    # A step with more samples than the horizon changes it by 20 %, and never to 0.
    assert next_kl_coefficient(0.1, 0.0, 1.0, samples=10**9, horizon=1000) == pytest.approx(0.08)


def batch_with_kl(kl: float) -> PackedBatch:
    """Return two samples whose KL per token by k1 is `kl`."""
    packed = pack([group("p", 2).adding(score=[Score(1.0, {}), Score(0.0, {})])])
    old = packed.rollout_logprobs - np.float32(0.25)  # the engine's own logprobs would give a KL that is 0.25 larger
    return packed.with_columns(old_logprobs=old, reference_logprobs=old - np.float32(kl))


ADAPTIVE = ReinforcePlusPlusSpec(kl=RewardKLSpec(coefficient=0.5, target=1.0, horizon=20))


def test_a_step_done_again_has_its_own_coefficient_and_does_not_count_twice() -> None:
    state = AlgorithmState(ADAPTIVE)
    assert state.learn(1, batch_with_kl(2.0)) == {"kl_coefficient": 0.5}
    assert state.learn(1, batch_with_kl(2.0)) == {"kl_coefficient": 0.5}
    # Two samples of 20, each fully above: 2 % more.
    assert state.coefficient_after(1) == pytest.approx(0.51)
    assert state.learn(2, batch_with_kl(0.5))["kl_coefficient"] == pytest.approx(0.51)
    assert state.coefficient_after(2) == pytest.approx(0.51 * 0.98)
    # The advantages use the step's own coefficient.
    one = state.at(2).advantages(batch_with_kl(2.0))
    other = AlgorithmState(ADAPTIVE.model_copy(update={"kl": RewardKLSpec(coefficient=0.51)})).at(1)
    assert one.tolist() == other.advantages(batch_with_kl(2.0)).tolist()


def test_a_restore_goes_on_with_what_the_checkpoint_kept() -> None:
    through, kept = AlgorithmState(ADAPTIVE), {}
    for step, kl in enumerate((2.0, 3.0, 0.2, 1.5), start=1):
        through.learn(step, batch_with_kl(kl))
        kept[step] = through.coefficient_after(step)
    resumed = AlgorithmState(ADAPTIVE)
    resumed.restore(2, kept[2])
    for step, kl in enumerate((0.2, 1.5), start=3):
        resumed.learn(step, batch_with_kl(kl))
        assert resumed.coefficient_after(step) == kept[step]
    resumed.restore(0, None)
    assert resumed.coefficient_after(0) == 0.5


def test_without_a_target_nothing_is_kept() -> None:
    for settings in (GRPOSpec(), PPOSpec(kl=RewardKLSpec(coefficient=0.1))):
        state = AlgorithmState(settings)
        assert state.learn(1, batch_with_kl(2.0)) == {}
        assert state.coefficient_after(1) is None


@pytest.mark.parametrize("values", [{"target": 0.1}, {"target": 0.1, "coefficient": 0.1, "where": "loss"}])
def test_a_target_without_a_coefficient_in_the_reward_is_refused(values: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match="target needs a coefficient above 0"):
        RewardKLSpec.model_validate(values)


def test_truncated_responses_are_not_learned_from_and_count_in_their_group() -> None:
    drawn = group("p", 3).adding(score=[Score(1.0, {}), Score(0.0, {}), Score(0.5, {})])
    first, second, third = drawn.samples
    (cut,) = second.rollouts
    assert isinstance(cut, Rollout)
    longest = dataclasses.replace(cut, finish_reason=FinishReason.LENGTH)
    segments = tuple(longest if segment is cut else segment for segment in second.segments)
    experience = Experience(
        (dataclasses.replace(drawn, samples=(first, dataclasses.replace(second, segments=segments), third)),)
    )
    whole = pack(experience.groups)
    whole = whole.with_columns(advantages=AlgorithmState(GRPOSpec(normalize_std=False)).at(1).advantages(whole))
    assert learned_batch(whole, experience, Needs()) is whole
    masked = learned_batch(whole, experience, Needs(whole_responses=True))
    assert masked.response_lengths.tolist() == [whole.response_lengths[0], 0, whole.response_lengths[2]]
    assert masked.denominators.sequences == 2
    assert masked.denominators.tokens == whole.denominators.tokens - whole.response_lengths[1]
    # The mean of the group is still 1/2.
    assert masked.advantages is not None
    assert masked.advantages[masked.response_mask].tolist() == [0.5] * int(whole.response_lengths[0]) + [0.0] * int(
        whole.response_lengths[2]
    )


def cut_off(sample: Sample) -> Sample:
    segments = (
        dataclasses.replace(segment, finish_reason=FinishReason.LENGTH) if isinstance(segment, Rollout) else segment
        for segment in sample.segments
    )
    return dataclasses.replace(sample, segments=tuple(segments))


def test_the_reward_of_a_truncated_response_has_its_kl() -> None:
    """The reward is compared with those of its group, so it must be defined in the same way. (TRL's RLOOTrainer with
    `mask_truncated_completions: true` omits the KL of its tokens, which raises its reward.)"""
    kl, rewards, coefficient = (0.5, 2.0, 1.0), (1.0, 0.0, 0.5), 0.25
    first, second, third = group("p", 3).adding(score=[Score(reward, {}) for reward in rewards]).samples
    samples = (first, cut_off(second), third)
    experience = Experience((dataclasses.replace(group("p", 3), samples=samples),))
    whole = pack(experience.groups)
    reference = -1 - np.repeat(np.array(kl, np.float32) / 2, whole.lengths)  # two response tokens each
    whole = whole.with_columns(old_logprobs=np.full(len(whole.tokens), -1.0), reference_logprobs=reference)
    settings = RLOOSpec(kl=RewardKLSpec(coefficient=coefficient), mask_truncated=True)
    whole = whole.with_columns(advantages=AlgorithmState(settings).at(1).advantages(whole))
    batch = learned_batch(whole, experience, settings.needs)
    assert batch.response_lengths.tolist() == [2, 0, 2]
    assert batch.advantages is not None
    own = [reward - coefficient * each for reward, each in zip(rewards, kl, strict=True)]
    expected = [own[0] - (own[1] + own[2]) / 2, own[2] - (own[0] + own[1]) / 2]
    np.testing.assert_allclose(batch.advantages[batch.response_mask], np.repeat(expected, 2), rtol=1e-6)
    of_trl = own[0] - (rewards[1] + own[2]) / 2
    assert abs(of_trl - expected[0]) == pytest.approx(coefficient * kl[1] / 2)


@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_plus_plus"])
async def test_kl_in_the_reward_is_of_the_learners_policy_whatever_the_schedule_and_updates(
    tmp_path: Path, algorithm: str, epochs: int, schedule: str
) -> None:
    """The engine's logprobs are 0, the learner's -1.5, and the reference's 1, so the KL of a token is -2.5."""
    kl = {"coefficient": 0.5, "target": 1.0, "horizon": 20}
    scene = Scene(tmp_path, algorithm={"type": algorithm, "kl": kl}, epochs=epochs, schedule=schedule)
    scene.learner.gate.set()
    context, experience = await scene.rolled_out(1)
    record = await train(scene.run, context, experience)
    (batch,) = scene.learner.learned
    assert ("learner", "evaluate", 1) in scene.calls
    assert set(batch.old_logprobs[batch.response_mask]) == {OLD_LOGPROB}
    per_token = OLD_LOGPROB - 1
    lengths = batch.response_lengths
    if algorithm == "rloo":
        own = np.array([0.0, 1.0]) - 0.5 * per_token * lengths
        expected = np.repeat([own[0] - own[1], own[1] - own[0]], lengths)
    else:
        returns = np.concatenate(
            [reward - 0.5 * per_token * np.arange(n, 0, -1) for reward, n in zip((0.0, 1.0), lengths, strict=True)]
        )
        expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(batch.advantages[batch.response_mask], expected, rtol=1e-6)
    # The target is 1 nat, and -2.5 is far below: two samples of 20 lower the coefficient by 2 %.
    assert record.metrics["kl_coefficient"] == 0.5
    assert scene.run.batches.kl_coefficient_after(1) == pytest.approx(0.49)


async def test_without_a_kl_in_the_reward_a_step_has_no_pass_for_old_logprobs(tmp_path: Path) -> None:
    scene = Scene(tmp_path, algorithm={"type": "grpo", "kl": {"coefficient": 0.5}})
    scene.learner.gate.set()
    await train(scene.run, *await scene.rolled_out(1))
    assert ("learner", "evaluate", 1) not in scene.calls
    assert scene.learner.learned[0].old_logprobs is None


async def test_a_reference_that_gives_nan_stops_the_step_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single NaN would make the whole step's gradient NaN, and the update would be skipped."""
    call = scenes.Function.call

    async def broken(self: scenes.Function, method: str, *arguments: Any, **options: Any) -> Any:
        values = await call(self, method, *arguments, **options)
        return np.where(np.arange(len(values)) == 4, np.nan, values) if method == "compute" else values

    monkeypatch.setattr(scenes.Function, "call", broken)
    scene = Scene(tmp_path, algorithm={"type": "grpo", "kl": {"coefficient": 0.5}})
    scene.learner.gate.set()
    context, experience = await scene.rolled_out(1)
    with pytest.raises(UserError, match=r"reference_logprobs is not finite: sample 0 of prompt 'p' .* has nan"):
        await train(scene.run, context, experience)
    assert not scene.learner.learned
