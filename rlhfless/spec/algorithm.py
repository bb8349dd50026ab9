"""The settings of each algorithm.

Each algorithm has its own fields and no others; `type` selects it (see rlhfless.spec.extension). Defaults are as
published, but for KL, which is off: a reference costs memory and time in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import SpecModel, Steps, Tokens
from rlhfless.spec.extension import PluginField, PluginSpec

Level = Literal["token", "sequence", "geometric"]
"""Level of a probability ratio: one per token, the product over a sequence's tokens, or their geometric mean."""

Aggregation = Literal["token", "sequence", "constant"]

"""Denominator of a loss: the generated tokens of the optimiser step, or its sequences that have any."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs of an algorithm beyond samples with rewards. They follow from the settings, because replicas are placed
    before there is any tensor."""

    reference: bool = False
    """Logprobs of the frozen reference policy. Without it no reference function is deployed."""

    old_logprobs: bool = False
    """Advantages need the old logprobs. The learner evaluates them before the first update, which is one more forward
    pass in a step with a single update."""

    values: bool = False
    """Values of a critic."""

    entropy_gradient: bool = False
    """The loss has a gradient through the policy's entropy, which needs more memory and time."""

    samples_per_prompt: int = 1
    """Fewest samples of a prompt, for algorithms that compare them with each other."""

    whole_responses: bool = False
    """Truncated responses have no loss; their rewards still count in their group."""

    redraws: int = 0
    """Times that a step replaces prompts whose samples all have the same reward. Above 0 these prompts are dropped."""

    signal_only: bool = False
    """Drop prompts whose samples all have the same reward, unless that is all of them."""

    @property
    def with_signal(self) -> bool:
        """Whether to learn only from prompts whose samples differ in their rewards, if there are any."""
        return self.signal_only or self.redraws > 0


class KLSpec(SpecModel):
    """KL divergence to the frozen reference policy. With `coefficient` 0 no reference is deployed at all."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""

    where: Literal["loss", "reward"] = "loss"
    """Add the term to the loss of each token, or subtract it from the reward: of each token where the algorithm has
    rewards per token (`ppo`, `reinforce_plus_plus`), else of the response. In the reward the policy is the learner's
    before the first update of the step; a step with a single update needs one more forward pass for it."""

    unbiased: bool = False
    """Multiply the term in the loss by the ratio of the current to the old policy (DeepSeek-V3.2, arXiv 2512.02556):
    then the gradient of k1 and k3 is on average that of the KL divergence to the reference. GRPO (arXiv 2402.03300) and
    verl do not multiply; TRL does by default (`use_bias_correction_kl`)."""

    @model_validator(mode="after")
    def _unbiased_is_of_the_loss(self) -> KLSpec:
        if self.unbiased and (self.where != "loss" or self.estimator == "k2"):
            what = "k2, whose gradient is that of the divergence already" if self.where == "loss" else "where: reward"
            raise ValueError(f"unbiased is for k1 or k3 in the loss, and not for {what}; leave `unbiased` out")
        return self

    @property
    def on(self) -> bool:
        return self.coefficient > 0

    @property
    def in_reward(self) -> bool:
        return self.on and self.where == "reward"


class RewardKLSpec(KLSpec):
    """KL divergence to the frozen reference policy, for `rloo`, `reinforce_plus_plus` and `ppo` by default
    in the reward, as RLHF began (arXiv 2203.02155). With `coefficient` 0 no reference is deployed at all."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""

    where: Literal["loss", "reward"] = "reward"
    """Subtract the term from the reward, of each token where the algorithm has rewards per token (`ppo`,
    `reinforce_plus_plus`) and else of the response; or add it to the loss of each token. In the reward the policy is
    the learner's before the first update of the step; a step with a single update needs one more forward pass."""

    target: Annotated[float, Field(gt=0)] | None = None
    """KL per token, in nats. The coefficient adapts to it from step to step, starting at `coefficient` (arXiv
    1909.08593, section 2.2); `null`: the coefficient is fixed."""

    horizon: Steps = 10_000
    """Samples over which an adaptive coefficient changes by at most 20 %; only with `target`."""

    @model_validator(mode="after")
    def _target_is_of_the_reward(self) -> RewardKLSpec:
        if self.target is not None and not self.in_reward:
            raise ValueError("target needs a coefficient above 0 to begin with, and where: reward")
        return self


