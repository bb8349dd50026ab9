"""What happened: rollouts, weight versions, and the ledger of holdings and invocations."""

from rlhfless.records.ledger import (
    Decision,
    FunctionName,
    Holding,
    Invocation,
    ReplicaState,
    StepRecord,
    Work,
)
from rlhfless.records.rollouts import (
    FinishReason,
    FloatArray,
    Group,
    IntArray,
    Prompt,
    Rollout,
    Score,
    VersionSpan,
    sample_seed,
)
from rlhfless.records.weights import Probe, PublishedWeights, WeightVersion

__all__ = [
    "Decision",
    "FinishReason",
    "FloatArray",
    "FunctionName",
    "Group",
    "Holding",
    "IntArray",
    "Invocation",
    "Probe",
    "Prompt",
    "PublishedWeights",
    "ReplicaState",
    "Rollout",
    "Score",
    "StepRecord",
    "VersionSpan",
    "WeightVersion",
    "Work",
    "sample_seed",
]
