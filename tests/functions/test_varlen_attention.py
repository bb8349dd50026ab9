"""Packed rows on GPUs: FlashAttention over own segments and over prefixes, joined by log-sum-exp."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

import fakes.fake_varlen  # noqa: F401  # registers the stand-in
from rlhfless.algorithms.batch import select
from rlhfless.functions import policy_loading
from rlhfless.functions.batching import fed_sequences
from rlhfless.functions.policy import policy_of, response_logprobs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.functions.prefix_attention import NAME, VarlenLayout, shared_prefix_attention
from rlhfless.prefixes.packing import ALWAYS, PackedSegments, Packing, SharingSequences
from rlhfless.spec import ModelSpec

CPU = torch.device("cpu")


def packed(rows: list[np.ndarray]) -> PackedSegments:
    lengths, packing = np.array([len(row) for row in rows]), Packing(math.inf, least_saved_tokens=1)
    return SharingSequences(np.concatenate(rows), lengths, packing).pack(np.arange(len(rows)))


def test_layout_by_hand():
    """A system prompt of 3, a prompt of 2 after it with two responses, another response, and one that shares nothing:

    s s s | p p | a a | b | c c | d d d d
    """
    row = PackedSegments(
        source=np.arange(14),
        positions=np.array([0, 1, 2, 3, 4, 5, 6, 5, 3, 4, 0, 1, 2, 3]),
        index=np.arange(14),
        segments=((0, 3), (3, 2), (5, 2), (7, 1), (8, 2), (10, 4)),
        shared=((0, 3, 10), (3, 5, 8)),
    )
    layout = VarlenLayout.of(row, CPU)
    assert layout.own.starts.tolist() == [0, 3, 5, 7, 8, 10, 14]
    assert layout.own.longest == 4
    system, prompt = layout.levels
    assert (system.queries.starts.tolist(), system.keys.starts.tolist()) == ([0, 3, 10, 14], [0, 1, 4, 5])
    assert system.source.tolist() == [0, 0, 1, 2, 10]  # what is idle has its own first token as a key
    assert system.idle.nonzero().flatten().tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert (prompt.queries.starts.tolist(), prompt.keys.starts.tolist()) == ([0, 5, 8, 14], [0, 1, 3, 4])
    assert prompt.source.tolist() == [0, 3, 4, 8]
    assert (prompt.queries.longest, prompt.keys.longest) == (6, 2)


stems = st.lists(st.integers(1, 30), min_size=1, max_size=3)


@given(
    prefixes=stems,
    users=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=8),
    heads=st.sampled_from([(7, 1), (4, 2), (2, 2)]),
    head=st.sampled_from([64, 96, 128]),
    nested=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_it_is_plain_attention(prefixes, users, heads, head, nested):
    """Outputs and gradients; prefixes nested or beside each other, of one to all segments, and segments without."""
    stem = [np.arange(100 * number, 100 * number + tokens) for number, tokens in enumerate(prefixes)]
    rows = []
    for number, (depth, tokens) in enumerate(users):
        before = stem[:depth] if nested else stem[depth - 1 : depth]
        rows.append(np.concatenate([*before, np.arange(tokens) + 1000 * (number + 1)]))
    row = packed(rows)
    tokens = len(row.source)
    random = torch.Generator().manual_seed(tokens)
    inputs = [
        torch.randn(1, count, tokens, head, dtype=torch.float64, generator=random, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    layout = VarlenLayout.of(row, CPU)
    assert bool(layout.levels) == bool(row.shared)
    ours = shared_prefix_attention(torch.nn.Module(), *inputs, None, layout)[0].transpose(1, 2)
    mask, start = torch.zeros(tokens, tokens, dtype=torch.bool), 0
    for each in rows:
        at = torch.from_numpy(row.index[start : start + len(each)])
        mask[at[:, None], at] |= torch.ones(len(at), len(at), dtype=torch.bool).tril()
        start += len(each)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    upstream = torch.randn(ours.shape, dtype=torch.float64, generator=random)
    results = [[output, *torch.autograd.grad(output, inputs, upstream)] for output in (ours, expected)]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)


@pytest.fixture
def loaded(tiny_model, monkeypatch):
    """`loaded(checkpointing)`: a policy in float64 that computes as on a GPU."""
    monkeypatch.setattr(policy_loading, "uses_varlen", lambda _: True)

    def load(checkpointing: bool = False) -> Any:
        policy = load_policy(
            ModelSpec(path=tiny_model), parameter_dtype="float32", compute_dtype="float32",
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        assert policy.varlen
        policy.model.double()
        return policy

    return load


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sharing", ["nothing", "no layout", "nested"])
def test_in_float64_a_model_is_that_of_padded_rows_to_1e9(
    loaded, batch, shared_batch, checkpointing, sharing, monkeypatch
):
    layout = None
    if sharing == "nested":
        batch, layout = (
            shared_batch,
            fed_sequences(shared_batch, 10_000, ALWAYS).pack(np.arange(shared_batch.sequences)),
        )
        assert len(VarlenLayout.of(layout, CPU).levels) == 3
    elif sharing == "nothing":
        batch = select(batch, np.arange(0, batch.sequences, 4))  # of each group one
        layout = fed_sequences(batch, 10_000, ALWAYS).pack(np.arange(batch.sequences))
        assert not layout.shared
    policy = loaded(checkpointing)
    monkeypatch.setattr(torch, "float32", torch.float64)  # norms of transformers cast to it by name
    results = []
    for chosen in (policy, dataclasses.replace(policy, varlen=False)):
        policy.model.zero_grad()
        logprobs = response_logprobs(chosen, batch, 0.7, layout if chosen.varlen else None).logprobs
        (logprobs * torch.linspace(1, 2, len(logprobs))).sum().backward()
        results.append([logprobs.detach(), *(parameter.grad for parameter in policy.model.parameters())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-9, rtol=0)


# -- the operators that run


class Operators(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))

    @property
    def of_attention(self) -> dict[str, int]:
        return {name: count for name, count in self.calls.items() if "attention" in name or "attn" in name}


def test_both_passes_are_flash_attention(loaded, shared_batch):
    """In each of two layers: own segments, and three depths of prefixes."""
    policy = loaded()
    layout = fed_sequences(shared_batch, 10_000, ALWAYS).pack(np.arange(shared_batch.sequences))
    with Operators() as operators:
        response_logprobs(policy, shared_batch, 1.0, layout).logprobs.sum().backward()
    assert operators.of_attention == {"torch_attn::_varlen_attn": 8, "torch_attn::_varlen_attn_backward": 8}


def test_on_a_gpu_that_is_not_there(shared_batch):
    """With tensors that have no data: torch takes the arguments, and runs no other attention."""
    config = Qwen2Config(
        hidden_size=448, intermediate_size=64, num_hidden_layers=2, num_attention_heads=7, num_key_value_heads=1,
        vocab_size=64,
    )  # fmt: skip
    layout = fed_sequences(shared_batch, 10_000, ALWAYS).pack(np.arange(shared_batch.sequences))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
        gpu = torch.device("cuda")
        policy = dataclasses.replace(policy_of(model, gpu, torch.bfloat16), packing=ALWAYS, varlen=True)
        with Operators() as operators:
            found = response_logprobs(policy, shared_batch, 1.0, layout)
    assert found.logprobs.shape == (shared_batch.response_mask.sum(),)
    assert found.logprobs.device.type == "cuda"
    assert operators.of_attention == {"torch_attn::_varlen_attn": 8}
