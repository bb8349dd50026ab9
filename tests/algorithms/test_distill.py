"""The distillation term of the advantages, against figures worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlhfless.algorithms.base import algorithm_of
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.distill import distillation, teacher_metrics, with_teachers
from rlhfless.orchestrator.group_pipeline import zeros_of
from rlhfless.spec import DistillSpec, GRPOSpec, TeacherSpec

SOURCES = ["math", "math", "code"]
BIG = TeacherSpec(name="big", path="y")
MATHS = TeacherSpec(name="maths", path="z", sets=("math",), weight=2.0)


@pytest.fixture
def batch(make_group) -> PackedBatch:
    """Two sequences of a set, and one of another: 2, 1 and 2 generated tokens with logprobs -0.01 k for token k."""
    groups = [make_group("a", (1,), [[10, 20], [30]]), make_group("b", (1, 2), [[40, 50]])]
    packed = pack(groups)
    big = np.zeros(len(packed.tokens), np.float32)
    big[packed.response_mask] = [-0.2, -0.2, -0.2, -0.5, -0.5]
    maths = np.zeros(len(packed.tokens), np.float32)
    maths[packed.response_mask] = [-0.1, -0.1, -0.1, 0, 0]
    return packed.with_columns(teacher_big=big, teacher_maths=maths)


def generated(batch: PackedBatch, values: np.ndarray) -> np.ndarray:
    assert not values[~batch.response_mask].any()
    return values[batch.response_mask]


def test_each_teacher_adds_its_weighted_difference(batch: PackedBatch) -> None:
    taught = with_teachers(batch, [BIG, MATHS], SOURCES)
    assert not taught.own
    settings = DistillSpec.model_validate({"distill": {"coefficient": 0.5, "student": "rollout"}})
    term = distillation(settings, taught)
    # 0.5 (t_big - s + 2 (t_maths - s)); the last sequence has the first teacher alone.
    expected = [0.5 * (-0.1 + 2 * 0), 0.5 * (0 + 2 * 0.1), 0.5 * (0.1 + 2 * 0.2), 0.5 * -0.1, 0]
    np.testing.assert_allclose(generated(batch, term), expected, atol=1e-7)


def test_old_logprobs_are_compared_if_the_batch_has_them(batch: PackedBatch) -> None:
    old = np.where(batch.response_mask, np.float32(-0.3), np.float32(0))
    taught = with_teachers(batch, [BIG], SOURCES).with_columns(old_logprobs=old)
    expected = [0.1, 0.1, 0.1, -0.2, -0.2]
    np.testing.assert_allclose(generated(batch, distillation(DistillSpec(), taught)), expected, atol=1e-7)


def test_an_equal_teacher_gives_exactly_zero(batch: PackedBatch) -> None:
    old = np.where(batch.response_mask, np.float32(-1 / 3), np.float32(0))
    equal = batch.with_columns(teacher_big=old, old_logprobs=old)
    term = distillation(DistillSpec(), with_teachers(equal, [BIG], SOURCES))
    assert term.dtype == np.float32
    assert not term.any()


def test_distill_has_no_other_advantage(batch: PackedBatch) -> None:
    assert not algorithm_of(DistillSpec()).advantages(batch).any()


def test_without_the_term_nothing_is_added(batch: PackedBatch) -> None:
    assert distillation(GRPOSpec(), batch) == 0
    with pytest.raises(ValueError, match="needs teacher logprobs"):
        distillation(DistillSpec.model_validate({"distill": {"student": "rollout"}}), batch)
    with pytest.raises(ValueError, match="needs old logprobs"):
        distillation(DistillSpec(), with_teachers(batch, [BIG], SOURCES))


def test_metrics_are_means_over_a_teachers_own_tokens(batch: PackedBatch) -> None:
    found = teacher_metrics(batch, [BIG, MATHS], SOURCES)
    assert found["reverse_kl/big"] == pytest.approx((0.1 + 0 - 0.1 + 0.1 + 0) / 5)
    assert found["teacher_agreement/big"] == pytest.approx((3 + 2 * np.exp(-0.1)) / 5)
    assert found["teacher_cross_entropy/big"] == pytest.approx((0.2 * 3 + 0.5 * 2) / 5)
    assert found["reverse_kl/maths"] == pytest.approx(-(0 + 0.1 + 0.2) / 3)
    assert "reverse_kl/maths" not in teacher_metrics(batch, [MATHS], ["code"] * 3)


def test_a_teacher_with_entropies_has_their_mean_over_its_tokens(make_group) -> None:
    taught = make_group("a", (1,), [[10, 20]]).adding(teacher_maths=[np.array([[-0.1, 1.5], [-0.4, 0.5]])])
    other = make_group("b", (1, 2), [[40]])
    packed = pack([taught, other.adding(teacher_maths=zeros_of(other, 2))])
    sources = ["math", "code"]
    assert teacher_metrics(packed, [MATHS], sources)["teacher_entropy/maths"] == pytest.approx(1.0)
    logprobs = with_teachers(packed, [MATHS], sources).teacher_logprobs
    np.testing.assert_allclose(generated(packed, logprobs), [-0.2, -0.8, 0], rtol=1e-6)


def test_agreement_estimates_the_overlap_of_two_distributions() -> None:
    """1 less the total variation distance, by drawing from the student."""
    generator = np.random.default_rng(0)
    student, teacher = generator.dirichlet(np.ones(5), 2)
    drawn = generator.choice(5, 200_000, p=student)
    estimate = np.exp(np.minimum(np.log(teacher[drawn]) - np.log(student[drawn]), 0)).mean()
    assert estimate == pytest.approx(np.minimum(student, teacher).sum(), abs=0.01)
