"""The policy loss and the estimators of KL, by hand and by their properties. test_trl_parity compares it to TRL's."""

from __future__ import annotations

import math

import pytest
import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs, combine_metrics, common_metrics
from rlhfless.algorithms.group_based import GRPO
from rlhfless.algorithms.kl import kl_estimate
from rlhfless.spec import GRPOSpec, KLSpec

KL = KLSpec(coefficient=0.1, estimator="k3")


def inputs(current, old, rollout, advantages, reference=None) -> LossInputs:
    def tensor(values):
        return None if values is None else torch.tensor(values)

    return LossInputs(
        logprobs=torch.tensor(current, requires_grad=True),
        entropy=torch.ones(len(current)),
        rollout_logprobs=torch.tensor(rollout),
        advantages=torch.tensor(advantages),
        denominator_tokens=len(current),
        sequence_id=torch.zeros(len(current), dtype=torch.int64),
        denominator_sequences=1,
        old_logprobs=tensor(old),
        reference_logprobs=tensor(reference),
    )


def grpo_loss(given: LossInputs, algorithm: GRPOSpec) -> LossOutputs:
    """The loss, and all its metrics in the learner."""
    outputs = GRPO(algorithm).loss(given)
    metrics = common_metrics(given) | outputs.metrics | {"loss": outputs.loss}
    return LossOutputs(outputs.loss, {name: value.detach().float() for name, value in metrics.items()})


