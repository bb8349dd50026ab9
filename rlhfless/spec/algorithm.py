"""Settings of the algorithms.

Each algorithm has its own keys; `type` selects it (see rlhfless.spec.extension). Defaults are as published, except that
KL is off, because a reference costs memory and time in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import SpecModel, Steps, Tokens
from rlhfless.spec.extension import PluginField, PluginSpec

Level = Literal["token", "sequence", "geometric"]
"""Level of a probability ratio: per token, the product over a sequence's tokens, or their geometric mean."""

Aggregation = Literal["token", "sequence", "constant"]

"""How token losses are averaged; see PolicyLossSpec.aggregation."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs an algorithm needs besides samples with rewards. They depend only on the settings, because replicas are
    placed before any tensor exists."""

    reference: bool = False
    """Logprobs of the frozen reference policy. If False, no reference function is deployed."""

    old_logprobs: bool = False
    """Whether advantages need old logprobs. The learner computes them before the first update, which adds a forward
    pass to a step with a single update."""

    teachers: bool = False
    """Logprobs of `teachers`, as the columns `teacher_logprobs` and `teacher_weight` of the batch."""

    rewards: bool = True
    """Whether the spec must have rewards or an environment that gives one. If False, they may be left out."""

    values: bool = False
    """Values from a critic."""

    entropy_gradient: bool = False
    """Whether the loss has a gradient through the policy's entropy, which costs more memory and time."""

    samples_per_prompt: int = 1
    """Minimum samples per prompt, for algorithms that compare them with each other."""

    whole_responses: bool = False
    """Exclude truncated responses from the loss; their rewards still count in their group."""

    redraws: int = 0
    """Times a step may replace prompts whose samples all have the same reward. Above 0, such prompts are dropped."""

    signal_only: bool = False
    """Drop prompts whose samples all have the same reward, unless all prompts do."""

    @property
    def with_signal(self) -> bool:
        """Whether to learn only from prompts whose samples have different rewards, if there are any."""
        return self.signal_only or self.redraws > 0


class KLSpec(SpecModel):
    """KL divergence to the frozen reference policy. With `coefficient` 0, no reference is deployed."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term. 0: off."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the KL divergence (http://joschu.net/blog/kl-approx.html)."""

    where: Literal["loss", "reward"] = "loss"
    """`loss`: add the term to each token's loss. `reward`: subtract it from the reward, per token for algorithms with
    per-token rewards (`ppo`, `reinforce_plus_plus`), otherwise per response. In the reward, the term uses the learner's
    policy before the first update of the step, which adds a forward pass to a step with a single update."""

    unbiased: bool = False
    """Multiply the KL term in the loss by the ratio of the current to the old policy (DeepSeek-V3.2, arXiv 2512.02556),
    so that the expected gradient of k1 and k3 equals that of the KL divergence. Only for k1 and k3 with `where: loss`.
    GRPO (arXiv 2402.03300) and verl do not do this; TRL does by default (`use_bias_correction_kl`)."""

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
    """KL divergence to the frozen reference policy for `rloo`, `reinforce_plus_plus` and `ppo`; by default in the
    reward, as in InstructGPT (arXiv 2203.02155). With `coefficient` 0, no reference is deployed."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators of the KL divergence (http://joschu.net/blog/kl-approx.html)."""

    where: Literal["loss", "reward"] = "reward"
    """`reward`: subtract the term from the reward, per token for algorithms with per-token rewards (`ppo`,
    `reinforce_plus_plus`), otherwise per response. `loss`: add it to each token's loss. In the reward, the term uses
    the learner's policy before the first update of the step, which adds a forward pass to a step with a single
    update."""

    target: Annotated[float, Field(gt=0)] | None = None
    """Target KL per token, in nats. The coefficient starts at `coefficient` and adapts to the target from step to step
    (arXiv 1909.08593, section 2.2). Only with `where: reward`. `null`: the coefficient is fixed."""

    horizon: Steps = 10_000
    """Number of samples over which an adaptive coefficient changes by at most 20 %. Only used with `target`."""

    @model_validator(mode="after")
    def _target_is_of_the_reward(self) -> RewardKLSpec:
        if self.target is not None and not self.in_reward:
            raise ValueError("target needs a coefficient above 0 to begin with, and where: reward")
        return self


