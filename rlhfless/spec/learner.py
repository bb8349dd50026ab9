"""The learner: optimiser, precision, batching, ranks."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import MOST_STEPS, Duration, Location, Processes, Ranks, SpecModel, Tokens, count_of

Epochs = Annotated[int, Field(ge=1, le=100)]
"""Passes over the batch of a training step."""


def evaluated_share(mini_batches: int, epochs: int, old_logprobs: bool) -> float:
    """The share of a batch whose old logprobs need a pass before the first update: in a single pass, what is learned
    first is still of the policy that the step began with. With `old_logprobs` advantages need those of all of it."""
    return 1.0 if epochs > 1 or old_logprobs else 1 - 1 / mini_batches


class AdamWSpec(SpecModel):
    """AdamW (arXiv 1711.05101)."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """AdamW moves each weight by about this much in a step."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Of matrices and embeddings; norms and biases have none (the convention of nanoGPT, Megatron-LM and the Hugging
    Face Trainer)."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm; `null` for no clipping."""
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """The learning rate grows linearly over this many optimiser steps."""
    rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The course of the learning rate from there to the run's last planned optimiser step: `linear` falls in a line to
    `rate_floor`, `cosine` by half a cosine."""
    rate_floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What `linear` and `cosine` fall to, as a share of `learning_rate`."""


PASS_TOKENS = 8192
"""Tokens of a forward pass before the memory plan has decided."""


