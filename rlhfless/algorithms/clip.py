"""PPO's clipped objective, for a ratio of any kind, and what it did."""

from __future__ import annotations

import torch

from rlhfless.algorithms.base import LossInputs, by_staleness
from rlhfless.algorithms.kl import bounded
from rlhfless.spec import ClippedLossSpec


def log_ratio_of(inputs: LossInputs) -> torch.Tensor:
    """Log ratio of the current to the old policy, `[tokens]`, bounded."""
    return bounded(inputs.logprobs - inputs.old)


def clipped(inputs: LossInputs, ratio: torch.Tensor, settings: ClippedLossSpec) -> torch.Tensor:
    """The loss of each token, `[tokens]`, by ratio r and advantage A:

        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    It is PPO's (arXiv 1707.06347, eq. 7) with DAPO's two bounds (2503.14476, eq. 8). With a dual clip c (1912.09729,
    eq. 8) the max is at most -c A where A < 0: the first clip leaves a ratio that has grown unbounded there.
    """
    advantages = inputs.advantages
    bound = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * bound)
    if settings.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)
    return loss


def clip_metrics(inputs: LossInputs, ratio: torch.Tensor, settings: ClippedLossSpec) -> dict[str, torch.Tensor]:
    """A token counts as clipped if the clip removes its gradient, not whenever r is out of range."""
    advantages, scale = inputs.advantages, inputs.scale
    low = (ratio < 1 - settings.clip_low) & (advantages < 0)
    high = (ratio > 1 + settings.clip_high) & (advantages > 0)
    metrics = {"clipped_low": low.sum() * scale, "clipped_high": high.sum() * scale}
    if settings.dual_clip is not None:
        metrics["clipped_dual"] = ((ratio > settings.dual_clip) & (advantages < 0)).sum() * scale
    return metrics | by_staleness(inputs, clipped=low | high)
