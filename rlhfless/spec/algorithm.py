"""The settings of each algorithm, and what it needs from a run.

Each algorithm has its own fields and no others; `type` selects it (see rlhfless.spec.extension). Needs are declared
here and not in rlhfless.algorithms, because replicas are placed by them before there is any tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.extension import OwnSpec, Seam
from rlhfless.spec.losses import ClippedLossSpec, RewardKLSpec


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


class GRPOSpec(ClippedLossSpec):
    """Group relative policy optimisation (arXiv 2402.03300), with the token mean and the clip of DAPO (2503.14476)."""

    type: Literal["grpo"] = "grpo"

    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation. False: as in Dr. GRPO (arXiv 2503.20783)."""

    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped from above at 1 + clip_high (DAPO's clip-higher)."""

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl.on, old_logprobs=self.kl.in_reward, samples_per_prompt=2)


class PPOSpec(ClippedLossSpec):
    """Proximal policy optimisation with a critic (arXiv 1707.06347), and generalised advantages (1506.02438)."""

    type: Literal["ppo"] = "ppo"

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token. 1, since a response is rewarded at its end."""

    lambda_actor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of the advantages: 1 is without bias by the critic, a smaller one has less variance."""

    lambda_critic: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of the returns that the critic learns (arXiv 2503.01491 takes 1, with 0.95 for the actor); `null` for the
    actor's, or 1 with `length_adaptive`."""

    length_adaptive: Annotated[float, Field(gt=0)] | None = None
    """Lambda of the advantages is 1 - 1 / (length_adaptive * l) for a response of l tokens (VAPO, arXiv 2504.05118,
    eq. 9, which takes 0.05), in place of `lambda_actor`; `null` for the same lambda at all lengths."""

    whiten: bool = True
    """Shift and scale the advantages of the step to mean 0 and variance 1."""

    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """The critic's loss does not reward a value that moves further than this from the one before the step; `null` for
    no such bound."""

    kl: RewardKLSpec = RewardKLSpec()

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl.on, old_logprobs=self.kl.in_reward, values=True)


class OwnAlgorithmSpec(OwnSpec):
    """Base of the settings of an algorithm of your own; see docs/extending.md."""

    @property
    def needs(self) -> Needs:
        """By default only samples with rewards. Override it if your algorithm needs more; it may depend on the
        settings."""
        return Needs()


AlgorithmSpec = Annotated[
    GRPOSpec | PPOSpec | OwnAlgorithmSpec,
    Seam("algorithm", built_in=(GRPOSpec, PPOSpec), methods=("advantages", "loss"), settings=OwnAlgorithmSpec),
]
