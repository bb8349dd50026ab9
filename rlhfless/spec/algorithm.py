"""The settings of each algorithm.

Each algorithm has its own fields and no others; `type` selects it (see rlhfless.spec.extension). Defaults are as
published, but for KL, which is off: a reference costs memory and time in every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.extension import OwnSpec, Seam
from rlhfless.spec.losses import Aggregation, ClippedLossSpec, ComparedSpec, GroupRelativeSpec, Needs, RewardKLSpec


class GRPOSpec(GroupRelativeSpec, ClippedLossSpec):
    """Group relative policy optimisation (arXiv 2402.03300), with the token mean and the clip of DAPO (2503.14476)."""

    type: Literal["grpo"] = "grpo"

    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped from above at 1 + clip_high (DAPO's clip-higher)."""


class DAPOSpec(GroupRelativeSpec, ClippedLossSpec):
    """Decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476): GRPO with clip-higher, token mean,
    dynamic sampling and no KL. Its soft overlong penalty is the reward `length_penalty`."""

    type: Literal["dapo"] = "dapo"

    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped from above at 1 + clip_high (section 3.1)."""

    max_redraws: Annotated[int, Field(ge=0, le=100)] = 9
    """How many times a step draws other prompts in place of those whose samples have all the same reward (section 3.2,
    which has no bound; NeMo-RL draws at most 10 times in all). If that was not enough, the step has fewer."""


class DrGRPOSpec(ComparedSpec, ClippedLossSpec):
    """GRPO without its biases (Dr. GRPO, arXiv 2503.20783): no division by a group's standard deviation, which favours
    prompts that are too easy or too hard, nor by a response's length, which favours long wrong responses."""

    type: Literal["dr_grpo"] = "dr_grpo"

    aggregation: Aggregation = "constant"
    """As in every algorithm; `constant` is the published one."""


class RLOOSpec(ComparedSpec, ClippedLossSpec):
    """REINFORCE with the mean of a prompt's other samples as the baseline (arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"

    kl: RewardKLSpec = RewardKLSpec()


class ReinforcePlusPlusSpec(ClippedLossSpec):
    """REINFORCE with PPO's clip, a KL reward per token and advantages that are whitened over the whole step
    (REINFORCE++, arXiv 2501.03262): no critic, and one sample of a prompt is enough."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""

    group_baseline: bool = False
    """Subtract the mean reward of a prompt's samples first (REINFORCE++-baseline)."""

    kl: RewardKLSpec = RewardKLSpec()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, samples_per_prompt=2 if self.group_baseline else 1)


class GSPOSpec(GroupRelativeSpec, ClippedLossSpec):
    """Group sequence policy optimisation (arXiv 2507.18071): the ratio that is clipped is the geometric mean over the
    response, so that a token's noise, such as another expert of a mixture, does not clip it."""

    type: Literal["gspo"] = "gspo"

    aggregation: Aggregation = "sequence"
    """As in every algorithm; `sequence` is the published one."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio is clipped from below at 1 - clip_low (section 5.1). A ratio of a sequence moves far less than a
    token's: at 0.2 the clip would hardly ever act."""

    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The ratio is clipped from above at 1 + clip_high (section 5.1)."""


class CISPOSpec(GroupRelativeSpec):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585): REINFORCE, weighted by a ratio
    that is bounded and has no gradient, so that no token is left out."""

    type: Literal["cispo"] = "cispo"

    weight_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Smallest weight; 0, as published, is no bound."""

    weight_high: Annotated[float, Field(gt=1)] = 5.0
    """Largest weight; the paper gives none, and ScaleRL (arXiv 2510.13786) takes 5."""


class SAPOSpec(GroupRelativeSpec):
    """Soft adaptive policy optimisation (arXiv 2511.20347): a sigmoid of the ratio in place of the clip."""

    type: Literal["sapo"] = "sapo"

    aggregation: Aggregation = "sequence"
    """As in every algorithm; `sequence` is the published one."""

    temperature_positive: Annotated[float, Field(gt=0)] = 1.0
    """Steepness of the sigmoid for tokens of positive advantage (section 5)."""

    temperature_negative: Annotated[float, Field(gt=0)] = 1.05
    """Steepness for the others: larger, since pushing a token down raises many that were not drawn."""


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
        return replace(super().needs, values=True, samples_per_prompt=1)


class OwnAlgorithmSpec(OwnSpec):
    """Base of the settings of an algorithm of your own; see docs/extending.md."""

    @property
    def needs(self) -> Needs:
        """By default only samples with rewards. Override it if your algorithm needs more; it may depend on the
        settings."""
        return Needs()


AlgorithmSpec = Annotated[
    GRPOSpec
    | DAPOSpec
    | DrGRPOSpec
    | RLOOSpec
    | ReinforcePlusPlusSpec
    | GSPOSpec
    | CISPOSpec
    | SAPOSpec
    | PPOSpec
    | OwnAlgorithmSpec,
    Seam(
        "algorithm",
        built_in=(
            GRPOSpec,
            DAPOSpec,
            DrGRPOSpec,
            RLOOSpec,
            ReinforcePlusPlusSpec,
            GSPOSpec,
            CISPOSpec,
            SAPOSpec,
            PPOSpec,
        ),
        methods=("advantages", "loss"),
        settings=OwnAlgorithmSpec,
    ),
]
