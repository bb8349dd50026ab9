"""The three estimators, by hand and by their defining property."""

from __future__ import annotations

import math

import pytest
import torch

from rlhfless.algorithms.kl import kl_estimate


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 0.5 - 1)])
def test_by_hand(estimator, expected):
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
