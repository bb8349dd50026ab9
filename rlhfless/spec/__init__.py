"""The spec of a run, as users write it. It is frozen, refuses unknown keys, and holds every default."""

from rlhfless.spec.algorithm import (
    AlgorithmSpec,
    CISPOSpec,
    ClippedLossSpec,
    ComparedSpec,
    DAPOSpec,
    DistillSpec,
    DistillTermSpec,
    DrGRPOSpec,
    GroupRelativeSpec,
    GRPOSpec,
    GSPOSpec,
    ImportanceSpec,
    KLSpec,
    Needs,
    OwnAlgorithmSpec,
    PolicyLossSpec,
    PPOSpec,
    ReinforcePlusPlusSpec,
    RejectionSpec,
    RewardKLSpec,
    RLOOSpec,
    SAPOSpec,
)
from rlhfless.spec.base import SizesSpec
from rlhfless.spec.data import (
    DataSpec,
    DemonstrationsSpec,
    DrawLessSpec,
    DType,
    HeldOutSpec,
    LoRASpec,
    MixtureSetSpec,
    ModelSpec,
    NamedSetSpec,
    PreferencesSpec,
    PromptsSpec,
    RunType,
)
from rlhfless.spec.environment import GYMNASIUM, MCP, OPENENV, PROCESS, EnvironmentSpec
from rlhfless.spec.evaluation import BestSpec, CheckpointSpec, EvaluationSpec
from rlhfless.spec.extension import PluginSpec
from rlhfless.spec.fleet import (
    CheapestSpec,
    ContractSpec,
    CostAwareSpec,
    FastestSpec,
    GenerationScalingSpec,
    Hold,
    PlacementSpec,
    PolicySpec,
    RecoverySpec,
    ScalingSpec,
    TimeoutsSpec,
    Transport,
    WeightedSpec,
    WeightsSpec,
)
from rlhfless.spec.generation import (
    AsyncSpec,
    EngineSpec,
    GenerationSpec,
    OneStepOffSpec,
    OwnScheduleSpec,
    PartialSpec,
    ScheduleSpec,
    SpeculationSpec,
    SyncSpec,
)
from rlhfless.spec.keys import LimitsSpec, LoggingSpec
from rlhfless.spec.learner import (
    AdamWSpec,
    CriticAdamWSpec,
    CriticSpec,
    DPOSpec,
    LearnerSpec,
    OnFailure,
    ReferenceSpec,
    ScoringSpec,
    TrainingSpec,
)
from rlhfless.spec.rewards import (
    PLACEHOLDER,
    CodeSpec,
    EndpointPart,
    ExactMatchSpec,
    FormatSpec,
    HttpSpec,
    JsonSchemaSpec,
    JudgeSpec,
    LengthPenaltySpec,
    MathSpec,
    PythonRewardSpec,
    RegexSpec,
    RewardModelSpec,
    RewardSpec,
)
from rlhfless.spec.run import RunSpec
from rlhfless.spec.teachers import TeacherSpec
from rlhfless.spec.trackers import MlflowSpec, TrackerSpec, TrackioSpec, WandbSpec
