"""The effect of failed rewards on a step: which samples are trained on, and that statistics count only those."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.fake_cluster import group
from rlhfless.algorithms.batch import pack
from rlhfless.algorithms.group_based import GRPO, STD_FLOOR
from rlhfless.orchestrator.experience import LOGPROBS, added_up, readable, without_failures
from rlhfless.orchestrator.step_metrics import reward_metrics
from rlhfless.records import Experience, Group, Score
from rlhfless.rewards import RewardError
from rlhfless.spec import GRPOSpec, ScoringSpec

OK = Score(1.0, {"judge": 1.0})
BAD = Score(0.0, {}, {"judge": "no answer"})
DROP = ScoringSpec(max_failed=1.0)


def experience(*scores: list[Score], reference: bool = False) -> Experience:
    """Return one group per list. The reference logprobs of sample i of group g are all g + i / 10."""
    groups = []
    for g, of_group in enumerate(scores):
        logprobs = [np.full(2, g + i / 10, np.float32) if reference else None for i in range(len(of_group))]
        groups.append(group(f"p{g}", len(of_group)).adding(score=of_group, reference_logprobs=logprobs))
    return Experience(tuple(groups))


def scores_of(given: Experience) -> list[list[Score]]:
    """Return scores as a scoring function does."""
    return [[sample.scored for sample in group.samples] for group in given.groups]


def test_dropped_samples_are_in_no_batch_and_no_denominator() -> None:
    kept = without_failures(experience([OK, BAD, OK], [BAD, BAD], [OK, OK], reference=True), DROP, 1)
    assert [[rollout.key for rollout in group.rollouts] for group in kept.groups] == [
        [("p0", 0), ("p0", 2)],
        [("p2", 0), ("p2", 1)],
    ]
    batch = pack(kept.groups)
    assert (batch.denominators.sequences, batch.denominators.groups, batch.denominators.tokens) == (4, 2, 8)
    assert batch.reference_logprobs is not None
    logprobs = batch.reference_logprobs[batch.response_mask]
    assert logprobs[::2].tolist() == pytest.approx([0.0, 0.2, 2.0, 2.1])


@pytest.mark.parametrize("policy", ["zero", "fail"])
def test_with_another_policy_nothing_is_dropped(policy: str) -> None:
    given = experience([OK, BAD])
    assert without_failures(given, ScoringSpec(on_failure=policy, max_failed=1.0), 1) is given


SCORES = st.lists(
    st.lists(st.one_of(st.none(), st.floats(-10, 10).map(lambda value: round(value, 3))), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
).filter(lambda groups: any(value is not None for values in groups for value in values))


@given(SCORES)
def test_advantages_are_those_of_the_kept_samples_of_each_group(values: list[list[float | None]]) -> None:
    scores = [[BAD if value is None else Score(value, {"judge": value}) for value in of_group] for of_group in values]
    kept = without_failures(experience(*scores), DROP, 1)
    batch = pack(kept.groups)
    found = GRPO(GRPOSpec()).advantages(batch)[batch.response_mask][::2]
    expected = []
    for of_group in values:
        left = np.array([value for value in of_group if value is not None])
        if len(set(left)) < 2:  # no signal, also with a single remaining sample
            expected += [0.0] * len(left)
        else:
            expected += list((left - left.mean()) / (left.std(ddof=1) + STD_FLOOR))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_run_stops_when_too_many_samples_fail() -> None:
    half = experience([OK, BAD], [OK, BAD])
    assert len(without_failures(half, ScoringSpec(max_failed=0.5), 3).groups) == 2
    with pytest.raises(RewardError) as caught:
        without_failures(half, ScoringSpec(max_failed=0.4), 3)
    assert str(caught.value) == (
        "reward 'judge': 2 of 4 samples of step 3 failed (scoring.max_failed is 0.4); "
        "the first: sample 1 of prompt 'p0': no answer"
    )
    with pytest.raises(RewardError, match="2 of 2 samples of step 1 failed"):
        without_failures(experience([BAD, BAD]), DROP, 1)


def test_with_fail_the_first_failure_stops_the_run_and_is_named() -> None:
    given = experience([OK, BAD])
    with pytest.raises(RewardError) as caught:
        added_up(given.groups, [scores_of(given)], ScoringSpec(on_failure="fail"))
    assert str(caught.value) == "reward 'judge': sample 1 of prompt 'p0': no answer (scoring.on_failure is `fail`)"


def test_scores_of_two_functions_add_up() -> None:
    other = Score(2.0, {"model": 4.0}, {"third": "gone"})
    given = experience([OK])
    assert added_up(given.groups, [scores_of(given), [[other]]], ScoringSpec()) == [
        [Score(3.0, {"judge": 1.0, "model": 4.0}, {"third": "gone"})]
    ]


def test_a_reward_that_fails_has_one_line_per_step(caplog: pytest.LogCaptureFixture) -> None:
    other = Score(0.0, {}, {"judge": "too late", "format": "broken"})
    with caplog.at_level(logging.WARNING):
        without_failures(experience([OK] * 20, [BAD] * 13 + [other] + [OK] * 2), DROP, 7)
    assert caplog.messages == [
        "step 7: reward 'judge' failed on 14 of 36 samples; sample 0 of prompt 'p1': no answer; 2 different causes "
        "(all: rlhfless trace samples RUN --step 7 --failed)",
        "step 7: reward 'format' failed on 1 of 36 samples; sample 13 of prompt 'p1': broken",
    ]


def test_metrics_are_over_the_samples_that_have_a_part() -> None:
    scores = [Score(1.0, {"a": 1.0, "b": 3.0}), Score(3.0, {"a": 3.0}, {"b": "gone"})]
    assert reward_metrics(scores) == {"reward_mean": 2.0, "reward_std": 1.0, "reward/a": 2.0, "reward/b": 3.0}


def with_a_broken_logprob(given: Experience, value: float) -> list[Group]:
    """Return the experience's groups with this logprob for the second token of the first sample of p0."""
    first, *others = given.groups[0].samples
    prompt, rollout = first.segments
    logprobs = rollout.logprobs.copy()
    logprobs[1] = value
    broken = replace(first, segments=(prompt, replace(rollout, logprobs=logprobs)))
    return [replace(given.groups[0], samples=(broken, *others)), *given.groups[1:]]