class DistillTermSpec(SpecModel):
    """On-policy distillation from `teachers` (https://thinkingmachines.ai/blog/on-policy-distillation): adds to the
    advantage of each generated token the sum over its teachers of weight * (teacher's logprob - student's logprob), a
    sample of the negative reverse KL divergence. See docs/distillation.md."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the sum. 0: off."""

    student: Literal["old", "rollout"] = "old"
    """Source of the student's logprobs. `old`: the learner before the first update, which computes them like a teacher,
    so that equal models have exactly the same; adds a forward pass to a step with a single update. `rollout`: the
    engine, at no cost."""

    @property
    def on(self) -> bool:
        return self.coefficient > 0


class DistillAloneSpec(DistillTermSpec):
    """The term of `distill`, whose only advantage it is. See docs/distillation.md."""

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the sum."""


class ImportanceSpec(SpecModel):
    """Importance weights of the learner's policy relative to the engine's, which generated the tokens with different
    kernels or older weights. The defaults are truncated importance sampling per token
    (https://fengyao.notion.site/off-policy-rl). The weight is measured even without this section
    (`importance_weight`)."""

    level: Level = "token"
    """Level of the ratio. `token`: per token. `sequence`: product over the sequence. `geometric`: geometric mean over
    the sequence."""

    low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower bound of the weight."""

    high: Annotated[float, Field(gt=1)] = 2.0
    """Upper bound of the weight."""

    outside: Literal["truncate", "mask"] = "truncate"
    """Handling of weights outside the bounds. `truncate`: set them to the bound. `mask`: set them to 0, so that the
    tokens have no loss, as in IcePop (arXiv 2510.18855), which uses `low` 0.5 and `high` 5."""


class RejectionSpec(SpecModel):
    """Drop tokens or sequences from the loss if the ratio of the learner's to the engine's probability is out of
    bounds. The defaults are the geometric sequence mask of SkyRL's recipe."""

    level: Level = "geometric"
    """Level of the ratio. `token`: per token. `sequence`: product over the sequence. `geometric`: geometric mean over
    the sequence."""

    low: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Smallest ratio that is kept."""

    high: Annotated[float, Field(gt=1)] = 1.01
    """Largest ratio that is kept."""


RouterReplay = Literal["off", "recorded", "engine"]


class PolicyLossSpec(SpecModel):
    """Keys of every built-in algorithm."""

    type: str

    aggregation: Aggregation = "token"
    """How token losses are averaged. `token`: mean over the tokens of the optimizer step (DAPO, arXiv 2503.14476).
    `sequence`: mean over sequences of each sequence's token mean, so that tokens of long responses count less (GRPO,
    arXiv 2402.03300). `constant`: sum over tokens, divided by the number of sequences times `constant_tokens` (Dr.
    GRPO, arXiv 2503.20783)."""

    constant_tokens: Tokens = 3000
    """Denominator per sequence for aggregation `constant`, in tokens; the default is as published. Ignored
    otherwise."""

    importance: ImportanceSpec | None = ImportanceSpec()
    """Off-policy correction by importance weights. `null`: none."""

    rejection: RejectionSpec | None = None
    """Off-policy correction by dropping tokens or sequences. `null`: none."""

    router_replay: RouterReplay = "off"
    """Which experts compute a token in the learner, for mixtures of experts (docs/moe.md). `off`: those that its
    routers choose. `recorded`: in updates, those that they chose before the step's first update, which matters with
    several mini-batches or epochs. `engine`: for generated tokens, those that computed them in the engine (R3, arXiv
    2510.11370), also for old logprobs; a token without a recorded route takes the router's own."""

    mask_truncated: bool = False
    """Exclude responses truncated at `generation.max_tokens` from the loss (overlong filtering of DAPO, arXiv
    2503.14476, section 3.4). Their rewards still count in their group."""

    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's mean entropy per token, which is subtracted from the loss regardless of `aggregation`. The
    learner needs more memory for it. 0: off."""

    kl: KLSpec = KLSpec()

    distill: DistillTermSpec = DistillTermSpec()
    """On-policy distillation from `teachers`, added to the advantage."""

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=self.kl.on,
            old_logprobs=self.kl.in_reward or (self.distill.on and self.distill.student == "old"),
            teachers=self.distill.on,
            entropy_gradient=self.entropy_bonus > 0,
            samples_per_prompt=2,
            whole_responses=self.mask_truncated,
        )


class ComparedSpec(PolicyLossSpec):
    """Keys of algorithms that compare a prompt's samples with each other. Samples with equal rewards have no
    gradient."""

    leave_out_without_signal: bool = False
    """Drop prompts whose samples all have the same reward before learning. They take no learner time and are not
    counted in any average."""

    max_redraws: Annotated[int, Field(ge=0, le=100)] = 0
    """Times a step may replace prompts whose samples all have the same reward (dynamic sampling of DAPO, section 3.2).
    Above 0, such prompts are dropped before learning. The step has fewer than `prompts_per_step` prompts if the
    replacements do not suffice, and may have more after the last one."""

    turn_returns: bool = False
    """With an environment that rewards turns: a turn's return is the episode's without what earlier turns have earned.
    The baseline is that of whole episodes. `false`: all turns have the episode's return."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, redraws=self.max_redraws, signal_only=self.leave_out_without_signal)