class TrainingSpec(SpecModel):
    """How a model that is trained is split over ranks, and how they compute it."""

    ranks: Ranks = "auto"
    """Ranks that share the model's states and the batch, each a process of its own. `auto`: on GPUs as many as the
    memory plan asks for, on CPU cores 1."""

    shard_ranks: Ranks = "auto"
    """Neighbouring ranks that the states are split over; each set of so many ranks holds a copy of the model, and sets
    exchange gradients only (HSDP). `auto`: where ranks are on several GPU nodes and those of one node can hold the
    states, the ranks of a node; else all ranks."""

    micro_batch_tokens: Tokens | Literal["auto"] = "auto"
    """Most tokens, padding included, in one forward pass. A longer sequence gets a pass of its own. `auto`: 8,192, and
    on GPUs up to 65,536 where the memory plan has room."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the forward and backward pass. The optimiser's copy is always float32."""

    offload: bool = False
    """Keep master weights, gradients and optimizer states in host memory, and run the optimizer on the CPU: 16 bytes
    per parameter less on the GPU, and a slower step. If you leave it out, the memory plan sets it where nothing else
    fits."""

    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, a third more operations. `auto`: off, and on GPUs on
    where the memory plan has no room to keep activations."""

    share_prefixes: bool = True
    """Prompt tokens that samples share are computed once per micro-batch, and not once per sample, where that saves
    time: long prompts, many samples per prompt. The results are the same up to rounding."""

    threads: Processes | None = None
    """CPU threads per rank; by default one for each core that is a device of the rank, or with GPUs all cores, divided
    among the ranks. Fixed, because the order of sums, and with it the last bits of the weights, depends on it."""

    @property
    def average_decay(self) -> float | None:
        """Of the moving average of its weights; None without one."""
        return None

    @property
    def pass_tokens(self) -> int:
        """`micro_batch_tokens` as a number: PASS_TOKENS where `auto` is still to be decided."""
        return PASS_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def recomputes(self) -> bool:
        """`gradient_checkpointing` as a truth value: False where `auto` is still to be decided."""
        return self.gradient_checkpointing is True

    @property
    def world_size(self) -> int:
        """`ranks` as a number: 1 where `auto` is still to be decided."""
        return count_of(self.ranks)

    def split_over(self, ranks: int) -> int:
        """`shard_ranks` as a number, which divides `ranks`."""
        return ranks if self.shard_ranks == "auto" else math.gcd(ranks, self.shard_ranks)

    @property
    def copies(self) -> int:
        """Sets of `shard_ranks`, each with all of the states."""
        return self.world_size // self.split_over(self.world_size)

    @model_validator(mode="after")
    def _whole_sets(self) -> TrainingSpec:
        if self.ranks != "auto" and self.shard_ranks != "auto" and self.ranks % self.shard_ranks:
            nearest = max(count for count in range(1, self.shard_ranks) if self.ranks % count == 0)
            raise ValueError(
                f"shard_ranks is {self.shard_ranks}, and {self.ranks} ranks are no whole number of such sets: "
                f"set it to {nearest}, or leave it out"
            )
        return self


class LearnerSpec(TrainingSpec):
    """The learner function. The reference computes as the learner does."""

    min_ranks: Processes | None = None
    """Fewest ranks that the learner may run with: after a fault it continues with the most ranks whose devices are
    there, and after a later step it grows to `ranks` again when devices are free. By default it waits for the devices
    of all ranks. The loss is the same with any number of ranks, up to the order of sums."""

    logits_mib: Annotated[int, Field(ge=1, le=2**17)] | Literal["auto"] = "auto"
    """Largest block of logits that learner and reference compute at once, in MiB of float32; a backward pass holds
    five. Larger blocks read and write the head's gradient less often. `auto`: 128, and on GPUs up to 2048, as far as
    the memory plan has room for twice as large ones."""

    head_dtype: Literal["float32"] | None = None
    """`float32`: embeddings, last norm and output head compute in float32 where the layers do not, so that logprobs
    carry no rounding of the logits; by default they compute in `dtype`."""

    compile: bool = False
    """Compile each decoder layer with `torch.compile`: fused norms, rotary embeddings and activation functions. The
    first step takes some minutes longer, and results are the same up to rounding. `rlhfless selftest` times a step with
    and without it on GPUs."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights, with this decay per optimiser step, such as 0.99: evaluations,
    the best checkpoint and the model that checkpoints have are the average's; what is learned and drawn is as without.
    It begins with the initial weights, and takes 4 bytes per parameter."""

    @property
    def average_decay(self) -> float | None:
        """See TrainingSpec."""
        return self.ema_decay

    @property
    def fewest_ranks(self) -> int:
        """`min_ranks` as a number: `ranks` where it is left out."""
        return self.min_ranks or self.world_size

    @model_validator(mode="after")
    def _ordered(self) -> LearnerSpec:
        if self.min_ranks is not None and self.ranks != "auto" and self.min_ranks > self.ranks:
            raise ValueError(
                f"min_ranks is {self.min_ranks}, above ranks, which is {self.ranks}: set it to {self.ranks} or less"
            )
        return self

    @property
    def logits_elements(self) -> int | None:
        """Elements of the largest block of logits; None where `auto` is still to be decided."""
        return None if self.logits_mib == "auto" else self.logits_mib * 2**18


FROM_POLICY, FROM_REWARD_MODEL = "policy", "reward_model"
"""Values of `critic.model` that name no files."""


class CriticAdamWSpec(AdamWSpec):
    """AdamW of the critic."""

    learning_rate: Annotated[float, Field(ge=0, le=1)] = 1e-5
    """AdamW moves each weight by about this much in a step. Ten times the policy's, as in verl's and OpenRLHF's
    examples of PPO: returns move faster than a clipped policy."""


class CriticSpec(TrainingSpec):
    """The critic function: a value for each response token, learned beside the policy. Algorithms that need values have
    one, and only these."""

    model: Annotated[str, Location("hub", words=frozenset({FROM_POLICY, FROM_REWARD_MODEL})), Field(min_length=1)] = (
        FROM_POLICY
    )
    """What it starts from. `policy`: the policy's own model, with a new head of zeros in the place of its output head.
    `reward_model`: the run's reward model, with its head; the run has exactly one. Or a folder, or a name on the hub,
    of a model with a head of one label, such as a critic's checkpoint."""

    optimizer: CriticAdamWSpec = CriticAdamWSpec()

    epochs: Epochs | None = None
    """Passes over the batch of a training step; by default as many as the policy's (`epochs`)."""

    warm_up_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Training steps at the begin of the run in which the critic alone learns: the policy is neither updated nor
    published (Value-Calibrated PPO, arXiv 2503.01491, pretrains values for 50 steps)."""

    @property
    def new_head(self) -> bool:
        """Whether its head is not one of the files."""
        return self.model == FROM_POLICY


class ReferenceSpec(SpecModel):
    """The reference function, which an algorithm with KL needs; it computes as the learner does (`learner.dtype`,
    `learner.micro_batch_tokens`, `learner.share_prefixes`)."""

    ranks: Ranks = "auto"
    """Ranks that share the frozen policy and the batch, on devices of the learner's side, each a process of its own.
    `auto`: on GPUs one on each device of the side, up to those of a node, as far as the memory plan allows; on CPU
    cores 1."""


class RewardPart(SpecModel):
    """The fields that all rewards have."""

    name: str | None = None
    """Name in logs and traces; by default the type. Names must differ."""

    weight: float = 1.0
    """Factor in the weighted sum that the algorithm sees."""

    sets: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)] | None = None
    """Only for prompts of these sets of `prompts.mixture` or `evaluation.sets`; by default for all."""

    def scores(self, source: str) -> bool:
        """Whether it is for prompts of a set."""
        return self.sets is None or source in self.sets

    @property
    def label(self) -> str:
        return self.name or str(getattr(self, "type", "reward"))


OnFailure = Literal["drop", "zero", "fail"]


class ScoringSpec(SpecModel):
    """The worker processes of rewards that run code, and what a failing reward means."""

    workers: Processes = 2
    """Worker processes for rewards of type python, math, code and json_schema; none are started without such a
    reward. Two, so that one slow sample does not hold up all others; more for slow rewards, up to a core each."""

    reward_model_ranks: Ranks = "auto"
    """Ranks that share each reward model and the samples, on devices of the learner's side, each a process of its own.
    `auto`: on GPUs one on each device of the side, up to those of a node, as far as the memory plan allows; on CPU
    cores 1."""

    on_failure: OnFailure = "drop"
    """When a reward fails on a sample. `drop`: the sample is left out of its group's statistics and of the loss.
    `zero`: the part counts 0. `fail`: the run stops. The default is `drop`, because a zero would mean that the
    response was bad, and a failed reward does not show that."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops when more than this share of a step's samples has failed. If half of them fail, the cause is more
    likely the reward than the responses."""

    http_hosts: Annotated[tuple[str, ...], Field(max_length=1024)] | None = None
    """If given, HTTP rewards reach no loopback, link-local or metadata address but these, as `host:port`; redirects and
    names that resolve to such addresses are refused as well. A service sets this for the runs of its users."""

    timeout_s: Duration = 300.0
    """Longest time for one batch of finished groups; samples that are not scored by then have failed. Half of
    `timeouts.call_s`, so that a reward that hangs on every sample costs samples and not the run."""
