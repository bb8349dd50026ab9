"""Measures whether packing pays with this model on this GPU, when a function has loaded it.

On CPU cores it is not measured anew: other processes of the run start on them meanwhile, and with two threads on two
busy cores a packed token took from 0.9 to 9 times as long as a padded one (1.1 to 1.4 times with a core to itself). The
figure there is a benchmark's (PAYS_BELOW). On a GPU that functions share an engine may start meanwhile, at most.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from rlhfless.functions.policy import PolicyNetwork, both_passes
from rlhfless.prefixes.packing import packs_below

log = logging.getLogger(__name__)

SAMPLES, WIDTH = 8, 128
"""A usual group. Half of a sequence is its prompt, a short one, because behind long ones packing pays in any case."""

MOST_GROUPS = 8
"""Small passes do not show what a GPU can do."""

ROUNDS = 3
"""The least time of these counts: other processes only ever make a pass longer. One more comes before, for what a first
pass allocates."""


def with_measured_rates(policy: PolicyNetwork, budget_tokens: int) -> PolicyNetwork:
    """The policy with the `packs_below` that follows from a padded and a packed forward pass of the same groups, within
    `budget_tokens`. As it is where it cannot pack, on a CPU, or where no group fits. *Collective* if it is sharded."""
    return policy if policy.device.type == "cpu" else measured(policy, budget_tokens)


@torch.no_grad()
def measured(policy: PolicyNetwork, budget_tokens: int) -> PolicyNetwork:
    """`with_measured_rates` on any device."""
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or WIDTH
    width = min(WIDTH, positions)
    if not policy.packs_below or budget_tokens < SAMPLES * width:
        return policy
    rows = _groups(min(MOST_GROUPS, budget_tokens // (SAMPLES * width)), width, policy.vocabulary)
    layout, *passes = both_passes(policy, rows)
    padded_s, packed_s = _measured_s(policy, passes)
    padded_token_s, packed_token_s = padded_s / rows.numel(), packed_s / len(layout.source)
    chosen = packs_below(policy.packs_below, padded_token_s, packed_token_s)
    if chosen != policy.packs_below:
        log.info(
            "a token of a packed row takes %.2f times as long as one of a padded pass: sequences are packed where that "
            "computes less than %g of the tokens, and not %g as usual",
            packed_token_s / padded_token_s,
            chosen,
            policy.packs_below,
        )
    return dataclasses.replace(policy, packs_below=chosen)


def _groups(count: int, width: int, vocabulary: int) -> torch.Tensor:
    """Sequences `[count * SAMPLES, width]`."""
    generator, prompt = np.random.default_rng(0), width // 2
    prompts = generator.integers(0, vocabulary, (count, prompt)).repeat(SAMPLES, axis=0)
    return torch.from_numpy(np.hstack([prompts, generator.integers(0, vocabulary, (count * SAMPLES, width - prompt))]))


def _measured_s(policy: PolicyNetwork, passes: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each pass; sums over the ranks of a sharded policy, so that all have the same. *Collective*."""
    times_s = torch.tensor([[_time_s(policy, each) for each in passes] for _ in range(1 + ROUNDS)])[1:].amin(0)
    if policy.mesh is not None and policy.mesh.size() > 1:
        times_s = times_s.to(policy.device)
        dist.all_reduce(times_s)
    measured_s: list[float] = times_s.tolist()
    return measured_s


def _time_s(policy: PolicyNetwork, forward: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    forward()
    policy.settle()
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)
    return time.perf_counter() - start_s
