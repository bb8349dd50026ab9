"""The output head in chunks: the values and gradients of all logits at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlhfless.functions import lm_head
from rlhfless.functions.lm_head import Entropy, OutputHead, head_logprobs

POSITIONS, HIDDEN, VOCABULARY = 400, 16, 30


def found(dtype: torch.dtype, *, bias: bool = False, entropy_gradient: bool = False) -> Iterator[torch.Tensor]:
    """Logprobs, entropy, and the gradients of hidden states and of the head, of both with `entropy_gradient`."""
    torch.manual_seed(3)
    linear = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=torch.bfloat16).to(dtype)
    hidden = torch.randn(POSITIONS, HIDDEN, dtype=torch.bfloat16).to(dtype).requires_grad_()
    targets, weights = torch.randint(VOCABULARY, (POSITIONS,)), torch.rand(POSITIONS)
    asked: Entropy = "gradient" if entropy_gradient else "value"
    logprobs, entropy = head_logprobs(OutputHead(linear, 0.5, 3.0), hidden, targets, 0.7, asked)
    (alone,) = head_logprobs(OutputHead(linear, 0.5, 3.0), hidden, targets, 0.7)
    assert torch.equal(alone, logprobs), "without an entropy"
    assert entropy.requires_grad is entropy_gradient
    ((logprobs + 3 * entropy if entropy_gradient else logprobs) * weights).sum().backward()
    yield from (logprobs.detach(), entropy.detach(), hidden.grad)
    yield from (parameter.grad for parameter in linear.parameters())


@pytest.mark.parametrize(("bias", "entropy"), [(False, False), (True, False), (True, True)])
def test_in_float64_chunks_are_all_at_once_to_1e12(monkeypatch: pytest.MonkeyPatch, bias: bool, entropy: bool) -> None:
    whole = list(found(torch.float64, bias=bias, entropy_gradient=entropy))
    monkeypatch.setattr(lm_head, "LOGITS_CHUNK_ELEMENTS", 7 * VOCABULARY)
    for mine, expected in zip(found(torch.float64, bias=bias, entropy_gradient=entropy), whole, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0)


def test_in_bfloat16_a_sum_over_chunks_is_as_exact_as_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of 400 chunks count as much as the first: bfloat16 has 8 bits."""
    *_, exact = found(torch.float64)
    *_, at_once = found(torch.bfloat16)
    monkeypatch.setattr(lm_head, "LOGITS_CHUNK_ELEMENTS", VOCABULARY)
    *_, in_chunks = found(torch.bfloat16)
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in (at_once, in_chunks)]
    assert errors[1] < 1.5 * errors[0], errors
