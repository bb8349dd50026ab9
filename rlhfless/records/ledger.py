"""The ledger: holdings and invocations, from which a run is billed, explained and simulated, and weight versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple


class FunctionName(StrEnum):
    """Functions of the package. Records hold names as text, because users may add functions. Behaviour depends on
    FunctionRole and never on these names."""

    GENERATION = "generation"
    PREFILL = "prefill"
    """Engines that prefill prompts for the generation engines."""
    ENVIRONMENT = "environment"
    """What answers the model between its turns."""
    SCORING = "scoring"
    REWARD_MODEL = "reward_model"
    """The part of scoring that runs a network."""
    REFERENCE = "reference"
    CRITIC = "critic"
    LEARNER = "learner"


def in_order(names: Iterable[str]) -> list[str]:
    """Sort function names for display, without duplicates: the package's functions first, in declaration order."""
    own = tuple(FunctionName)
    return sorted(dict.fromkeys(names), key=lambda name: own.index(FunctionName(name)) if name in own else len(own))


class FunctionRole(StrEnum):
    """The role of a function in a step."""

    SAMPLES = "samples"
    """Generates samples. Any replica may leave during a step; its samples continue on another replica."""
    PREFILLS = "prefills"
    """Computes the KV of prompts for the replicas that generate."""
    ANSWERS = "answers"
    """Answers the model's turns while samples are generated."""
    SCORES = "scores"
    """Adds its part of the score to samples of complete groups."""
    ANNOTATES = "annotates"
    """Adds a per-token output to samples of complete groups."""
    UPDATES = "updates"
    """Learns from the batch. It keeps part of the run's state, so it is never released."""


class ReplicaState(StrEnum):
    """States of a replica; rlhfless.scaling.lifecycle defines the transitions."""

    STARTING = "starting"
    STALE = "stale"
    """Running without the requested weights: gets no traffic."""
    SERVING = "serving"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    RETIRED = "retired"
    SUSPECT = "suspect"
    DEAD = "dead"

    holds_device: bool
    """Whether the device is billed: in all states except RETIRED and DEAD."""

    def __init__(self, value: str) -> None:
        self.holds_device = value not in ("retired", "dead")


@dataclass(frozen=True, slots=True)
class Holding:
    """One incarnation of a replica on one device, in one state, over an interval."""

    function: str
    replica: str
    incarnation: str
    device: str
    """For example `cpu-0`."""
    device_kind: str
    """Key of the price book."""
    share: float
    """Share of the device; shares of co-located functions add up to at most 1."""
    state: ReplicaState
    start_s: float  # unix time
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def device_s(self) -> float:
        """Device-seconds: duration times share."""
        return self.duration_s * self.share


PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE = "prompt_tokens_computed", "prompt_tokens_unique"
"""Step metrics by function (`name/function`): prompt tokens computed, and prompt tokens that remain if each shared
prefix is counted once."""

PREFIX_TOKENS_EVICTED = "prefix_tokens_evicted"
"""Step metric: prompt tokens that engines computed again because their cache had evicted the blocks."""


class Work(StrEnum):
    """The work of an invocation."""

    GENERATE = "generate"
    HELD_OUT = "held_out"
    """Generation for an evaluation."""
    PRECOMPUTE = "precompute"
    """Prefill of shared prefixes before their samples."""
    LOAD_WEIGHTS = "load_weights"
    SCORE = "score"
    LOGPROBS = "logprobs"
    """A per-token output of complete groups: reference logprobs, a critic's values, or a user's own output."""
    EVALUATE = "evaluate"
    """Old logprobs: the policy before the first update of the step."""
    LEARN = "learn"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    """Loading a checkpoint."""
    SLEEP = "sleep"
    """Releasing a device's memory for another function's turn."""
    WAKE = "wake"


def added(*counts: tuple[int, ...]) -> tuple[int, ...]:
    """Add counts by position; shorter tuples are padded with 0."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a function, inside a holding. Times cover the function's body, without transport."""

    function: str
    replica: str
    incarnation: str
    work: Work
    step: int
    start_s: float  # unix time
    end_s: float
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens whose KV came from the prefix cache or from another sequence of the batch."""
    sequences: int = 0
    size_bytes: int = 0
    version: str = ""
    """Label of the weight version."""
    evicted_tokens: int = 0
    """Input tokens computed again after the engine evicted their KV."""
    drafted: tuple[int, ...] = ()
    """[depth]: verified drafts by position in a pass; empty without speculation. Aborted samples are not counted."""
    accepted: tuple[int, ...] = ()
    """[depth]: accepted drafts."""
    draft_s: float = 0.0
    """Seconds that the engine spent looking up or computing drafts."""
    verify_s: float = 0.0
    """Seconds of passes that verified drafts, without `draft_s`."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


TRANSPORT = "transport"
"""Kind of decision: how an actor gets its weights, at its first load and at each change."""

