"""The fused attention is plain attention, also where its kernels' blocks are not full."""

from __future__ import annotations

import logging

import pytest
import torch

from rlhfless.functions import attention_kernels
from rlhfless.functions.attention_kernels import gradient_difference, padded
from rlhfless.functions.policy import CHECK_TOLERANCE, load_policy
from rlhfless.spec import ModelSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", CHECK_TOLERANCE)
def test_gradients_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    assert gradient_difference(CPU, dtype) <= CHECK_TOLERANCE[dtype]


def test_queries_past_the_end_get_no_probability_on_gpus() -> None:
    """exp(score - infinity) is 0 for any score; with 0 in place of infinity an H100 left half of the updates of a run
    with gradients that were not finite."""
    logsumexp = torch.zeros(1, 2, 45)
    given = padded(logsumexp)
    assert given.shape == (1, 2, 64)
    assert (given[..., :45] == 0).all()
    assert (given[..., 45:] == torch.inf).all()
    assert padded(torch.zeros(1, 2, 64)).shape == (1, 2, 64)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_no_prefixes_are_shared_by_kernels_that_are_wrong(
    wrong: float, tiny_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = attention_kernels.attend_backward

    def backward(*tensors: torch.Tensor, **options: float) -> tuple[torch.Tensor, ...]:
        query, key, value = right(*tensors, **options)  # type: ignore[arg-type]
        return query, key, value * wrong

    monkeypatch.setattr(attention_kernels, "attend_backward", backward)
    with caplog.at_level(logging.WARNING):
        policy = load_policy(ModelSpec(path=tiny_model), parameter_dtype="float32", compute_dtype="float32", device=CPU)
    assert policy.packs_below == 0
    assert "gradients that differ by" in caplog.text
