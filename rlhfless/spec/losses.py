"""The settings that the losses of the built-in algorithms share: clip, KL, aggregation, off-policy correction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import SpecModel, Steps, Tokens

Level = Literal["token", "sequence", "geometric"]
"""What a probability ratio is of: a token, a sequence (the product over its tokens), or a sequence's tokens on average
(the geometric mean)."""

Aggregation = Literal["token", "sequence", "constant"]

"""What a loss is divided by: the tokens of the optimiser step that the model drew, or the sequences with any."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm needs from a run in addition to samples with rewards. It is known from the settings, because
    replicas are placed by it before there is any tensor."""

    reference: bool = False
    """Logprobs of the frozen reference policy. Without it no reference function is deployed."""

    old_logprobs: bool = False
    """Its advantages are computed from the old logprobs, which the learner evaluates before the first update: a forward
    pass over the batch that a step of one update has for nothing else."""

    values: bool = False
    """Values of a critic."""

    entropy_gradient: bool = False
    """Its loss has a gradient through the entropy of the policy, which takes the learner more memory and time."""

    samples_per_prompt: int = 1
    """Fewest samples of a prompt, for algorithms that compare them with each other."""

    whole_responses: bool = False
    """Nothing is learned from responses that were cut off at the longest length; their rewards still count in their
    group."""

    redraws: int = 0
    """How many times a step draws other prompts in place of those whose samples have all the same reward. With any,
    the latter are not learned from."""

    signal_only: bool = False
    """Prompts whose samples have all the same reward are left out before learning, unless all of them are."""

    @property
    def with_signal(self) -> bool:
        """Whether only prompts whose samples differ in their rewards are learned from, if there are any."""
        return self.signal_only or self.redraws > 0


class KLSpec(SpecModel):
    """KL divergence to the frozen reference policy. With `coefficient` 0 no reference is deployed at all."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""

    where: Literal["loss", "reward"] = "loss"
    """Add the term to the loss of each token, or subtract it from the reward: of each token where the algorithm has
    rewards per token (`ppo`, `reinforce_plus_plus`), else of the response. In the reward it is of the learner's policy
    before the first update of the step, which takes a step of one update a forward pass more."""

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
    `reinforce_plus_plus`) and else of the response; or add it to the loss of each token. In the reward it is of the
    learner's policy before the first update of the step, which takes a step of one update a forward pass more."""

    target: Annotated[float, Field(gt=0)] | None = None
    """KL per token, in nats, that the coefficient follows from step to step (arXiv 1909.08593, section 2.2), beginning
    with `coefficient`; `null` for a fixed one."""

    horizon: Steps = 10_000
    """Samples over which an adaptive coefficient changes by at most 20 %; only with `target`."""

    @model_validator(mode="after")
    def _target_is_of_the_reward(self) -> RewardKLSpec:
        if self.target is not None and not self.in_reward:
            raise ValueError("target needs a coefficient above 0 to begin with, and where: reward")
        return self


class ImportanceSpec(SpecModel):
    """Importance weight of the learner's policy against the engine's, which drew the tokens: the same weights, computed
    by different kernels, or older ones. The defaults are truncated importance sampling per token
    (https://fengyao.notion.site/off-policy-rl). It is measured without this section, too (`importance_weight`)."""

    level: Level = "token"
    """Each token's own ratio, the product of its sequence's, or their geometric mean."""

    low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower bound of the weight."""

    high: Annotated[float, Field(gt=1)] = 2.0
    """Upper bound of the weight."""

    outside: Literal["truncate", "mask"] = "truncate"
    """A weight out of bounds is set to the bound; or to 0, so that nothing is learned from its tokens, as in IcePop
    (arXiv 2510.18855), with `low` 0.5 and `high` 5."""


class RejectionSpec(SpecModel):
    """Nothing is learned from tokens or sequences whose ratio of the learner's to the engine's probability is out of
    bounds. The defaults are the geometric sequence mask of SkyRL's recipe."""

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
    """The constant of the aggregation `constant`, as published; no other aggregation reads it."""

    importance: ImportanceSpec | None = ImportanceSpec()
    """Off-policy correction by a weight; `null` for none."""

    rejection: RejectionSpec | None = None
    """Off-policy correction by leaving tokens or sequences out; `null` for none."""

    mask_truncated: bool = False
    """Learn nothing from responses that were cut off at `generation.max_tokens` (overlong filtering of DAPO, arXiv
    2503.14476, section 3.4): what they would have come to is not known. Their rewards still count in their group."""

    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's mean entropy over tokens, whatever `aggregation`, which is subtracted from the loss. It
    takes the learner more memory."""

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
    """Keys of the algorithms that compare a prompt's samples with each other: where all have the same reward, nothing
    can be learned."""

    leave_out_without_signal: bool = False
    """Prompts whose samples have all the same reward are left out before learning: they take no time of the learner,
    and count in no denominator, where otherwise they only have no gradient."""

    max_redraws: Annotated[int, Field(ge=0, le=100)] = 0
    """How many times a step draws other prompts in place of those whose samples have all the same reward (dynamic
    sampling of DAPO, section 3.2). With any, those are left out before learning, too: the step learns from the others
    alone, of which there are fewer than `prompts_per_step` if all redraws were not enough, and more if the last gave
    more than was lacking."""

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
