"""The workload of a scenario: synthetic lengths, a recorded run, or the requests of a public trace."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.sim.scenarios.cluster import Count, Positive
from rlhfless.sim.scenarios.model import ScenarioModelSpec
from rlhfless.spec.base import Processes, SpecModel, Tokens

Share = Annotated[float, Field(ge=0, le=1)]
Source = Annotated[str, Field(min_length=1)]


class LognormalSpec(SpecModel):
    """Lognormal distribution of response lengths."""

    median_tokens: Positive
    """Median response length in tokens."""

    spread: Annotated[float, Field(ge=0)]
    """Standard deviation of the log length. With 0.5, two thirds of the lengths are between 0.6 and 1.6 times the
    median."""

    persistence: Share
    """Correlation of a response's log length with its prompt's own level, which is constant over all epochs."""


class _SyntheticSpec(SpecModel):
    """Keys of all synthetic workloads."""

    prompts: Count
    """Prompts in the data set. An epoch visits each one once."""

    median_prompt_tokens: Positive
    """Median prompt length in tokens. Prompt lengths are lognormal with a spread of 0.5."""

    drift_per_step: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    """Change of the log length per step; 0.01 makes responses one percent longer per step."""

    source: Source
    """Source of the lengths. If they are an assumption, say so."""


class LognormalWorkload(_SyntheticSpec):
    """Responses of one kind."""

    type: Literal["lognormal"] = "lognormal"

    lengths: LognormalSpec
    """Distribution of response lengths."""


class BimodalWorkload(_SyntheticSpec):
    """A mix of short answers and long reasoning."""

    type: Literal["bimodal"] = "bimodal"

    short: LognormalSpec
    """Length distribution of short responses."""

    long: LognormalSpec
    """Length distribution of long responses."""

    long_share: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of long responses. Harder prompts have more of them."""


class TurnsSpec(SpecModel):
    """Lognormal distribution of the number of turns of an episode."""

    median: Positive
    """Median number of turns."""

    spread: Annotated[float, Field(ge=0)]
    """Standard deviation of the log."""

    persistence: Share
    """Correlation of an episode's log number with its prompt's own level."""

    fewest: Count = 1
    """Least number of turns."""

    most: Count
    """Largest number of turns."""


class EpisodesWorkload(_SyntheticSpec):
    """Episodes of several turns, with an environment on CPU cores that answers each turn but the last."""

    type: Literal["episodes"] = "episodes"

    turns: TurnsSpec
    """Number of turns of an episode."""

    turn_tokens: Positive
    """Median tokens of a turn. Turns, answers and waits are lognormal with a spread of 0.5."""

    answer_tokens: Positive
    """Median tokens that the environment writes after a turn."""

    wait_s: Annotated[float, Field(ge=0)]
    """Mean seconds until the environment answers."""

    park_s: Annotated[float, Field(ge=0)] = 5.0
    """Wait after which an episode leaves its actor, as in a run (`environment.park_s`)."""

    sessions: Count
    """CPU cores of the environment, each with a session. They are paid for; a simulation does not wait for a free one.
    By Little's law, calls per second x seconds per call of them are busy."""


class RecordedWorkload(SpecModel):
    """The responses of a recorded run."""

    type: Literal["recorded"] = "recorded"

    path: str
    """Folder of the run, or its trace file."""


class AzureWorkload(SpecModel):
    """Requests of the Azure LLM inference trace 2023 (CSV), used as prompts in file order."""

    type: Literal["azure"] = "azure"

    path: str
    """Path of the CSV file."""


class MooncakeWorkload(SpecModel):
    """Requests of a Mooncake trace (JSON lines), used as prompts in file order."""

    type: Literal["mooncake"] = "mooncake"

    path: str
    """Path of the file."""


WorkloadSpec = Annotated[
    LognormalWorkload | BimodalWorkload | EpisodesWorkload | RecordedWorkload | AzureWorkload | MooncakeWorkload,
    Field(discriminator="type"),
]


class PrefixLevel(SpecModel):
    """One level of shared prefix, such as a system prompt, examples or a document."""

    tokens: Count
    """Tokens that this level adds to the level before it."""

    kinds: Count = 1
    """Number of different prefixes at this level, after each prefix of the level before. Prompt i has prefix i modulo
    `kinds`."""


PrefixSharing = Literal["engine", "plan", "plan_and_learner"]


class PrefixesSpec(SpecModel):
    """Shared prefixes of prompts, in front of their own tokens (`median_prompt_tokens`)."""

    levels: tuple[PrefixLevel, ...]
    """Prefix levels from the first token on, such as a system prompt followed by one of several blocks of examples.
    Without levels, only the samples of a prompt share tokens."""

    sharing: PrefixSharing = "plan_and_learner"
    """`engine`: only each engine's own prefix cache. `plan`: prompts with the same prefix are assigned to the same
    actor, which computes it once before its samples or receives its KV from another actor. `plan_and_learner`: in
    addition, the reference and learner compute it once per micro-batch."""


