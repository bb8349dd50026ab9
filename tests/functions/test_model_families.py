"""Heads with a scale or a soft cap are right, and heads that we do not know are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
)

from fakes.tiny_learner import token_logprobs
from fakes.tiny_models import FAMILIES, SHAPE, save
from rlhfless.functions.policy_loading import load_policy
from rlhfless.spec import ModelSpec


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
        np.testing.assert_allclose(ours[start + 1 : start + length][response], expected[response], atol=1e-5)


def test_a_head_that_we_do_not_know_is_refused(tmp_path):
    config = FalconH1Config(
        **SHAPE, lm_head_multiplier=0.5, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    )
    path = save(config, tmp_path)
    with pytest.raises(ValueError, match=r"FalconH1ForCausalLM\) is not supported: its logits differ"):
        load_policy(ModelSpec(path=path), parameter_dtype="float32", compute_dtype="float32")