def random_inputs(tokens: int) -> LossInputs:
    generator = torch.Generator().manual_seed(7)

    def draw(spread):
        return spread * torch.randn(tokens, generator=generator)

    current = -1 - draw(1.0).abs()
    return LossInputs(
        logprobs=current.requires_grad_(),
        entropy=draw(1.0).abs(),
        rollout_logprobs=current.detach() + draw(0.5),
        advantages=draw(1.0),
        denominator_tokens=tokens,
        sequence_id=torch.arange(tokens) // 5,
        denominator_sequences=-(-tokens // 5),
        old_logprobs=current.detach() + draw(0.4),
        reference_logprobs=current.detach() + draw(0.6),
    )


def test_by_hand_each_side_of_the_clip():
    # Ratios 1.5, 1.5, 0.5, 0.5 with both signs of advantage; clip to [0.8, 1.28].
    up, down = math.log(1.5), math.log(0.5)
    given = inputs([up, up, down, down], [0.0] * 4, [0.0] * 4, [1.0, -1.0, 1.0, -1.0])
    outputs = grpo_loss(given, GRPOSpec())
    # Clipped to -1.28; +1.5 kept; -0.5 kept; clipped to +0.8.
    assert outputs.loss.item() == pytest.approx((-1.28 + 1.5 - 0.5 + 0.8) / 4)
    outputs.loss.backward()
    # The gradient of r is r; a clipped token has none.
    assert given.logprobs.grad.tolist() == pytest.approx([0, 1.5 / 4, -0.5 / 4, 0])
    assert outputs.metrics["clipped_high"].item() == 0.25
    assert outputs.metrics["clipped_low"].item() == 0.25
    assert outputs.metrics["ratio"].item() == pytest.approx(1.0)


def test_by_hand_the_dual_clip_bounds_a_grown_ratio_with_a_negative_advantage():
    # Ratios 5, 5, 2 with advantages -1, +1, -0.5; without it the losses are 5, -1.28, 1.
    five, two = math.log(5), math.log(2)
    given = inputs([five, five, two], [0.0] * 3, [0.0] * 3, [-1.0, 1.0, -0.5])
    outputs = grpo_loss(given, GRPOSpec(dual_clip=3.0, importance=None))
    assert outputs.loss.item() == pytest.approx((3 - 1.28 + 1) / 3)
    outputs.loss.backward()
    assert given.logprobs.grad.tolist() == pytest.approx([0, 0, 0.5 * 2 / 3])
    assert outputs.metrics["clipped_dual"].item() == pytest.approx(1 / 3)
    assert "clipped_dual" not in grpo_loss(given, GRPOSpec()).metrics


def test_by_hand_importance_weight_and_kl():
    # w = min(e^0.5, 2) = 1.6487 and min(e^1, 2) = 2; x = 0.5 and 0; ratio 1.
    given = inputs([-1.0, -1.0], None, [-1.5, -2.0], [1.0, 1.0], reference=[-0.5, -1.0])
    outputs = grpo_loss(given, GRPOSpec(kl=KL))
    kl = (math.exp(0.5) - 1.5) / 2
    assert outputs.metrics["policy_loss"].item() == pytest.approx(-(math.exp(0.5) + 2) / 2)
    assert outputs.metrics["reference_kl"].item() == pytest.approx(kl, rel=1e-5)
    assert outputs.loss.item() == pytest.approx(-(math.exp(0.5) + 2) / 2 + 0.1 * kl)
    assert outputs.metrics["importance_outside"].item() == 0.5
    assert outputs.metrics["importance_weight_max"].item() == pytest.approx(math.e)
    assert outputs.metrics["rollout_logprob_difference"].item() == pytest.approx(0.75)
    assert outputs.metrics["rollout_logprob_difference_max"].item() == pytest.approx(1.0)


def test_without_old_logprobs_the_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient():
    given = inputs([-1.0, -3.0], None, [-1.0, -3.0], [2.0, -4.0])
    outputs = grpo_loss(given, GRPOSpec())
    outputs.loss.backward()
    assert outputs.metrics["ratio"].item() == 1
    assert outputs.metrics["old_kl"].item() == 0
    assert given.logprobs.grad.tolist() == [-1, 2]


@pytest.mark.parametrize(("estimator", "kl"), [("k1", -0.25), ("k2", 0.0625)])
def test_settings_choose_the_kl_estimator_and_whether_it_is_in_the_loss(estimator, kl):
    """x = 0.5 and 0 of two tokens. KL in the reward is not in the loss."""
    given = inputs([-1.0, -1.0], None, [-1.0, -1.0], [1.0, 1.0], reference=[-0.5, -1.0])
    in_loss, in_reward = (KLSpec(coefficient=0.4, estimator=estimator, where=where) for where in ("loss", "reward"))
    assert grpo_loss(given, GRPOSpec(kl=in_loss)).loss.item() == pytest.approx(-1 + 0.4 * kl)
    assert grpo_loss(given, GRPOSpec(kl=in_reward)).loss.item() == pytest.approx(-1)


def test_loss_gradient_and_metrics_add_up_over_any_cut():
    algorithm = GRPOSpec(kl=KL)
    whole = random_inputs(30)
    outputs = grpo_loss(whole, algorithm)
    outputs.loss.backward()
    parts = []
    gradients = []
    for start, stop in ((0, 5), (5, 5), (5, 25), (25, 30)):  # whole sequences of 5 tokens; one part is empty
        current = whole.logprobs.detach()[start:stop].requires_grad_()
        part = LossInputs(
            logprobs=current,
            entropy=whole.entropy[start:stop],
            rollout_logprobs=whole.rollout_logprobs[start:stop],
            advantages=whole.advantages[start:stop],
            denominator_tokens=30,
            sequence_id=whole.sequence_id[start:stop] - start // 5,
            denominator_sequences=6,
            old_logprobs=whole.old_logprobs[start:stop],
            reference_logprobs=whole.reference_logprobs[start:stop],
        )
        result = grpo_loss(part, algorithm)
        result.loss.backward()
        parts.append(result.metrics)
        gradients.append(current.grad)
    combined = combine_metrics(parts)
    assert combined.keys() == outputs.metrics.keys()
    for name, value in outputs.metrics.items():
        torch.testing.assert_close(combined[name], value, atol=1e-6, rtol=1e-5, msg=name)
    torch.testing.assert_close(torch.cat(gradients), whole.logprobs.grad)


def test_a_broken_token_cannot_overflow():
    given = inputs([-1.0, -200.0], [-150.0, -1.0], [-400.0, -1.0], [1.0, -1.0], reference=[-1.0, -1.0])
    outputs = grpo_loss(given, GRPOSpec(kl=KL))
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert given.logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in outputs.metrics.values())


def test_kl_in_the_loss_needs_a_reference():
    with pytest.raises(ValueError, match="needs reference logprobs"):
        grpo_loss(inputs([-1.0], None, [-1.0], [1.0]), GRPOSpec(kl=KL))


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 0.5 - 1)])
def test_kl_estimators_by_hand(estimator, expected):
    value = kl_estimate(torch.tensor([-1.0]), torch.tensor([-0.5]), estimator)  # x = 0.5
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_divergence_as_their_expectation(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2])
    reference = torch.tensor([0.2, 0.2, 0.6])
    divergence = (policy * (policy / reference).log()).sum()
    expectation = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    torch.testing.assert_close(expectation, divergence)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_broken_logprob_stays_finite_and_has_no_gradient(estimator):
    logprobs = torch.tensor([-500.0, -1.0], requires_grad=True)
    value = kl_estimate(logprobs, torch.tensor([-1.0, -1.5]), estimator)
    value.sum().backward()
    assert value.isfinite().all()
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1] != 0


def test_k2_as_a_loss_has_the_gradient_of_the_divergence():
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6]).log()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    weights = logprobs.exp().detach()
    (estimated,) = torch.autograd.grad((weights * kl_estimate(logprobs, reference, "k2")).sum(), logits)
    torch.testing.assert_close(estimated, exact)
