"""Sequences side by side in a row give what padded ones give. FlashAttention, which is for GPUs, has a stand-in."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from rlhfless.algorithms.batch import select
from rlhfless.functions import attention_kernels
from rlhfless.functions import policy as policy_module
from rlhfless.functions.attention_kernels import runs_side_by_side
from rlhfless.functions.policy import PolicyNetwork, load_policy, response_logprobs
from rlhfless.prefixes.packing import SharingSequences
from rlhfless.spec import ModelSpec


def stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    starts_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Of torch.nn.attention.varlen: `query` [tokens, heads, head]. A sequence at a time."""
    assert starts.dtype == torch.int32, "as the kernel wants it"
    assert torch.equal(starts, starts_of_keys)
    assert longest == longest_of_keys == int(starts.diff().max())
    assert starts[-1] == len(query) == len(key)
    assert window_size == (-1, 0), "causal"
    outputs = []
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (tensor[first:end].transpose(0, 1)[None] for tensor in (query, key, value))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


def load(path: str, monkeypatch: pytest.MonkeyPatch, kernel: Any, **options: Any) -> PolicyNetwork:
    monkeypatch.setattr(policy_module, "runs_side_by_side", lambda *_: True)
    monkeypatch.setattr(attention_kernels, "varlen_attn", kernel)
    return load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32", **options)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_in_float64_they_are_padded_rows_to_1e9(monkeypatch, tiny_model, batch, checkpointing, packed):
    """Values and gradients; also in a packed row in which nothing is shared: its sequences lie in another order."""
    layout = None
    if packed:
        batch = select(batch, np.arange(0, batch.sequences, 4))  # of each group one
        fed = batch.positions < batch.lengths[batch.sequence_id] - 1
        layout = SharingSequences(batch.tokens[fed], batch.lengths - 1).pack(np.arange(batch.sequences))
        assert not layout.shared
    policy = load(tiny_model, monkeypatch, stand_in, gradient_checkpointing=checkpointing)
    assert policy.side_by_side
    policy.model.double()
    results = []
    for side_by_side in (True, False):
        policy.model.zero_grad()
        chosen = dataclasses.replace(policy, side_by_side=side_by_side)
        logprobs = response_logprobs(chosen, batch, 0.7, layout if side_by_side else None).logprobs
        (logprobs * torch.linspace(1, 2, len(logprobs))).sum().backward()
        results.append([logprobs.detach(), *(parameter.grad for parameter in policy.model.parameters())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-9, rtol=0)


def refused(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def wrong(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(query)


@pytest.mark.parametrize(("kernel", "reason"), [(refused, "only supports Ampere"), (wrong, "its outputs differ")])
def test_where_the_kernel_does_not_work_rows_are_padded(monkeypatch, tiny_model, batch, caplog, kernel, reason):
    with caplog.at_level(logging.INFO, "rlhfless"):
        policy = load(tiny_model, monkeypatch, kernel)
    assert not policy.side_by_side
    assert reason in caplog.text
    assert len(response_logprobs(policy, batch, 1.0).logprobs) == batch.response_mask.sum()


def test_torchs_own_kernel_takes_these_arguments():
    """On a GPU that is not there, with tensors that have no data."""
    with FakeTensorMode():
        query, key, value = (torch.empty(1, heads, 20, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
        starts = torch.tensor([0, 12, 20], dtype=torch.int32, device="cuda")
        output = attention_kernels.attend_side_by_side(query, key, value, starts, 12, scale=0.125)
    assert output.shape == (1, 20, 8, 64)
    assert output.dtype == torch.bfloat16


def test_it_is_for_gpus_and_16_bits():
    assert runs_side_by_side(torch.device("cuda", 0), torch.bfloat16)
    assert not runs_side_by_side(torch.device("cuda", 0), torch.float32)
    assert not runs_side_by_side(torch.device("cpu"), torch.bfloat16)
