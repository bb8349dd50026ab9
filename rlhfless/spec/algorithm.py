"""The settings of each algorithm, and what it needs from a run.

Each algorithm has its own fields and no others; `type` selects it (see rlhfless.spec.extension). Needs are declared
here and not in rlhfless.algorithms, because replicas are placed by them before there is any tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel
from rlhfless.spec.extension import OwnSpec, Seam


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm needs from a run in addition to samples with rewards."""

    reference: bool = False
    """Logprobs of the frozen reference policy. Without it no reference function is deployed."""

    old_logprobs: bool = False
    """Its advantages are computed from the old logprobs. If a step has several updates, the learner evaluates them
    before the first; if it has one, the rollout logprobs are used instead."""

    values: bool = False
    """Values of a critic."""

    samples_per_prompt: int = 1
    """Fewest samples of a prompt, for algorithms that compare them with each other."""


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

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage A costs at most `dual_clip` times -A, however large the ratio (arXiv 1912.09729,
    which takes 3.0); `null` for no such bound."""

    importance_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Cap of the truncated importance weight between the learner's and the engine's logprobs of the same
    token; `null` switches the correction off."""

    kl: KLSpec = KLSpec()

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl.on, old_logprobs=self.kl.in_reward, samples_per_prompt=2)


class OwnAlgorithmSpec(OwnSpec):
    """Base of the settings of an algorithm of your own; see docs/extending.md."""

    @property
    def needs(self) -> Needs:
        """By default only samples with rewards. Override it if your algorithm needs more; it may depend on the
        settings."""
        return Needs()


AlgorithmSpec = Annotated[
    GRPOSpec | OwnAlgorithmSpec,
    Seam("algorithm", built_in=(GRPOSpec,), methods=("advantages", "loss"), settings=OwnAlgorithmSpec),
]