class GroupRelativeSpec(ComparedSpec):
    """Keys of algorithms with GRPO advantages."""

    normalize_std: bool = True
    """Divide a group's advantages by their standard deviation. `false`: as in Dr. GRPO (arXiv 2503.20783)."""


class ClippedLossSpec(PolicyLossSpec):
    """Keys of algorithms with PPO's clipped ratio (arXiv 1707.06347)."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - `clip_low`."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above 1 + `clip_high`. A value larger than `clip_low` is DAPO's clip-higher."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Limit the loss of a token with negative advantage A to `dual_clip` times -A, however large the ratio (arXiv
    1912.09729, which uses 3.0). Must be larger than 1 + `clip_high`. `null`: no limit."""

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> ClippedLossSpec:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip ({self.dual_clip:g}) must be larger than 1 + clip_high ({1 + self.clip_high:g})"
            )
        return self


class GRPOSpec(GroupRelativeSpec, ClippedLossSpec):
    """Group relative policy optimization (arXiv 2402.03300), with the token mean and clip of DAPO (arXiv
    2503.14476)."""

    type: Literal["grpo"] = "grpo"

    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + `clip_high` (DAPO's clip-higher)."""


class DAPOSpec(GroupRelativeSpec, ClippedLossSpec):
    """Decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476): GRPO with clip-higher, token mean,
    dynamic sampling and no KL. For its soft overlong punishment, add the reward `length_penalty`."""

    type: Literal["dapo"] = "dapo"

    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + `clip_high` (section 3.1)."""

    max_redraws: Annotated[int, Field(ge=0, le=100)] = 9
    """Times a step may replace prompts whose samples all have the same reward (section 3.2, which has no limit; NeMo-RL
    generates at most 10 times in total). If that does not suffice, the step has fewer prompts."""


class DrGRPOSpec(ComparedSpec, ClippedLossSpec):
    """GRPO without its biases (Dr. GRPO, arXiv 2503.20783). It does not divide by a group's standard deviation, which
    favors prompts that are too easy or too hard, nor by a response's length, which favors long wrong responses."""

    type: Literal["dr_grpo"] = "dr_grpo"

    aggregation: Aggregation = "constant"
    """As in all algorithms; `constant` is the published choice."""


class RLOOSpec(ComparedSpec, ClippedLossSpec):
    """REINFORCE with the mean reward of a prompt's other samples as baseline (arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"

    kl: RewardKLSpec = RewardKLSpec()


class ReinforcePlusPlusSpec(ClippedLossSpec):
    """REINFORCE with PPO's clip, a per-token KL reward, and advantages whitened over the whole step (REINFORCE++, arXiv
    2501.03262). Needs no critic and only one sample per prompt."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount factor per token."""

    group_baseline: bool = False
    """Subtract the mean reward of a prompt's samples first (REINFORCE++-baseline)."""

    kl: RewardKLSpec = RewardKLSpec()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, samples_per_prompt=2 if self.group_baseline else 1)


