"""A KL coefficient that follows a target, from step to step, over steps done again and restores."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from fakes.fleet import group
from rlhfless.algorithms.adaptive_kl import next_coefficient
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.loop.algorithm_state import AlgorithmState
from rlhfless.loop.step import batch_of
from rlhfless.records import Experience, FinishReason, Rollout, Score
from rlhfless.spec import GRPOSpec, Needs, PPOSpec, ReinforcePlusPlusSpec, RewardKLSpec


def test_the_coefficient_by_hand() -> None:
    # Half above the target is cut to 20 %; 100 of 1000 samples: 2 % more. A quarter below to 20 %, 2 % less.
    assert next_coefficient(0.1, 1.5, 1.0, samples=100, horizon=1000) == pytest.approx(0.1 * 1.02)
    assert next_coefficient(0.1, 0.75, 1.0, samples=100, horizon=1000) == pytest.approx(0.1 * 0.98)
    assert next_coefficient(0.1, 1.1, 1.0, samples=100, horizon=1000) == pytest.approx(0.1 * 1.01)
    assert next_coefficient(0.1, 1.0, 1.0, samples=100, horizon=1000) == 0.1
    # A step with more samples than the horizon changes it by 20 %, and never to 0.
    assert next_coefficient(0.1, 0.0, 1.0, samples=10**9, horizon=1000) == pytest.approx(0.08)


def batch_with_kl(kl: float) -> PackedBatch:
    """Two samples whose KL per token by k1 is `kl`."""
    packed = pack([group("p", 2).adding(score=[Score(1.0, {}), Score(0.0, {})])])
    return packed.with_columns(reference_logprobs=packed.rollout_logprobs - np.float32(kl))


ADAPTIVE = ReinforcePlusPlusSpec(kl=RewardKLSpec(coefficient=0.5, target=1.0, horizon=20))


def test_a_step_done_again_has_its_own_coefficient_and_does_not_count_twice() -> None:
    state = AlgorithmState(ADAPTIVE)
    assert state.learn(1, partial(batch_with_kl, 2.0)) == {"kl_coefficient": 0.5}
    assert state.learn(1, partial(batch_with_kl, 2.0)) == {"kl_coefficient": 0.5}
    # Two samples of 20, each fully above: 2 % more.
    assert state.coefficient_after(1) == pytest.approx(0.51)
    assert state.learn(2, partial(batch_with_kl, 0.5))["kl_coefficient"] == pytest.approx(0.51)
    assert state.coefficient_after(2) == pytest.approx(0.51 * 0.98)
    # The advantages are made with the step's own.
    one = state.at(2).advantages(batch_with_kl(2.0))
    other = AlgorithmState(ADAPTIVE.model_copy(update={"kl": RewardKLSpec(coefficient=0.51)})).at(1)
    assert one.tolist() == other.advantages(batch_with_kl(2.0)).tolist()


def test_a_restore_goes_on_with_what_the_checkpoint_kept() -> None:
    through, kept = AlgorithmState(ADAPTIVE), {}
    for step, kl in enumerate((2.0, 3.0, 0.2, 1.5), start=1):
        through.learn(step, partial(batch_with_kl, kl))
        kept[step] = through.coefficient_after(step)
    resumed = AlgorithmState(ADAPTIVE)
    resumed.restore(2, kept[2])
    for step, kl in enumerate((0.2, 1.5), start=3):
        resumed.learn(step, partial(batch_with_kl, kl))
        assert resumed.coefficient_after(step) == kept[step]
    resumed.restore(0, None)
    assert resumed.coefficient_after(0) == 0.5


def test_without_a_target_nothing_is_kept() -> None:
    for settings in (GRPOSpec(), PPOSpec(kl=RewardKLSpec(coefficient=0.1))):
        state = AlgorithmState(settings)
        assert state.learn(1, partial(batch_with_kl, 2.0)) == {}
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
    whole, masked = batch_of(experience, Needs()), batch_of(experience, Needs(whole_responses=True))
    assert masked.response_lengths.tolist() == [whole.response_lengths[0], 0, whole.response_lengths[2]]
    assert masked.denominators.sequences == 2
    assert masked.denominators.tokens == whole.denominators.tokens - whole.response_lengths[1]
    # The mean of the group is still 1/2.
    advantages = AlgorithmState(GRPOSpec(normalize_std=False)).at(1).advantages(masked)
    assert advantages[masked.response_mask].tolist() == [0.5] * int(whole.response_lengths[0]) + [0.0] * int(
        whole.response_lengths[2]
    )
