"""Ranks of a function in separate processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from fakes.tiny_learner import VOCABULARY, make_critic, make_rank, make_supervised
from rlhfless.functions import lm_head, policy, policy_loading, sharding
from rlhfless.spec import AdamWSpec

OPTIMIZER = AdamWSpec(learning_rate=0.1, eps=1.0)
PATIENCE_S = 240
"""Maximum wait of one process for another, even on a busy machine."""

Work = Callable[..., Any]


def compute_in_float64() -> None:
    """Use float64 wherever the product uses float32, small chunks of logits, and a group for each layer."""
    policy.TORCH_DTYPES["float32"] = torch.float64
    policy.CHECK_TOLERANCE[torch.float64] = 1e-9
    policy_loading.EAGER_TOLERANCE[torch.float64] = 1e-3  # norms compute in float32
    lm_head.LOGITS_CHUNK_ELEMENTS = 7 * VOCABULARY
    sharding.ONE_GROUP_PARAMETERS = 0
    torch.set_default_dtype(torch.float64)


def run_processes(target: Callable[..., None], folder: Path, ranks: int, *given: Any) -> list[Any]:
    """Run `target(rendezvous, rank, ranks, *given, queue)` in one process per rank, and return the results by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fakes.tiny_learner"])  # torch and transformers are imported once for all processes
    queue = context.Queue()
    rendezvous = folder / f"rendezvous{ranks}-{os.urandom(4).hex()}"
    processes = [context.Process(target=target, args=(rendezvous, rank, ranks, *given, queue)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        while len(results) < ranks:
            with contextlib.suppress(Empty):
                results |= [queue.get(timeout=1)]
            died = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in results]
            assert not died, f"without a result: ranks {died}"
        return [results[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def run_learner(
    work: Work, model: str, folder: Path, world_size: int, *, exact: bool = False, changes: Any = (), **options: Any
) -> list[Any]:
    """Run `work(learner, rank, **options)` on all ranks of a learner."""
    return run_processes(_learn, folder, world_size, work, model, options, exact, dict(changes), make_rank)


def run_critic(
    work: Work, model: str, folder: Path, world_size: int, *, changes: Any = (), **options: Any
) -> list[Any]:
    """Run `work(critic, rank, **options)` on all ranks of a critic."""
    return run_processes(_learn, folder, world_size, work, model, options, False, dict(changes), make_critic)


def run_supervised(
    work: Work, model: str, folder: Path, world_size: int, *, changes: Any = (), **options: Any
) -> list[Any]:
    """Run `work(learner, rank, **options)` on all ranks of a learner of preference pairs."""
    return run_processes(_learn, folder, world_size, work, model, options, False, dict(changes), make_supervised)


def _learn(
    rendezvous: Path,
    rank: int,
    world_size: int,
    work: Work,
    model: str,
    options: Mapping,
    exact: bool,
    changes: Mapping,
    make: Callable[..., Any],
    queue,
) -> None:
    """Run one rank, and send back its result or its error."""
    if exact:
        compute_in_float64()
    given = {"optimizer": OPTIMIZER, "micro_batch_tokens": 64, "timeout_s": PATIENCE_S} | dict(changes)
    learner = make(model, rendezvous, rank, world_size, **given)
    try:
        queue.put((rank, work(learner, rank, **options)))
    except Exception as error:  # the test examines it
        queue.put((rank, error))
    finally:
        learner.close()
