"""The workload of a scenario: synthetic lengths, a recorded run, or the requests of a public trace."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.sim.scenarios.cluster import Count, Positive
from rlhfless.spec.base import Processes, SpecModel

Share = Annotated[float, Field(ge=0, le=1)]
Source = Annotated[str, Field(min_length=1)]


class LognormalSpec(SpecModel):
    """Response lengths of one kind of answer."""

    median_tokens: Positive
    """Half of the responses are longer."""

    spread: Annotated[float, Field(ge=0)]
    """Standard deviation of the log of the length; 0.5 puts two thirds between 0.6 and 1.6 times the median."""

    persistence: Share
    """Correlation of a response's log length with its prompt's own level, which stays the same over all epochs."""


class _SyntheticSpec(SpecModel):
    """The keys of all synthetic workloads."""

    prompts: Count
    """Prompts of the data set: an epoch visits each once."""

    median_prompt_tokens: Positive
    """Prompt lengths are lognormal with this median and a spread of 0.5."""

    drift_per_step: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    """Added to the log of the lengths at each step: 0.01 is one per cent longer per step."""

    source: Source
    """The source of the lengths; an assumption should say that it is one."""


class LognormalWorkload(_SyntheticSpec):
    """One kind of answer."""

    type: Literal["lognormal"] = "lognormal"

    lengths: LognormalSpec
    """Lengths of the responses."""


class BimodalWorkload(_SyntheticSpec):
    """Short answers and long reasoning."""

    type: Literal["bimodal"] = "bimodal"

    short: LognormalSpec
    """Lengths of the short responses."""

    long: LognormalSpec
    """Lengths of the long responses."""

    long_share: Annotated[float, Field(gt=0, lt=1)]
    """Share of long responses; harder prompts have more of them."""


class RecordedWorkload(SpecModel):
    """The responses of a recorded run."""

    type: Literal["recorded"] = "recorded"

    path: str
    """Folder of the run, or its trace."""


class AzureWorkload(SpecModel):
    """Requests of the Azure LLM inference trace 2023 (CSV), as prompts in the order of the file."""

    type: Literal["azure"] = "azure"

    path: str
    """The CSV file."""


class MooncakeWorkload(SpecModel):
    """Requests of a Mooncake trace (JSON lines), as prompts in the order of the file."""

    type: Literal["mooncake"] = "mooncake"

    path: str
    """The file."""


WorkloadSpec = Annotated[
    LognormalWorkload | BimodalWorkload | RecordedWorkload | AzureWorkload | MooncakeWorkload,
    Field(discriminator="type"),
]


class PrefixLevel(SpecModel):
    """One level of shared prefix: a system prompt, examples, a document."""

    tokens: Count
    """Tokens of the level, after the level before it."""

    kinds: Count = 1
    """Number of different prefixes of this level. Prompt i has the prefix i modulo `kinds`, behind each prefix of the
    level before."""


PrefixSharing = Literal["engine", "plan", "plan_and_learner"]


class PrefixesSpec(SpecModel):
    """The shared prefixes of prompts, which come before their own tokens (`median_prompt_tokens`)."""

    levels: tuple[PrefixLevel, ...]
    """From the first token on: such as a system prompt, then one of several blocks of examples. Without any, only the
    samples of a prompt share tokens."""

    sharing: PrefixSharing = "plan_and_learner"
    """`engine`: each engine's own cache alone. `plan`: prompts behind the same prefix go to the same actor, which
    computes it once, before its samples, or gets its KV from another actor. `plan_and_learner`: reference and learner
    compute it once per micro-batch, too."""


class LearnerTimingSpec(SpecModel):
    """The time of learning: 6 floating-point operations per parameter and token at the model's utilisation."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.24
    """Model FLOP utilisation: these 6 operations by the devices' peak; activations that are computed again count as
    lost time, so a forward pass alone runs at 8/6 of it. Dense models, by framework: verl 0.17 to 0.19 (GRPO of a 7B
    model on MI300: 0.185), 0.288 for LoRA of a 72B model; NeMo-RL 0.22 to 0.31. Set it to your framework's: the default
    is none of these, but lies between them."""

    expert_flops_per_s: Positive = 85e12
    """Operations per second of a device with a model with experts, by its active parameters, at most what `mfu` gives.
    H100 and GB200 reach the same rate, not the same share of their peaks: small products and all-to-all bind. A fit to
    10 published GRPO steps of 30B-A3B, 235B-A22B and DeepSeek-V3 on H100 (`benchmarks/anchors.yaml`)."""

    expert_tokens: Annotated[float, Field(ge=0)] = 13_000
    """Each pass of a model with experts takes as long as with so many more tokens on each device: with 1,000 tokens a
    device reaches a tenth of its rate, with 200,000 nearly all. A fit to the same steps."""

    mini_batches: Count = 2
    """Updates per pass. The samples of all but the first are passed forward before it, for their old logprobs."""

    epochs: Count = 1
    """Passes over the batch of a step. With several, all samples are passed forward before the first update."""

    old_logprobs: bool = False
    """Pass all samples forward before the first update in any case, for a KL in the reward."""

    learned_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the samples of a step that is learned. The others are only generated and scored:
    groups that are left out."""

    state_bytes_per_parameter: Positive = 16.0
    """Weights, gradients and Adam's state on the devices in mixed precision (ZeRO, arXiv 1910.02054)."""

    micro_batch_tokens: Count = 32_768
    """Tokens of one forward pass; a shared prefix is computed once in each. (verl's examples give a device 16 to 32
    thousand.)"""

    gradient_checkpointing: bool = True
    """Activations are computed twice: 8 operations per parameter and token in place of 6, of which `mfu` counts 6."""

    fixed_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds of each step whatever its size: collating, the optimiser, barriers, metrics. An assumption; published
    GRPO steps of 75 to 506 s are compatible with 0 to 5 (`benchmarks/rl_steps.py`)."""


class ScoringTimingSpec(SpecModel):
    """Verifiers on CPU cores, which take the samples of a group in parallel."""

    sample_s: Annotated[float, Field(ge=0)] = 0.002
    """Seconds per sample on one core; an assumption: text comparison takes less, running code much more."""

    cores: Processes = 16
    """CPU cores of its replica."""

    start_s: Annotated[float, Field(ge=0)] = 5.0
    """Seconds of a cold start. An assumption: a Python process with its imports."""


class ReferenceTimingSpec(SpecModel):
    """The frozen policy's logprobs, on the learner's side."""

    devices: Processes | None = None
    """Devices of its replica; all of the learner's side when left out, as in runs."""


class CriticTimingSpec(SpecModel):
    """A critic of the policy's sizes, on the learner's side: it computes values, and learns as the learner does."""

    devices: Processes | None = None
    """Devices of its replica; all of the learner's side when left out."""

    epochs: Count | None = None
    """Passes over the batch of a step; as many as the learner's when left out."""


class ScenarioPlacementSpec(SpecModel):
    """The devices of the functions."""

    mode: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: actors and learner take turns on all devices. `disaggregated`: the learner has its own."""

    learner_devices: Count | None = None
    """Devices reserved for the learner, when disaggregated; half of the first kind's when left out."""
