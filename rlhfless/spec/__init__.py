"""The spec of a run, as the user writes it. Frozen; unknown keys are refused; every default lives here and only
here."""

from rlhfless.spec.algorithm import (
    AlgorithmSpec,
    CISPOSpec,
    DAPOSpec,
    DrGRPOSpec,
    GRPOSpec,
    GSPOSpec,
    OwnAlgorithmSpec,
    PPOSpec,
    ReinforcePlusPlusSpec,
    RLOOSpec,
    SAPOSpec,
)
from rlhfless.spec.data import (
    DataSpec,
    DrawLessSpec,
    DType,
    HeldOutSpec,
    MixtureSetSpec,
    ModelSpec,
    NamedSetSpec,
    PromptsSpec,
)
from rlhfless.spec.evaluation import BestSpec, CheckpointSpec, EvaluationSpec
from rlhfless.spec.extension import OwnSpec
from rlhfless.spec.fleet import (
    CheapestSpec,
    ContractSpec,
    FastestSpec,
    GenerationScalingSpec,
    Hold,
    PlacementSpec,
    RecoverySpec,
    ScalingSpec,
    TimeoutsSpec,
    Transport,
    WeightedSpec,
    WeightsSpec,
)
from rlhfless.spec.generation import EngineSpec, GenerationSpec, SpeculationSpec
from rlhfless.spec.learner import AdamWSpec, CriticAdamWSpec, CriticSpec, LearnerSpec, ReferenceSpec, TrainingSpec
from rlhfless.spec.losses import (
    ClippedLossSpec,
    GroupRelativeSpec,
    ImportanceSpec,
    KLSpec,
    Needs,
    PolicyLossSpec,
    RejectionSpec,
    RewardKLSpec,
)
from rlhfless.spec.policies import CostAwareSpec, PolicySpec
from rlhfless.spec.reward_verifiers import CodeSpec, JsonSchemaSpec, MathSpec
from rlhfless.spec.rewards import (
    ExactMatchSpec,
    FormatSpec,
    HttpSpec,
    LengthPenaltySpec,
    PythonRewardSpec,
    RegexSpec,
    RewardModelSpec,
    RewardSpec,
)
from rlhfless.spec.run import LimitsSpec, LoggingSpec, RunSpec
from rlhfless.spec.schedule import (
    AsyncSpec,
    OneStepOffSpec,
    OwnScheduleSpec,
    PartialSpec,
    ScheduleSpec,
    SyncSpec,
)
from rlhfless.spec.scoring import OnFailure, ScoringSpec
from rlhfless.spec.sizes import SizesSpec
from rlhfless.spec.supervised import DemonstrationsSpec, DPOSpec, PreferencesSpec, RunType