class GSPOSpec(GroupRelativeSpec, ClippedLossSpec):
    """Group sequence policy optimization (arXiv 2507.18071). It clips the geometric mean of the ratio over the
    response, so that noise in single tokens, such as a different choice of experts, does not trigger the clip."""

    type: Literal["gspo"] = "gspo"

    aggregation: Aggregation = "sequence"
    """As in all algorithms; `sequence` is the published choice."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio is clipped below 1 - `clip_low` (section 5.1). Sequence ratios vary far less than token ratios: at 0.2,
    the clip would hardly ever apply."""

    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The ratio is clipped above 1 + `clip_high` (section 5.1)."""


class CISPOSpec(GroupRelativeSpec):
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585): REINFORCE weighted by a bounded
    ratio without gradient, so that every token contributes."""

    type: Literal["cispo"] = "cispo"

    weight_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Smallest weight. 0, as published, means no lower bound."""

    weight_high: Annotated[float, Field(gt=1)] = 5.0
    """Largest weight. The paper gives none; ScaleRL (arXiv 2510.13786) uses 5."""


class SAPOSpec(GroupRelativeSpec):
    """Soft adaptive policy optimization (arXiv 2511.20347): a sigmoid of the ratio instead of a clip."""

    type: Literal["sapo"] = "sapo"

    aggregation: Aggregation = "sequence"
    """As in all algorithms; `sequence` is the published choice."""

    temperature_positive: Annotated[float, Field(gt=0)] = 1.0
    """Steepness of the sigmoid for tokens with positive advantage (section 5)."""

    temperature_negative: Annotated[float, Field(gt=0)] = 1.05
    """Steepness of the sigmoid for all other tokens. Larger, because lowering one token's probability raises many
    tokens that were not sampled."""


class PPOSpec(ClippedLossSpec):
    """Proximal policy optimization with a critic (arXiv 1707.06347) and generalized advantage estimation (arXiv
    1506.02438)."""

    type: Literal["ppo"] = "ppo"

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount factor per token. The default is 1, because a response is rewarded at its end."""

    lambda_actor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of the policy's advantages. 1: no bias from the critic. Smaller values reduce variance."""

    lambda_critic: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lambda of the returns that the critic learns (arXiv 2503.01491 uses 1, with 0.95 for the policy). `null`:
    `lambda_actor`, or 1 with `length_adaptive`."""

    length_adaptive: Annotated[float, Field(gt=0)] | None = None
    """Use lambda = 1 - 1 / (`length_adaptive` * l) for the advantages of a response of l tokens instead of
    `lambda_actor` (VAPO, arXiv 2504.05118, eq. 9, which uses 0.05). `null`: the same lambda for all lengths."""

    whiten: bool = True
    """Normalize the advantages of the step to mean 0 and variance 1."""

    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Value clipping: the critic's loss does not reward a value for moving further than this from its value before the
    step. `null`: no clipping."""

    kl: RewardKLSpec = RewardKLSpec()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, values=True, samples_per_prompt=1)


class DistillSpec(ClippedLossSpec):
    """On-policy distillation alone: the advantage is the term of `distill`, whatever the rewards, which are optional
    and only measured. The loss is PPO's, which in a step's first update has REINFORCE's gradient."""

    type: Literal["distill"] = "distill"

    distill: DistillAloneSpec = DistillAloneSpec()
    """On-policy distillation from `teachers`, the only advantage."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, rewards=False, samples_per_prompt=1)

    @model_validator(mode="after")
    def _has_no_reward(self) -> DistillSpec:
        if self.kl.in_reward:
            raise ValueError("kl.where is reward, but distill learns from no reward; set kl.where to loss")
        return self


class OwnAlgorithmSpec(PluginSpec):
    """Base class for the settings of your own algorithm; see docs/extending.md."""

    @property
    def needs(self) -> Needs:
        """Only samples with rewards by default. Override it if your algorithm needs more; it may depend on the
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
    | DistillSpec
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
            DistillSpec,
        ),
        methods=("advantages", "loss"),
        settings=OwnAlgorithmSpec,
    ),
]
