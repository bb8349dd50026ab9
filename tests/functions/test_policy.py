"""Our logprobs against transformers' own, one sequence at a time, whatever the batching."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from fakes.tiny_learner import token_logprobs
from rlhfless.algorithms.batch import select
from rlhfless.functions import lm_head
from rlhfless.functions.batching import micro_batches
from rlhfless.functions.policy import response_logprobs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.spec import ModelSpec


@pytest.fixture(scope="module")
def policy(tiny_model):
    return load_policy(ModelSpec(path=tiny_model), parameter_dtype="float32", compute_dtype="float32")


@torch.no_grad()
def plain_logprobs(model, batch, temperature: float) -> np.ndarray:
    """Each sequence on its own, through the model's own forward."""
    values = np.zeros(len(batch.tokens), dtype=np.float32)
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        tokens = torch.tensor(batch.tokens[start : start + length])
        logits = model(input_ids=tokens[None]).logits[0].float() / temperature
        everything = logits.log_softmax(-1)
        values[start + 1 : start + length] = everything[:-1].gather(1, tokens[1:, None]).squeeze(1)
    return np.where(batch.response_mask, values, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_equal_to_transformers_for_any_batching(policy, tiny_model, batch, temperature, budget):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ours = token_logprobs(policy, batch, temperature, budget)
    np.testing.assert_allclose(ours, plain_logprobs(model, batch, temperature), atol=1e-5)
    assert ours.dtype == np.float32


def test_order_of_the_sequences_does_not_matter(policy, batch):
    order = np.random.default_rng(0).permutation(batch.sequences)
    shuffled = select(batch, order)
    expected = dataclasses.replace(batch, old_logprobs=token_logprobs(policy, batch, 1.0, 64))
    ours = token_logprobs(policy, shuffled, 1.0, 64)
    np.testing.assert_allclose(ours, select(expected, order).old_logprobs, atol=1e-6)


def test_entropy_is_that_of_the_whole_distribution(policy, tiny_model, batch):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    one = select(batch, np.array([5]))
    result = response_logprobs(policy, one, 0.7)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(one.tokens)[None]).logits[0, :-1] / 0.7
    entropy = torch.distributions.Categorical(logits=logits).entropy()[torch.from_numpy(one.response_mask[1:])]
    torch.testing.assert_close(result.entropy, entropy, atol=1e-5, rtol=0)
    assert not result.entropy.requires_grad


def test_chunks_of_logits_change_neither_value_nor_gradient(policy, batch, monkeypatch):
    def value_and_gradient():
        policy.model.zero_grad()
        result = response_logprobs(policy, batch, 0.9).logprobs
        (result * torch.arange(len(result))).mean().backward()
        return result.detach(), [parameter.grad.clone() for parameter in policy.model.parameters()]

    whole, whole_gradient = value_and_gradient()
    monkeypatch.setattr(lm_head, "LOGITS_CHUNK_ELEMENTS", 40 * 50)  # 50 rows
    chunked, chunked_gradient = value_and_gradient()
    torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked_gradient, whole_gradient, atol=1e-4, rtol=1e-5)


def test_gradient_checkpointing_changes_nothing(tiny_model, policy, batch):
    saving = load_policy(
        ModelSpec(path=tiny_model),
        parameter_dtype="float32",
        compute_dtype="float32",
        gradient_checkpointing=True,
    )
    results = [response_logprobs(each, batch, 1.0).logprobs for each in (policy, saving)]
    torch.testing.assert_close(*results)
    policy.model.zero_grad()
    for result in results:
        result.mean().backward()
    for plain, saved in zip(policy.model.parameters(), saving.model.parameters(), strict=True):
        torch.testing.assert_close(saved.grad, plain.grad, atol=1e-7, rtol=1e-5)


def test_no_responses_at_all(policy, batch):
    empty = select(batch, np.flatnonzero(batch.response_lengths == 0))
    assert empty.sequences == 1
    assert response_logprobs(policy, empty, 1.0).logprobs.shape == (0,)
    assert not token_logprobs(policy, empty, 1.0, 100).any()


@given(budget=st.integers(1, 600))
def test_micro_batches_take_each_response_once_and_keep_to_the_budget(batch, budget):
    parts = list(micro_batches(batch, budget))
    assert sorted(np.concatenate(parts)) == np.flatnonzero(batch.response_lengths > 0).tolist()
    fed = batch.lengths - 1
    for part in parts:
        assert len(part) == 1 or len(part) * fed[part].max() <= budget
    assert [fed[part].max() for part in parts] == sorted((fed[part].max() for part in parts), reverse=True)


def test_bfloat16_forward_of_float32_parameters_is_close(learner, policy, batch):
    exact = token_logprobs(policy, batch, 1.0, 1000)
    with learner(dtype="bfloat16") as rank:
        rough = rank._policy
        ours = token_logprobs(rough, batch, 1.0, 1000)
    assert rough.model.dtype == torch.float32
    assert 1e-5 < np.abs(ours - exact).mean() < 0.05
