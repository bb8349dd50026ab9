"""Rotary positions that depend on a sequence's length are those of the run's longest sequence, as in vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig

from fakes.tiny_learner import token_logprobs
from fakes.tiny_models import SHAPE, save
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.policy import PolicyNetwork
from rlhfless.functions.policy_loading import load_policy
from rlhfless.spec import ModelSpec

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
    np.testing.assert_allclose(token_logprobs(policy, batch, 1.0, 4000), alone, atol=1e-5)
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
        np.testing.assert_allclose(alone[start + 1 : start + length][response], expected[response], atol=1e-5)


def test_without_a_context_the_models_own_limit_counts(batch: PackedBatch, tmp_path: Path) -> None:
    path = save(phi3(), tmp_path)
    own, long, short = (token_logprobs(loaded(path, longest), batch, 1.0, 200) for longest in (None, 128, ORIGINAL))
    np.testing.assert_array_equal(own, long)
    assert np.abs(own - short).max() > 0.1