class ImportanceSpec(SpecModel):
    """Importance weight of the learner's policy against the engine's, which generated the tokens with other kernels, or
    with older weights. The defaults are truncated importance sampling per token
    (https://fengyao.notion.site/off-policy-rl). It is measured without this section, too (`importance_weight`)."""

    level: Level = "token"
    """Each token's own ratio, the product of its sequence's, or their geometric mean."""

    low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower bound of the weight."""

    high: Annotated[float, Field(gt=1)] = 2.0
    """Upper bound of the weight."""

    outside: Literal["truncate", "mask"] = "truncate"
    """Set a weight out of bounds to the bound (`truncate`), or to 0 (`mask`), so that its tokens have no loss, as in
    IcePop (arXiv 2510.18855), with `low` 0.5 and `high` 5."""


class RejectionSpec(SpecModel):
    """Drop tokens or sequences from the loss whose ratio of the learner's to the engine's probability is out of bounds.
    The defaults are the geometric sequence mask of SkyRL's recipe."""

    level: Level = "geometric"
    """The ratio of a token, of the product over its sequence, or of their geometric mean."""

    low: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Smallest ratio that is learned from."""

    high: Annotated[float, Field(gt=1)] = 1.01
    """Largest ratio that is learned from."""


class PolicyLossSpec(SpecModel):
    """Keys of every built-in algorithm."""

    type: str

    aggregation: Aggregation = "token"
    """`token`: mean over the tokens of the optimiser step (DAPO, arXiv 2503.14476). `sequence`: mean over sequences of
    their token means (GRPO, arXiv 2402.03300), so that a token of a long response counts less. `constant`: sum over
    tokens, divided by the number of sequences and `constant_tokens` (Dr. GRPO, arXiv 2503.20783)."""

    constant_tokens: Tokens = 3000
    """Denominator per sequence with aggregation `constant`, as published; otherwise ignored."""

    importance: ImportanceSpec | None = ImportanceSpec()
    """Off-policy correction by a weight; `null` for none."""

    rejection: RejectionSpec | None = None
    """Off-policy correction by dropping tokens or sequences; `null` for none."""

    mask_truncated: bool = False
    """Mask the loss of responses truncated at `generation.max_tokens` (overlong filtering of DAPO, arXiv 2503.14476,
    section 3.4). Their rewards still count in their group."""

    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss: the mean over tokens with every `aggregation`.
    The learner needs more memory for it."""

    kl: KLSpec = KLSpec()

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=self.kl.on,
            old_logprobs=self.kl.in_reward,
            entropy_gradient=self.entropy_bonus > 0,
            samples_per_prompt=2,
            whole_responses=self.mask_truncated,
        )


class ComparedSpec(PolicyLossSpec):
    """Keys of the algorithms that compare a prompt's samples with each other. Samples with equal rewards have no
    gradient."""

    leave_out_without_signal: bool = False
    """Drop prompts whose samples all have the same reward before learning: they take no time of the learner and count
    in no denominator."""

    max_redraws: Annotated[int, Field(ge=0, le=100)] = 0
    """Times that a step replaces prompts whose samples all have the same reward (dynamic sampling of DAPO, section
    3.2). Above 0 such prompts are dropped before learning. A step has fewer than `prompts_per_step` prompts if that was
    not enough, and may have more after the last replacement."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, redraws=self.max_redraws, signal_only=self.leave_out_without_signal)


class GroupRelativeSpec(ComparedSpec):
    """Keys of the algorithms with GRPO's advantages."""

    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation. False: as in Dr. GRPO (arXiv 2503.20783)."""


class ClippedLossSpec(PolicyLossSpec):
    """Keys of the algorithms with PPO's clip (arXiv 1707.06347)."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped from below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped from above at 1 + clip_high; larger than `clip_low` it is DAPO's clip-higher."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage A costs at most `dual_clip` times -A, however large the ratio (arXiv 1912.09729,
    which takes 3.0); `null` for no such bound."""

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> ClippedLossSpec:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip ({self.dual_clip:g}) must be larger than 1 + clip_high ({1 + self.clip_high:g})"
            )
        return self


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
    """Times that a step replaces prompts whose samples all have the same reward (section 3.2, which has no bound;
    NeMo-RL generates at most 10 times in all). If that was not enough, the step has fewer prompts."""


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
    """Steepness for the others: larger, since pushing a token down raises many that were not sampled."""


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


class OwnAlgorithmSpec(PluginSpec):
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
    PluginField(
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
