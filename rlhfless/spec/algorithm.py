"""The algorithm. A union on `type`, so that each algorithm has its own fields and no others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel


class KLSpec(SpecModel):
    """KL divergence to the frozen reference policy. With `coefficient` 0 no reference is deployed at all."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""

    where: Literal["loss", "reward"] = "loss"
    """Add the term to the loss of each token, or subtract it from the reward of the response."""

    @property
    def on(self) -> bool:
        return self.coefficient > 0

    @property
    def in_reward(self) -> bool:
        return self.on and self.where == "reward"


class GRPOSpec(SpecModel):
    """Group relative policy optimisation (arXiv 2402.03300), token-mean over the step as in DAPO."""

    type: Literal["grpo"] = "grpo"

    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation. False: as in Dr. GRPO (arXiv 2503.20783)."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped from above at 1 + clip_high (DAPO's clip-higher)."""

    importance_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Cap of the truncated importance weight between the learner's and the engine's logprobs of the same
    token; `null` switches the correction off."""

    kl: KLSpec = KLSpec()


AlgorithmSpec = GRPOSpec
"""A discriminated union on `type` as soon as there is a second algorithm."""
