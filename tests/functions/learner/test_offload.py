"""`learner.offload`: states are in the host's memory, and the step is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.fake_cuda import pretended_cuda
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.policy import response_logprobs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.functions.sharding import local
from rlhfless.functions.training.optimizer import MOMENTS, ShardedAdamW
from rlhfless.spec import AdamWSpec, ModelSpec


@pytest.mark.parametrize("offload", [True, False])
def test_on_a_gpu_the_states_are_where_they_are_wanted(monkeypatch, tiny_model, batch, offload):
    """FSDP looks in the first pass at where the parameters are."""
    with pretended_cuda(monkeypatch, 2) as mesh:
        policy = load_policy(
            ModelSpec(path=tiny_model),
            parameter_dtype="float32",
            compute_dtype="bfloat16",
            device=torch.device("cuda", 0),
            mesh=mesh,
            offload=offload,
            share_prefixes=False,
        )
        state = ShardedAdamW(policy.model, AdamWSpec()).state()
        states = [tensor for part in ("master_weights", *MOMENTS) for tensor in state[part].values()]
        assert {local(tensor).device.type for tensor in states} == {"cpu" if offload else "cuda"}
        assert {buffer.device.type for buffer in policy.model.buffers()} == {"cuda"}
        assert response_logprobs(policy, batch, 1.0).logprobs.device.type == "cuda"


def test_an_offloaded_learner_takes_the_same_step_and_goes_on_from_its_checkpoint(learner, batch, tmp_path):
    with learner() as plain:
        expected = plain.learn(batch, Passes(2))
        weights = plain.weights()
    with learner(offload=True) as rank:
        assert not rank._alone, "it takes the path of an offloaded one"
        rank.save(tmp_path / "checkpoint")
        first = rank.learn(batch, Passes(2))
        assert first == pytest.approx(expected, rel=1e-5, abs=1e-6)
        for name, value in rank.weights().items():
            np.testing.assert_allclose(value, weights[name], atol=1e-6, err_msg=name)
        rank.restore(tmp_path / "checkpoint")
        assert rank.learn(batch, Passes(2)) == first
