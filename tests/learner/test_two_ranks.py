"""Two ranks in two processes take the step that one takes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_learner import make_rank

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.spec import AdamWSpec

OPTIMIZER = AdamWSpec(learning_rate=0.1, eps=1.0)
PATIENCE_S = 120


def work(
    model: str, rendezvous: Path, rank: int, world_size: int, batch: PackedBatch, count: int, changes: dict, queue
) -> None:
    """One rank: evaluate, learn, and send back what it has."""
    changes = {"micro_batch_tokens": 64} | changes
    learner = make_rank(model, rendezvous, rank, world_size, optimizer=OPTIMIZER, **changes)
    try:
        old = learner.evaluate(batch)
        metrics = learner.learn(batch.with_columns(old_logprobs=old), count)
        queue.put((rank, old, metrics, {name: value.numpy() for name, value in learner.weights().items()}))
    finally:
        learner.close()


def run(model: str, folder: Path, world_size: int, batch: PackedBatch, count: int, **changes) -> list:
    """The results of all ranks, by rank."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    rendezvous = folder / f"rendezvous{world_size}"
    processes = [
        context.Process(target=work, args=(model, rendezvous, rank, world_size, batch, count, changes, queue))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        return sorted((queue.get(timeout=PATIENCE_S) for _ in processes), key=lambda result: result[0])
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


@pytest.mark.parametrize("sequences", [24, 1], ids=["all", "fewer than ranks"])
def test_two_ranks_are_one(tiny_model, batch, tmp_path, sequences):
    given = select(batch, np.arange(sequences))
    count = 2 if sequences > 1 else 1
    ((_, old, metrics, weights),) = run(tiny_model, tmp_path, 1, given, count)
    both = run(tiny_model, tmp_path, 2, given, count)
    for _, their_old, their_metrics, their_weights in both:
        np.testing.assert_allclose(their_old, old, atol=1e-6, rtol=1e-6)
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)
    first, second = both[0][3], both[1][3]
    assert all(np.array_equal(first[name], second[name]) for name in first), "ranks agree to the last bit"


def test_two_ranks_that_share_prefixes_are_one_that_does_not(tiny_model, shared_batch, tmp_path):
    large = {"micro_batch_tokens": 300}
    ((_, old, metrics, weights),) = run(tiny_model, tmp_path, 1, shared_batch, 2, share_prefixes=False, **large)
    both = run(tiny_model, tmp_path, 2, shared_batch, 2, **large)
    for _, their_old, their_metrics, their_weights in both:
        np.testing.assert_allclose(their_old, old, atol=1e-5, rtol=1e-5)
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)
    first, second = both[0][3], both[1][3]
    assert all(np.array_equal(first[name], second[name]) for name in first), "ranks agree to the last bit"


def test_a_rank_that_never_comes_is_an_error_not_a_wait(tiny_model, tmp_path):
    with pytest.raises((torch.distributed.DistError, RuntimeError), match=r"(?i)time|wait"):
        make_rank(tiny_model, tmp_path / "rendezvous", 0, 2, timeout_s=2)