class LearnerTimingSpec(SpecModel):
    """Learning time: 6 floating-point operations per parameter and token at the given utilization."""

    mfu: Annotated[float, Field(gt=0, le=1)] = 0.24
    """Model FLOP utilization: the 6 operations per second, relative to the devices' peak. Recomputed activations count
    as lost time, so a forward pass alone runs at 8/6 of this value. Dense models, by framework: verl 0.17 to 0.19 (GRPO
    of a 7B model on MI300: 0.185) and 0.288 for LoRA of a 72B model; NeMo-RL 0.22 to 0.31. The default lies between
    these; set the value of your framework."""

    expert_flops_per_s: Positive = 85e12
    """Operations per second and device for mixture-of-experts models, based on active parameters; limited by `mfu`.
    H100 and GB200 reach the same rate, not the same fraction of their peaks, because small products and all-to-all
    communication are the bottleneck. Fitted to 10 published GRPO steps of 30B-A3B, 235B-A22B and DeepSeek-V3 on H100
    (`benchmarks/anchors.yaml`)."""

    expert_tokens: Annotated[float, Field(ge=0)] = 13_000
    """Fixed cost of each pass of a mixture-of-experts model, in additional tokens per device: with 1,000 tokens, a
    device reaches about a tenth of its rate; with 200,000, nearly all of it. Fitted to the same steps."""

    mini_batches: Count = 2
    """Updates per pass. Old logprobs of all mini-batches except the first need a forward pass before the first
    update."""

    epochs: Count = 1
    """Passes over the batch of a step. With more than one, all samples need a forward pass before the first update."""

    old_logprobs: bool = False
    """Always run a forward pass over all samples before the first update, as for a KL term in the reward."""

    reference: bool = False
    """The learner computes reference logprobs itself: it trains adapters, and leaves them out for that."""

    adapters: bool = False
    """Train adapters (LoRA) on frozen weights: a step takes 0.885 of the time of training all weights. Measured on CPU
    cores: 0.87 to 0.90."""

    version_bytes: Count | None = None
    """Bytes of a published version. `null`: all weights of the model."""

    learned_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a step's samples that are learned. The others are only generated and scored, because their groups are
    dropped."""

    state_bytes_per_parameter: Positive = 16.0
    """Bytes per parameter on the devices: weights, gradients and Adam states in mixed precision (ZeRO, arXiv
    1910.02054)."""

    micro_batch_tokens: Count = 32_768
    """Tokens per forward pass; a shared prefix is computed once in each. In verl's examples, 16 to 32 thousand per
    device."""

    gradient_checkpointing: bool = True
    """Recompute activations: 8 operations per parameter and token instead of 6, 6 of which count for `mfu`."""

    fixed_s: Annotated[float, Field(ge=0)] = 2.0
    """Fixed seconds per step: collating, the optimizer, barriers, metrics. An assumption; published GRPO steps of 75 to
    506 s are consistent with 0 to 5 (`benchmarks/rl_steps.py`)."""


class ScoringTimingSpec(SpecModel):
    """Scoring on CPU cores, with the samples of a group in parallel."""

    sample_s: Annotated[float, Field(ge=0)] = 0.002
    """Seconds per sample on one core. An assumption: text comparison takes less, running code much more."""

    cores: Processes = 16
    """CPU cores of the scoring replica."""

    start_s: Annotated[float, Field(ge=0)] = 5.0
    """Seconds of a cold start. An assumption: a Python process with its imports."""


class ReferenceTimingSpec(SpecModel):
    """The reference, which computes logprobs of the frozen policy on the learner's side."""

    devices: Processes | None = None
    """Devices of the reference replica. `null`: all devices of the learner's side, as in runs."""


class TeacherTimingSpec(SpecModel):
    """A teacher, which computes logprobs like the reference, with sizes of its own."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]
    """Its function is called `teacher_<name>`."""

    model: ScenarioModelSpec | None = None
    """Its sizes. `null`: the policy's."""

    devices: Processes | None = None
    """Devices of the teacher's replica. `null`: all devices of the learner's side."""


class JudgeTimingSpec(SpecModel):
    """A judge with a model of its own, in an engine on the learner's side. It reads prompts and responses, and writes
    answers in batches of 256."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")]
    """Its function is called `judge_<name>`."""

    model: ScenarioModelSpec | None = None
    """Its sizes. `null`: the policy's."""

    devices: Processes = 1
    """Devices of the judge's engine."""

    answer_tokens: Tokens = 1
    """Tokens of an answer."""


class CriticTimingSpec(SpecModel):
    """A critic of the policy's size on the learner's side: computes values and is trained like the learner."""

    devices: Processes | None = None
    """Devices of the critic replica. `null`: all devices of the learner's side."""

    epochs: Count | None = None
    """Passes over the batch of a step. `null`: the same as the learner."""


class ScenarioPlacementSpec(SpecModel):
    """How devices are assigned to functions."""

    mode: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: actors and learner take turns on all devices. `disaggregated`: the learner has its own devices."""

    learner_devices: Count | None = None
    """Devices reserved for the learner in mode `disaggregated`. `null`: half of the first machine kind's devices."""
