"""Learner settings: optimizer, precision, batching and ranks."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import MOST_STEPS, Duration, Location, Processes, Ranks, SpecModel, Tokens, count_of

Epochs = Annotated[int, Field(ge=1, le=100)]
"""Passes over the batch of a training step."""


def evaluated_share(mini_batches: int, epochs: int, old_logprobs: bool) -> float:
    """Return the share of a batch whose old logprobs need a forward pass before the first update. In a single pass, the
    first mini-batch is still on-policy and needs none. With `old_logprobs`, the advantages need old logprobs for the
    whole batch."""
    return 1.0 if epochs > 1 or old_logprobs else 1 - 1 / mini_batches


class AdamWSpec(SpecModel):
    """The AdamW optimizer (arXiv 1711.05101)."""

    learning_rate: Annotated[float, Field(ge=0, le=1)] = 1e-6
    """Learning rate: AdamW changes each weight by about this much per optimizer step."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Small constant added to the denominator for numerical stability."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay for matrices and embeddings. Norms and biases are not decayed (as in nanoGPT, Megatron-LM and the
    Hugging Face Trainer)."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. `null`: no clipping."""
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Optimizer steps over which the learning rate rises linearly."""
    rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up, until the last planned optimizer step of the run. `constant`: unchanged. `linear`:
    falls linearly to `rate_floor`. `cosine`: falls to `rate_floor` along half a cosine."""
    rate_floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate for `linear` and `cosine`, as a fraction of `learning_rate`."""


NODE_RANKS = 8
"""Most ranks that `expert_parallel: auto` divides experts over: the GPUs of a node. Tokens cross its links twice in
each layer."""

PASS_TOKENS = 8192
"""Tokens per forward pass until the memory plan decides."""


class TrainingSpec(SpecModel):
    """How a trained model is sharded across ranks and computed."""

    ranks: Ranks = "auto"
    """Ranks (processes) that share the model's states and the batch. `auto`: on GPUs, as decided by the memory plan; on
    CPU cores, 1."""

    shard_ranks: Ranks = "auto"
    """Neighboring ranks that each full copy of the model states is sharded across. Copies exchange only gradients
    (HSDP). Must divide `ranks`. `auto`: the ranks of one node, if ranks span several GPU nodes and one node can hold
    the states; otherwise all ranks."""

    expert_parallel: Ranks = "auto"
    """Neighboring ranks that divide the routed experts of each layer; tokens are sent to the ranks of their experts.
    Must divide the ranks of a copy (`shard_ranks`) and the number of experts. `1`: every rank gathers all experts of a
    layer. `auto`: for models whose experts transformers can divide, as many ranks as possible, up to 8, so that they
    are in one node; otherwise 1."""

    micro_batch_tokens: Tokens | Literal["auto"] = "auto"
    """Maximum tokens per forward pass, including padding. A longer sequence gets its own pass. `auto`: 8,192; on GPUs
    up to 65,536, if the memory plan has room."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the forward and backward pass. The optimizer always keeps a float32 copy of the weights."""

    offload: bool = False
    """Keep master weights, gradients and optimizer states in host memory and run the optimizer on the CPU. Saves 16
    bytes of GPU memory per parameter, but slows down each step. If omitted, the memory plan enables it only when
    nothing else fits."""

    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory for a third more computation. `auto`: off; on GPUs, on if
    the memory plan has no room for activations."""

    share_prefixes: bool = True
    """Compute prompt tokens shared by several samples once per micro-batch instead of once per sample, where that saves
    time (long prompts, many samples per prompt). Results are equal up to rounding."""

    threads: Processes | None = None
    """CPU threads per rank. `null`: one per core assigned to the rank; on GPUs, all cores divided among the ranks. The
    number is fixed for the run, because it affects the order of sums and thus the last bits of the weights."""

    @property
    def average_decay(self) -> float | None:
        """Decay of the weights' moving average; None without one."""
        return None

    @property
    def pass_tokens(self) -> int:
        """`micro_batch_tokens` as a number; PASS_TOKENS until `auto` is decided."""
        return PASS_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def recomputes(self) -> bool:
        """`gradient_checkpointing` as a boolean; False until `auto` is decided."""
        return self.gradient_checkpointing is True

    @property
    def world_size(self) -> int:
        """`ranks` as a number; 1 until `auto` is decided."""
        return count_of(self.ranks)

    def split_over(self, ranks: int) -> int:
        """Return `shard_ranks` as a number that divides `ranks`."""
        return ranks if self.shard_ranks == "auto" else math.gcd(ranks, self.shard_ranks)

    def experts_over(self, ranks: int, experts: int = 0) -> int:
        """Return `expert_parallel` as a number that divides the ranks of a copy.

        `auto`: the largest such number up to NODE_RANKS that divides `experts` (0: they cannot be divided).
        """
        split = self.split_over(ranks)
        if self.expert_parallel != "auto":
            return math.gcd(split, self.expert_parallel)
        common = math.gcd(split, experts) if experts else 1
        return max(count for count in range(1, min(common, NODE_RANKS) + 1) if common % count == 0)

    @property
    def copies(self) -> int:
        """Number of full copies of the model states."""
        return self.world_size // self.split_over(self.world_size)

    @model_validator(mode="after")
    def _whole_sets(self) -> TrainingSpec:
        if self.ranks != "auto" and self.shard_ranks != "auto" and self.ranks % self.shard_ranks:
            nearest = max(count for count in range(1, self.shard_ranks) if self.ranks % count == 0)
            raise ValueError(
                f"shard_ranks is {self.shard_ranks}, and {self.ranks} ranks are no whole number of such sets: "
                f"set it to {nearest}, or leave it out"
            )
        if (
            self.ranks != "auto"
            and self.expert_parallel != "auto"
            and (self.experts_over(self.ranks) != self.expert_parallel)
        ):
            raise ValueError(
                f"expert_parallel is {self.expert_parallel}, and the {self.split_over(self.ranks)} ranks of a copy are "
                f"no whole number of such sets: set it to {self.experts_over(self.ranks)}, or leave it out"
            )
        return self


