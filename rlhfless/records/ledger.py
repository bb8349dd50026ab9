"""The two kinds of record from which a run is billed, explained and simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple


class FunctionName(StrEnum):
    """The functions that come with the package. Nothing decides by these names (see FunctionRole); a run may have
    functions of its user beside them, so records hold a name as text."""

    GENERATION = "generation"
    PREFILL = "prefill"
    """Engines that compute prompts for the engines of generation."""
    SCORING = "scoring"
    REWARD_MODEL = "reward_model"
    """The part of scoring that runs a network."""
    REFERENCE = "reference"
    CRITIC = "critic"
    LEARNER = "learner"


def in_order(names: Iterable[str]) -> list[str]:
    """Names of functions, each once, as they are shown: first those of the package, in their own order."""
    own = tuple(FunctionName)
    return sorted(dict.fromkeys(names), key=lambda name: own.index(FunctionName(name)) if name in own else len(own))


class FunctionRole(StrEnum):
    """What a function does for a step."""

    SAMPLES = "samples"
    """Draws samples. The plan of a step says how many replicas work; any of them can leave during its work, and its
    samples continue on another."""
    PREFILLS = "prefills"
    """Computes the KV of prompts for the replicas that draw from them."""
    SCORES = "scores"
    """Adds its part of the score to the samples of complete groups."""
    COLUMN = "column"
    """Adds a value per token to the samples of complete groups."""
    UPDATES = "updates"
    """Learns from the batch. It keeps a part of the run's state, so it is never released."""


class ReplicaState(StrEnum):
    """States of a replica; rlhfless.scaling.lifecycle defines their transitions."""

    STARTING = "starting"
    STALE = "stale"
    """Up, without the weights of the version asked for: no traffic."""
    SERVING = "serving"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    RETIRED = "retired"
    SUSPECT = "suspect"
    DEAD = "dead"

    @property
    def holds_device(self) -> bool:
        """RETIRED and DEAD replicas have given their device back; all others are billed."""
        return self not in (ReplicaState.RETIRED, ReplicaState.DEAD)


@dataclass(frozen=True, slots=True)
class Holding:
    """One incarnation of a replica on one device, in one state, from when to when."""

    function: str
    replica: str
    incarnation: str
    device: str
    """Name of the device, such as `cpu-0`."""
    device_kind: str
    """Key of the price book."""
    share: float
    """Part of the device that the replica holds; the shares of co-located functions add up to at most 1."""
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
"""Metrics of a step, by function (`name/function`): prompt tokens that it computed, and how many there are if each
shared prefix is counted once."""

PREFIX_TOKENS_EVICTED = "prefix_tokens_evicted"
"""Metric of a step: prompt tokens that engines computed again because their cache had given the blocks away."""


class Work(StrEnum):
    """The work of an invocation."""

    GENERATE = "generate"
    HELD_OUT = "held_out"
    """Generation for an evaluation on held-out prompts."""
    PRECOMPUTE = "precompute"
    """Prefill of shared prefixes, before the samples that begin with them."""
    PROVE_LOADING = "prove_loading"
    """A new engine's load of the perturbed version, with the chart of its read-back."""
    LOAD_WEIGHTS = "load_weights"
    SCORE = "score"
    LOGPROBS = "logprobs"
    """A value per token of complete groups: reference logprobs, a critic's values, a column of the user's own."""
    EVALUATE = "evaluate"
    """Old logprobs: the policy before the first update of the step."""
    LEARN = "learn"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    """Loading a checkpoint."""
    SLEEP = "sleep"
    """Giving up a device's memory for the turn of another function."""
    WAKE = "wake"


def added(*counts: tuple[int, ...]) -> tuple[int, ...]:
    """The sums of counts by place; the shorter ones have 0 at the end."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a function, inside a holding. Times are of the function's body, without transport."""

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
    """Input tokens that were not computed: their KV came from the prefix cache, or another sequence of the same batch
    had computed the same prefix."""
    sequences: int = 0
    size_bytes: int = 0
    version: str = ""
    """Label of the weight version in use."""
    evicted_tokens: int = 0
    """Input tokens that were computed again: an engine had computed their KV before, and evicted it."""
    drafted: tuple[int, ...] = ()
    """[depth]: drafts that were verified, by their place in a pass; empty without speculation. Those of aborted samples
    are missing."""
    accepted: tuple[int, ...] = ()
    """[depth]: how many of them were accepted."""
    draft_s: float = 0.0
    """In which the engine looked for drafts, or computed them by a model of theirs."""
    verify_s: float = 0.0
    """Of the engine's passes that verified drafts, without `draft_s`."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


TRANSPORT = "transport"
"""Kind of a decision: how an actor's weights come, at its first load and when that changes."""

