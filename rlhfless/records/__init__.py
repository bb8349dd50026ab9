"""The records of a run: rollouts and experience, weight versions, and the ledger of holdings and invocations."""

from rlhfless.records.experience import Experience, GivenSegment, Group, Sample, Segment, Source
from rlhfless.records.ledger import (
    PREFIXES,
    START,
    Decision,
    FunctionName,
    FunctionRole,
    Holding,
    Invocation,
    ReplicaState,
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
from rlhfless.records.sleep import SleepTier, Slept
from rlhfless.records.weights import Probe, PublishedWeights, WeightVersion

__all__ = [
    "PREFIXES",
    "START",
    "Decision",
    "Experience",
    "FinishReason",
    "FloatArray",
    "FunctionName",
    "FunctionRole",
    "GivenSegment",
    "Group",
    "Holding",
    "IntArray",
    "Invocation",
    "Probe",
    "Prompt",
    "PublishedWeights",
    "ReplicaState",
    "Rollout",
    "Sample",
    "Score",
    "Segment",
    "SleepTier",
    "Slept",
    "Source",
    "StartPhase",
    "StepRecord",
    "VersionSpan",
    "WeightVersion",
    "Work",
    "in_order",
    "sample_seed",
]