class LearnerSpec(TrainingSpec):
    """The learner function. The reference uses the same compute settings."""

    logits_mib: Annotated[int, Field(ge=1, le=2**17)] | Literal["auto"] = "auto"
    """Largest block of logits that the learner and reference compute at once, in MiB of float32. A backward pass holds
    five blocks. Larger blocks access the gradient of the output head less often. `auto`: 128; on GPUs up to 2048, if
    the memory plan has room for blocks twice that size."""

    head_dtype: Literal["float32"] | None = None
    """`float32`: compute embeddings, the last norm and the output head in float32 even if the layers use a lower
    precision, so that logits are not rounded before logprobs are taken. `null`: use `dtype`."""

    compile: bool = False
    """Compile each decoder layer with `torch.compile`, which fuses norms, rotary embeddings and activation functions.
    The first step takes a few minutes longer. Results are equal up to rounding. `rlhfless selftest` times a step with
    and without it on GPUs."""

    freeze_router: bool = False
    """Do not train the routers of a mixture of experts: their weights stay those of the model."""

    router_dtype: Literal["float32"] | None = None
    """`float32`: compute the routers of a mixture of experts in float32 even if the layers use a lower precision.
    `null`: use `dtype`."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights with this decay per optimizer step, such as 0.99. Evaluations,
    the best checkpoint and checkpointed models then use the average; training and generation do not. The average starts
    at the initial weights and takes 4 bytes per parameter. `null`: no average."""

    @property
    def average_decay(self) -> float | None:
        """See TrainingSpec."""
        return self.ema_decay

    @property
    def logits_elements(self) -> int | None:
        """Elements of the largest block of logits; None until `auto` is decided."""
        return None if self.logits_mib == "auto" else self.logits_mib * 2**18


FROM_POLICY, FROM_REWARD_MODEL = "policy", "reward_model"
"""Values of `critic.model` that are not paths."""


class CriticAdamWSpec(AdamWSpec):
    """The critic's AdamW optimizer."""

    learning_rate: Annotated[float, Field(ge=0, le=1)] = 1e-5
    """Learning rate: AdamW changes each weight by about this much per optimizer step. The default is ten times the
    policy's, as in the PPO examples of verl and OpenRLHF, because returns change faster than a clipped policy."""