START = "start"
"""Kind of a decision: an engine has started. Its inputs are the seconds of each phase, as `PHASE_s` (StartPhase), and
KV_CAPACITY."""

KV_CAPACITY = "kv_capacity_tokens"
"""Input of START: tokens that the KV memory of the engine holds; absent if it does not say."""


class StartPhase(StrEnum):
    """The phases of an engine's start, from the launch of its actor to its first load. A phase that did not happen is
    absent."""

    REPLICA = "replica"
    """The actor's own process, and the report of its start to the driver."""
    IMPORT = "import"
    CONFIGURE = "configure"
    WEIGHTS_DISK = "weights_disk"
    """Reading the model's own weights, most of them from disk or network."""
    WEIGHTS_CACHE = "weights_cache"
    """Reading them, most of them from the page cache."""
    COMPILE = "compile"
    GRAPHS = "graphs"
    """Capture of CUDA graphs."""
    BUILD = "build"
    """The rest of building the engine: its processes, profiling of memory, warm-up."""
    CHART = "chart"
    """Finding, or reading from disk, where the layers hold what is read back."""
    FIRST_LOAD = "first_load"
    """The load of the perturbed version, with its checks."""


PREFIXES = "prefixes"
"""Kind of a decision: what the prompts of a step share, as a plan sees it. Its inputs have, by prompt id, the shared
prefixes of each prompt as `number:tokens`, the shortest first."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the scaler, with its inputs."""

    step: int
    at_s: float  # unix time
    kind: str
    """Such as `plan`, `hold`, `release`, `migrate`."""
    choice: str
    inputs: dict[str, float | int | str | bool]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step."""

    step: int
    start_s: float  # unix time; if the step was done again after a fault, the begin of its first try
    end_s: float
    metrics: dict[str, float]

    @property
    def resumed_s(self) -> float:
        """Unix time of the begin of the try without a fault: `start_s` if there was no fault."""
        return self.start_s + self.metrics.get("recovery_s", 0.0)


class SleepTier(StrEnum):
    """The place of a replica's state while its device's memory is free. The processes stay up in both tiers."""

    HOST = "host"
    """Weights and state are in the host's memory; the KV cache, which no other version could use, is gone."""
    DROPPED = "dropped"
    """Weights are gone, too: the replica serves again after its next load, which an actor between two versions needs in
    any case. A function whose state exists nowhere else, such as the learner, sleeps in HOST instead."""


@dataclass(frozen=True, slots=True)
class Slept:
    """A replica that sleeps."""

    tier: SleepTier
    """The tier it is in: the requested one, a replica's only one, or the one in which it slept already."""
    freed_bytes: int
    """The bytes that its processes gave up, as read from its device, or on a CPU from its processes; 0 if it slept
    already."""
    held_bytes: int
    """The bytes that they still hold."""


BUCKET_BYTES = 256 << 20
"""What a learner's rank gives the engines on its GPU at a time (rlhfless.weights.buckets); a larger tensor takes
several buckets."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The identity of weights: they are the same if run, attempt, step and digest are."""

    run_id: str
    attempt: int
    """Raised at every start or resume of the driver: the fencing token."""
    step: int
    """The number of training steps the weights have seen."""
    digest: str
    """A hash of names, dtypes, shapes and bytes of all tensors (see rlhfless.weights.digest)."""

    @property
    def label(self) -> str:
        """`run/attempt/step/digest`: the name under which the engine records it per token."""
        return f"{self.run_id}/{self.attempt}/{self.step}/{self.digest}"

    @classmethod
    def parse(cls, label: str) -> WeightVersion:
        """The inverse of `label`. Raises ValueError for any other text."""
        parts = label.split("/")
        if len(parts) != 4:
            raise ValueError(f"{label!r} is not a weight version: expected run/attempt/step/digest")
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])


class WeightSample(NamedTuple):
    """Elements of a tensor that a learner and an engine compare; plain data, because it goes to an engine's workers."""

    values: bytes
    """The elements that rlhfless.weights.samples chooses, in the published dtype."""
    row_maxima: bytes
    """The largest magnitude of each row with any of them, float32; none of a vector. Scales of quantised layers follow
    from it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The learner's data to check that an engine really serves a version: a short text with its logprobs, and elements
    of the weights themselves."""

    token_ids: tuple[int, ...]  # [probe]
    logprobs: tuple[float, ...]  # [probe - 1]: of token i + 1 given tokens up to i, temperature 1
    samples: Mapping[str, WeightSample] = field(default_factory=dict)
    """By tensor. Empty if weights are not read back from the engine."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The learner's announcement of a version that it has written to the store."""

    version: WeightVersion
    location: str
    """Its location in the store: a path, or a URL."""
    size_bytes: int
    tensors: int
    probe: Probe


TRACE_FOLDER = "trace"

JOURNAL_FILE = "journal.sqlite"
