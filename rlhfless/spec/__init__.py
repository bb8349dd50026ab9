"""What a user asks for. Frozen, unknown keys refused; every default lives here and only here."""

from rlhfless.spec.algorithm import AlgorithmSpec, GRPOSpec, KLSpec
from rlhfless.spec.data import DType, HeldOutSpec, ModelSpec, PromptsSpec
from rlhfless.spec.fleet import (
    GenerationScalingSpec,
    Hold,
    PlacementSpec,
    RecoverySpec,
    ScalingSpec,
    TimeoutsSpec,
    WeightsSpec,
)
from rlhfless.spec.generation import EngineSpec, GenerationSpec
from rlhfless.spec.learner import AdamWSpec, LearnerSpec
from rlhfless.spec.rewards import (
    ExactMatchSpec,
    LengthPenaltySpec,
    PythonRewardSpec,
    RegexSpec,
    RewardSpec,
)
from rlhfless.spec.run import CheckpointSpec, EvaluationSpec, LoggingSpec, RunSpec

__all__ = [
    "AdamWSpec",
    "AlgorithmSpec",
    "CheckpointSpec",
    "DType",
    "EngineSpec",
    "EvaluationSpec",
    "ExactMatchSpec",
    "GRPOSpec",
    "GenerationScalingSpec",
    "GenerationSpec",
    "HeldOutSpec",
    "Hold",
    "KLSpec",
    "LearnerSpec",
    "LengthPenaltySpec",
    "LoggingSpec",
    "ModelSpec",
    "PlacementSpec",
    "PromptsSpec",
    "PythonRewardSpec",
    "RecoverySpec",
    "RegexSpec",
    "RewardSpec",
    "RunSpec",
    "ScalingSpec",
    "TimeoutsSpec",
    "WeightsSpec",
]