class CriticSpec(TrainingSpec):
    """The critic function: predicts a value for each response token and is trained along with the policy. Only for
    algorithms that need values, which require it."""

    model: Annotated[str, Location("hub", words=frozenset({FROM_POLICY, FROM_REWARD_MODEL})), Field(min_length=1)] = (
        FROM_POLICY
    )
    """Initial model. `policy`: the policy's model with a new, zero-initialized value head instead of the output head.
    `reward_model`: the run's reward model with its head; the run must have exactly one. Otherwise, a folder or hub name
    of a model with a one-label head, such as a critic checkpoint."""

    optimizer: CriticAdamWSpec = CriticAdamWSpec()

    epochs: Epochs | None = None
    """Passes over the batch of a training step. `null`: the same as the policy (`epochs`)."""

    warm_up_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Training steps at the start of the run in which only the critic is trained; the policy is neither updated nor
    published (Value-Calibrated PPO, arXiv 2503.01491, pretrains values for 50 steps). Must be below `steps`."""

    @property
    def new_head(self) -> bool:
        """Whether the head is new instead of loaded."""
        return self.model == FROM_POLICY


class ReferenceSpec(SpecModel):
    """The reference function, needed by algorithms with KL. It uses the learner's compute settings (`learner.dtype`,
    `learner.micro_batch_tokens`, `learner.share_prefixes`)."""

    ranks: Ranks = "auto"
    """Ranks (processes) that share the frozen policy and the batch, on the learner's devices. `auto`: on GPUs, one per
    device, up to one node and within the memory plan; on CPU cores, 1."""


class RewardPart(SpecModel):
    """Keys of all rewards."""

    name: str | None = None
    """Name in logs and traces. Names must be unique. `null`: the type."""

    weight: float = 1.0
    """Weight of this reward in the sum used by the algorithm."""

    sets: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)] | None = None
    """Names of the sets in `prompts.mixture` or `evaluation.sets` that this reward scores. `null`: all prompts."""

    def scores(self, source: str) -> bool:
        """Return whether this reward scores the prompts of a set."""
        return self.sets is None or source in self.sets

    @property
    def label(self) -> str:
        return self.name or str(getattr(self, "type", "reward"))


OnFailure = Literal["drop", "zero", "fail"]


class ScoringSpec(SpecModel):
    """Worker processes for rewards that run code, and how failed rewards are handled."""

    workers: Processes = 2
    """Worker processes for rewards of type `python`, `math`, `code` and `json_schema`; none are started without such a
    reward. With two, one slow sample does not block all others. Use more for slow rewards, up to one per core."""

    reward_model_ranks: Ranks = "auto"
    """Ranks (processes) that share each reward model and the samples, on the learner's devices. `auto`: on GPUs, one
    per device, up to one node and within the memory plan; on CPU cores, 1."""

    on_failure: OnFailure = "drop"
    """Action when a reward fails on a sample. `drop`: exclude the sample from its group's statistics and from the loss.
    `zero`: count this reward as 0. `fail`: stop the run. The default is `drop` because a failed reward is no evidence
    of a bad response, as a zero would be."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest fraction of a step's samples that may fail; above it, the run stops. If half of them fail, the cause is
    more likely the reward than the responses."""

    http_hosts: Annotated[tuple[str, ...], Field(max_length=1024)] | None = None
    """Loopback, link-local and metadata addresses that HTTP rewards may reach, as `host:port`. All other such addresses
    are refused, including by redirect or DNS. A service sets this for its users' runs. `null`: no restriction."""

    timeout_s: Duration = 300.0
    """Timeout in seconds for scoring one batch of finished groups. Samples not scored by then count as failed. Must be
    below `timeouts.call_s`, so that a hanging reward costs samples instead of stopping the run."""


class DPOSpec(SpecModel):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is held close to the reference. The implicit reward of a response is `beta` times the log
    ratio of policy to reference probability."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (conservative DPO, https://ericmitchell.ai/cdpo.pdf)."""
