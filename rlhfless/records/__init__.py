"""The records of a run: rollouts and experience, weight versions, and the ledger of holdings and invocations."""

from rlhfless.records.experience import Experience, GivenSegment, Group, Sample, Segment, Source
from rlhfless.records.ledger import (
    KV_CAPACITY,
    PREFIXES,
    START,
    TRANSPORT,
    Decision,
    FunctionName,
    FunctionRole,
    Holding,
    Invocation,
    ReplicaState,
    SleepTier,
    Slept,
    StartPhase,
    StepRecord,
    Work,
    in_order,
)
from rlhfless.records.rollouts import (
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    Rollout,
    Score,
    VersionSpan,
    sample_seed,
)
from rlhfless.records.weights import Probe, PublishedWeights, WeightSample, WeightVersion
