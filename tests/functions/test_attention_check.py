"""The attention kernels are checked against plain attention when a model is loaded."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fakes.fake_varlen  # noqa: F401  # registers the stand-in
from rlhfless.functions import attention_kernels, policy_loading, prefix_attention
from rlhfless.functions.attention_check import packed_difference, padded_difference
from rlhfless.functions.attention_kernels import packed_rows_take, uses_varlen
from rlhfless.functions.policy import CHECK_TOLERANCE, response_logprobs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.prefixes.packing import NEVER
from rlhfless.spec import ModelSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", CHECK_TOLERANCE)
def test_gradients_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    assert packed_difference(CPU, dtype, varlen=False, head=96) <= CHECK_TOLERANCE[dtype]
    assert packed_difference(CPU, dtype, varlen=True, head=96) <= CHECK_TOLERANCE[dtype]
    assert padded_difference(CPU, dtype) <= CHECK_TOLERANCE[dtype]


def test_a_difference_that_is_no_number_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefix_attention.attend_varlen_backward

    def backward(gradient: torch.Tensor, query: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        gradients = right(gradient, query, *others, **options)
        return gradients if query.shape[2] > 64 else tuple(each * torch.nan for each in gradients)

    monkeypatch.setattr(prefix_attention, "attend_varlen_backward", backward)
    assert not packed_difference(CPU, torch.float32, varlen=True) <= 1e9


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_rows_are_padded_where_the_backward_pass_is_wrong(
    wrong: float, on_gpus: bool, tiny_model: str, batch: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Outputs are right, so a check of them alone does not find it."""
    name = "attend_varlen_backward" if on_gpus else "attend_backward"
    right = getattr(attention_kernels, name)

    def backward(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        query, key, value = right(*tensors, **options)
        return query, key, value * wrong

    monkeypatch.setattr(prefix_attention, name, backward)
    assert_padded(tiny_model, batch, monkeypatch, caplog, "gradients that differ by", on_gpus=on_gpus)


def refused(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def zeros(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    return torch.zeros_like(query), torch.zeros(query.shape[1::-1])


@pytest.mark.parametrize(("kernel", "reason"), [(refused, "only supports Ampere"), (zeros, "outputs or gradients")])
def test_rows_are_padded_where_the_kernel_does_not_work(monkeypatch, tiny_model, batch, caplog, kernel, reason):
    monkeypatch.setattr(prefix_attention, "attend_varlen", kernel)
    assert_padded(tiny_model, batch, monkeypatch, caplog, reason, on_gpus=True)


def test_rows_are_padded_in_float32_on_gpus(monkeypatch, tiny_model, batch, caplog):
    monkeypatch.setattr(policy_loading, "packed_rows_take", lambda *_: False)
    assert_padded(tiny_model, batch, monkeypatch, caplog, "takes bfloat16 and float16", on_gpus=True)


def assert_padded(path: str, batch: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, reason: str, *, on_gpus: bool):
    monkeypatch.setattr(policy_loading, "uses_varlen", lambda _: on_gpus)
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32", device=CPU)
    assert (loaded.packing, loaded.varlen) == (NEVER, False)
    assert reason in caplog.text
    assert loaded.model.config._attn_implementation == "sdpa"
    assert len(response_logprobs(loaded, batch, 1.0).logprobs) == batch.response_mask.sum()


def test_it_is_for_gpus_and_16_bits():
    gpu = torch.device("cuda", 0)
    assert (uses_varlen(gpu), uses_varlen(CPU)) == (True, False)
    assert packed_rows_take(gpu, torch.bfloat16)
    assert not packed_rows_take(gpu, torch.float32)
    assert packed_rows_take(CPU, torch.float32)