@pytest.mark.parametrize("policy", ["drop", "zero"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_sample_whose_logprobs_are_not_finite_fails_and_is_dropped(policy: str, value: float) -> None:
    given = experience([OK, OK, OK], [OK, OK])
    groups = with_a_broken_logprob(given, value)
    scoring = ScoringSpec(on_failure=policy, max_failed=0.2)
    (first, *_), _ = scores = added_up(groups, [scores_of(given)], scoring)
    assert first.failures == {LOGPROBS: f"the engine gave {value} as the logprob of response token 1"}
    marked = [group.adding(score=of_group) for group, of_group in zip(groups, scores, strict=True)]
    kept = without_failures(Experience(tuple(marked)), scoring, 1)
    assert [sample.key for sample in kept.samples] == [("p0", 1), ("p0", 2), ("p1", 0), ("p1", 1)]
    assert np.isfinite(pack(kept.groups).rollout_logprobs).all()
    with pytest.raises(RewardError, match="sample 0 of prompt 'p0': the engine gave"):
        added_up(groups, [scores_of(given)], ScoringSpec(on_failure="fail"))


def test_the_reference_reads_samples_that_will_be_dropped() -> None:
    groups = with_a_broken_logprob(experience([OK, OK]), float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        pack(groups)
    batch, sound = pack(readable(groups)), pack(experience([OK, OK]).groups)
    assert batch.tokens.tolist() == sound.tokens.tolist()
