"""Logprobs of a policy are those of transformers, for all families of heads and rotary positions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from fakes.tiny_learner import token_logprobs
from fakes.tiny_models import FAMILIES, SHAPE, save
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.functions import lm_head
from rlhfless.functions.batching import micro_batches
from rlhfless.functions.policy import PolicyNetwork, response_logprobs
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
    np.testing.assert_allclose(ours, plain_logprobs(model, batch, temperature), atol=3e-5)
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_logprobs_are_the_models_own(family, gradient_checkpointing, batch, tmp_path):
    path = save(FAMILIES[family], tmp_path)
    policy = load_policy(
        ModelSpec(path=path),
        parameter_dtype="float32",
        compute_dtype="float32",
        gradient_checkpointing=gradient_checkpointing,  # puts the model in training mode: dropout must stay off
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ours = token_logprobs(policy, batch, 1.0, 200)
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        tokens = torch.tensor(batch.tokens[start : start + length])
        with torch.no_grad():
            everything = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        expected = everything[:-1].gather(1, tokens[1:, None]).squeeze(1).numpy()
        response = batch.response_mask[start + 1 : start + length]
        np.testing.assert_allclose(ours[start + 1 : start + length][response], expected[response], atol=3e-5)


def test_a_head_that_we_do_not_know_is_refused(tmp_path):
    config = FalconH1Config(
        **SHAPE, lm_head_multiplier=0.5, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    )
    path = save(config, tmp_path)
    with pytest.raises(ValueError, match=r"FalconH1ForCausalLM\) is not supported: its logits differ"):
        load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32")


ORIGINAL = 16
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


def phi3() -> PreTrainedConfig:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **FACTORS}
    shape = SHAPE | {"max_position_embeddings": 128}
    return Phi3Config(**shape, pad_token_id=0, original_max_position_embeddings=ORIGINAL, rope_parameters=rope)


def dynamic() -> PreTrainedConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return LlamaConfig(**SHAPE | {"max_position_embeddings": ORIGINAL}, rope_parameters=rope)


def loaded(path: str, longest: int | None) -> PolicyNetwork:
    model = ModelSpec(path=path, max_context_tokens=longest)
    return load_policy(model, parameter_dtype="float32", compute_dtype="float32")


@pytest.mark.parametrize("config", [phi3, dynamic])
@pytest.mark.parametrize("longest", [ORIGINAL, 64])
def test_a_logprob_does_not_depend_on_the_longest_neighbour(
    config: object, longest: int, batch: PackedBatch, tmp_path: Path
) -> None:
    """Logprobs of short sequences were up to 5 apart, by the batch in which they were computed."""
    path = save(config(), tmp_path)  # type: ignore[operator]
    policy = loaded(path, longest)
    alone = token_logprobs(policy, batch, 1.0, 1)
    np.testing.assert_allclose(token_logprobs(policy, batch, 1.0, 4000), alone, atol=3e-5)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        if length > longest:
            continue
        tokens = torch.tensor(batch.tokens[start : start + length])
        whole = torch.nn.functional.pad(tokens, (0, longest - length))  # transformers goes by the longest position
        with torch.no_grad():
            everything = model(input_ids=whole[None]).logits[0, : length - 1].log_softmax(-1)
        expected = everything.gather(1, tokens[1:, None]).squeeze(1).numpy()
        response = batch.response_mask[start + 1 : start + length]
        np.testing.assert_allclose(alone[start + 1 : start + length][response], expected[response], atol=3e-5)


def test_without_a_context_the_models_own_limit_counts(batch: PackedBatch, tmp_path: Path) -> None:
    path = save(phi3(), tmp_path)
    own, long, short = (token_logprobs(loaded(path, longest), batch, 1.0, 200) for longest in (None, 128, ORIGINAL))
    np.testing.assert_array_equal(own, long)
    assert np.abs(own - short).max() > 0.1
