"""Metrics of a training step, combined from the metrics of its micro-batches, ranks and mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlhfless.algorithms.base import MAXIMUM_SUFFIX


def over_ranks(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Each rank's share `[]` of an optimiser step's metrics, combined over the process group. Collective."""
    sums = [name for name in metrics if not name.endswith(MAXIMUM_SUFFIX)]
    maxima = [name for name in metrics if name.endswith(MAXIMUM_SUFFIX)]
    combined: dict[str, float] = {}
    for names, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        if not names:
            continue
        values = torch.stack([metrics[name] for name in names])
        dist.all_reduce(values, op=operation)
        combined |= dict(zip(names, values.tolist(), strict=True))
    return combined


def over_updates(parts: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """From (response tokens, metrics) of each optimiser step: means weighted by tokens, maxima of `*_max`."""
    if not parts:
        return {}
    total = sum(tokens for tokens, _ in parts)
    return {
        name: max(metrics[name] for _, metrics in parts)
        if name.endswith(MAXIMUM_SUFFIX)
        else sum(metrics[name] * tokens for tokens, metrics in parts) / max(total, 1)
        for name in parts[0][1]
    }