START = "start"
"""Kind of decision: an engine has started. Inputs: seconds per phase as `PHASE_s` (StartPhase), and KV_CAPACITY."""

KV_CAPACITY = "kv_capacity_tokens"
"""Input of START: tokens that fit in the engine's KV memory; absent if unknown."""


class StartPhase(StrEnum):
    """Phases of an engine's start, from its actor's launch to its first load. Phases that did not happen are absent."""

    REPLICA = "replica"
    """The actor's process, and the report of its start to the driver."""
    IMPORT = "import"
    CONFIGURE = "configure"
    WEIGHTS_DISK = "weights_disk"
    """Reading the model's weights, mostly from disk or network."""
    WEIGHTS_CACHE = "weights_cache"
    """Reading the model's weights, mostly from the page cache."""
    COMPILE = "compile"
    GRAPHS = "graphs"
    """Capture of CUDA graphs."""
    BUILD = "build"
    """The rest of building the engine: processes, memory profiling, warm-up."""


PREFIXES = "prefixes"
"""Kind of decision: the shared prefixes of a step. Inputs: by prompt id, `number:tokens` of each, shortest first."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the scaler, with its inputs."""

    step: int
    at_s: float  # unix time
    kind: str
    """For example `plan`, `hold`, `release`, `migrate`."""
    choice: str
    inputs: dict[str, float | int | str | bool]


@dataclass(frozen=True, slots=True)
class StepRecord:
    step: int
    start_s: float  # unix time; start of the first try if the step was repeated after a fault
    end_s: float
    metrics: dict[str, float]

    @property
    def resumed_s(self) -> float:
        """Unix time at which the successful try started: `start_s` if there was no fault."""
        return self.start_s + self.metrics.get("recovery_s", 0.0)


class SleepTier(StrEnum):
    """Where a sleeping replica's state is while its device memory is free. Processes keep running in both tiers."""

    HOST = "host"
    """Weights and state are in host memory; the KV cache is dropped."""
    DROPPED = "dropped"
    """Weights are dropped, too: the replica serves again after its next load. A function whose state exists nowhere
    else, such as the learner, uses HOST."""


@dataclass(frozen=True, slots=True)
class Slept:
    tier: SleepTier
    """The actual tier: the requested one, the replica's only one, or the one in which it already slept."""
    freed_bytes: int
    """Bytes released, as read from the device or, on a CPU, from the processes; 0 if it already slept."""
    held_bytes: int
    """Bytes still held."""


# -- weight versions


BUCKET_BYTES = 256 << 20
"""Size of the buckets in which a learner's rank passes weights to the engines on its GPU (rlhfless.weights.buckets). A
larger tensor takes several buckets."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Identity of weights: equal if run, attempt, step and digest are equal."""

    run_id: str
    attempt: int
    """Incremented at every start or resume of the driver: the fencing token."""
    step: int
    """Training steps of the weights."""
    digest: str
    """Hash of names, dtypes, shapes and bytes of all tensors (rlhfless.weights.digest)."""

    @property
    def label(self) -> str:
        """`run/attempt/step/digest`, as the engine records it per token."""
        return f"{self.run_id}/{self.attempt}/{self.step}/{self.digest}"

    @classmethod
    def parse(cls, label: str) -> WeightVersion:
        """Parse a `label`. Raises ValueError."""
        parts = label.split("/")
        if len(parts) != 4:
            raise ValueError(f"{label!r} is not a weight version: expected run/attempt/step/digest")
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])


class WeightSample(NamedTuple):
    """Elements of a tensor that learner and engine compare. Plain data, because it is sent to engine workers."""

    values: bytes
    """The elements that rlhfless.weights.samples chooses, in the published dtype."""
    row_maxima: bytes
    """Largest magnitude of each sampled row, float32, for the scales of quantised layers; empty for a vector."""
    shape: tuple[int, ...]
    dtype: str
    """Dtype of the published tensor, by torch's name."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Data to check that an engine serves a version: a short text with logprobs, and elements of the weights."""

    token_ids: tuple[int, ...]  # [probe]
    logprobs: tuple[float, ...]  # [probe - 1]: of token i + 1 given tokens up to i, temperature 1
    samples: Mapping[str, WeightSample] = field(default_factory=dict)
    """Samples by tensor; empty if weights are not read back from the engine."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The frozen weights under an adapter, which engines read from the model's folder and compare with these."""

    digest: str
    samples: Mapping[str, WeightSample] = field(default_factory=dict)
    """See Probe."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version that the learner has written to the store."""

    version: WeightVersion
    location: str
    """A path or URL in the store."""
    size_bytes: int
    tensors: int
    probe: Probe
    base: BaseWeights | None = None
    """If the version is an adapter: the weights that it belongs to."""


TRACE_FOLDER = "trace"

JOURNAL_FILE = "journal.sqlite"
