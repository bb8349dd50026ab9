"""Losses by sequence, and an entropy bonus, through the real learner: any cut into micro-batches and ranks is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.tiny_learner import run_learner as run
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.spec import DrGRPOSpec, GRPOSpec, GSPOSpec, ImportanceSpec, RejectionSpec

pytestmark = pytest.mark.timeout(600)  # three processes, one after the other

ALGORITHMS = [
    GSPOSpec(clip_low=0.02, clip_high=0.02, rejection=RejectionSpec(low=0.3, high=1.5), entropy_bonus=0.1),
    GRPOSpec(aggregation="sequence", importance=ImportanceSpec(level="sequence", high=5, outside="mask")),
    DrGRPOSpec(constant_tokens=25),
]
TEMPERATURE = 0.8
"""Of the learners here."""


def learn(learner: LearnerRank, _: int, batch: PackedBatch) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    metrics = learner.learn(batch, Passes(2))
    return metrics, {name: value.numpy() for name, value in learner.weights().items()}


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHMS[0], *(pytest.param(algorithm, marks=pytest.mark.long) for algorithm in ALGORITHMS[1:])],
    ids=lambda algorithm: algorithm.type,
)
def test_any_cut_is_one(tiny_model: str, batch: PackedBatch, tmp_path: Any, algorithm: Any) -> None:
    def learned(ranks: int, micro_batch_tokens: int) -> list[Any]:
        folder = tmp_path / f"{ranks}-{micro_batch_tokens}"
        folder.mkdir()
        changes = {"algorithm": algorithm, "micro_batch_tokens": micro_batch_tokens}
        return run(learn, tiny_model, folder, ranks, changes=changes, batch=batch)

    ((metrics, weights),) = learned(1, 4096)
    for their_metrics, their_weights in (*learned(1, 40), *learned(2, 60)):
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)


def test_the_first_update_is_that_of_a_plain_loop(tiny_model: str, batch: PackedBatch, learner: Any) -> None:
    """GSPO's ratio is 1 there: -A of each token, mean by response, of those that the rejection keeps, and the bonus."""
    algorithm = ALGORITHMS[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    by_response, entropies, kept = [], [], []
    assert batch.advantages is not None
    for index in range(batch.sequences):
        mine = batch.sequence_id == index
        mask = torch.from_numpy(batch.response_mask[mine][1:])
        if not mask.any():
            continue
        tokens = torch.from_numpy(batch.tokens[mine])
        everything = (model(input_ids=tokens[None, :-1]).logits[0] / TEMPERATURE).log_softmax(-1)
        logprobs = everything.gather(1, tokens[1:, None]).squeeze(1)[mask]
        rollout = torch.from_numpy(batch.rollout_logprobs[mine][1:])[mask]
        ratio = (logprobs.detach() - rollout).mean().exp()
        kept.append(bool(0.3 <= ratio <= 1.5))
        weight = (logprobs.detach() - rollout).exp().clamp(max=2) * kept[-1]
        advantage = torch.from_numpy(batch.advantages[mine][1:])[mask]
        by_response.append((-advantage * weight * (logprobs - logprobs.detach()).exp()).mean())
        entropies.append(-(everything.exp() * everything).sum(-1)[mask])
    loss = torch.stack(by_response).mean() - 0.1 * torch.cat(entropies).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm()
    with learner(algorithm=algorithm, micro_batch_tokens=60) as rank:
        metrics = rank.learn(batch, Passes())
    assert 0 < sum(kept) < len(kept), "the case must keep some and reject some"
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
