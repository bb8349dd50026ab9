"""The keys of a run, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import (
    Field,
)

from rlhfless.spec.algorithm import AlgorithmSpec, GRPOSpec, PolicyLossSpec, RouterReplay
from rlhfless.spec.base import Duration, Size, SizesSpec, SpecModel
from rlhfless.spec.data import (
    DATA,
    DataSpec,
    DemonstrationsSpec,
    HeldOutSpec,
    ModelSpec,
    NamedSetSpec,
    PreferencesSpec,
    PromptsSpec,
    RunType,
)
from rlhfless.spec.environment import EnvironmentSpec
from rlhfless.spec.evaluation import CheckpointSpec, EvaluationSpec
from rlhfless.spec.extension import PluginField, PluginSpec
from rlhfless.spec.fleet import PlacementSpec, RecoverySpec, ScalingSpec, TimeoutsSpec, WeightsSpec
from rlhfless.spec.generation import GenerationSpec, ScheduleSpec, SyncSpec
from rlhfless.spec.learner import (
    FROM_POLICY,
    FROM_REWARD_MODEL,
    AdamWSpec,
    CriticSpec,
    DPOSpec,
    Epochs,
    LearnerSpec,
    ReferenceSpec,
    ScoringSpec,
    TrainingSpec,
)
from rlhfless.spec.rewards import JudgeSpec, RewardModelSpec, RewardSpec
from rlhfless.spec.teachers import MOST_TEACHERS, TeacherSpec
from rlhfless.spec.trackers import TrackerSpec

Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


OwnFunctions = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,38}$")],
        Annotated[PluginSpec, PluginField("function", built_in=(), methods=("kind",))],
    ],
    Field(max_length=8),
]


class LimitsSpec(SpecModel):
    """Limits on a whole run, across all its attempts. They are checked after each step. When one is reached, the run
    saves a checkpoint of that step and reports which limit it was."""

    max_cost_usd: Annotated[float, Field(gt=0)] | None = None
    """Maximum cost in US dollars, from the price book. `null`: no limit."""

    max_device_hours: Annotated[float, Field(gt=0)] | None = None
    """Maximum device hours. Devices count while the run holds them, busy or idle. `null`: no limit."""

    max_wall_clock_s: Duration | None = None
    """Maximum time in seconds during which the run holds devices. Queueing and pauses do not count. `null`: no
    limit."""

    then: Literal["pause", "stop"] = "pause"
    """Action when a limit is reached. `pause`: the run can be resumed once the limit is raised. `stop`: the run
    ends."""


class LoggingSpec(SpecModel):
    """Where the run reports progress."""

    console: Literal["live", "lines", "off"] = "live"
    """Console output. `live`: a table that updates in place on a terminal; without a terminal, `lines`. `lines`: plain
    lines. `off`: none."""

    tensorboard: bool = False
    """Write TensorBoard event files under tensorboard/."""

    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on the loopback interface that serves Prometheus metrics. `null`: not served."""

    record_tokens: bool = False
    """Record prompts in the trace, and the text, token ids and logprobs of every response."""

    trackers: Annotated[tuple[TrackerSpec, ...], Field(max_length=8)] = ()
    """Trackers of experiments that get the metrics, the spec and some responses. See docs/trackers.md."""


class RunKeys(SpecModel):
    """The spec of a run."""

    """Map another tool's setting to a spec key, for hints (rlhfless.spec.explain)."""

    type: RunType = "rlhf"
    """Type of training. `rlhf`: train a policy on rewards for the responses it generates. `sft`: train a policy on
    written responses. `reward_model`: train a scoring model on pairs of a chosen and a rejected response. `dpo`: train
    a policy on such pairs. Keys that do not apply to the type are refused. See docs/supervised.md for all types except
    `rlhf`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "run"
    """Short lowercase name, used in the names of the output folder and the replicas."""

    model: ModelSpec

    prompts: PromptsSpec | None = None
    """Training prompts. Required for type `rlhf`."""

    demonstrations: DemonstrationsSpec | None = None
    """Prompts with written responses. Required for type `sft`."""

    preferences: PreferencesSpec | None = None
    """Prompts with a chosen and a rejected response. Required for types `reward_model` and `dpo`."""

    environment: EnvironmentSpec | None = None
    """What answers the model between its turns. `null`: a sample is one response to its prompt."""

    algorithm: AlgorithmSpec = GRPOSpec()
    """RL algorithm: a name, `{type: ...}` with its own keys, or your own class (docs/extending.md)."""

    rewards: Annotated[tuple[RewardSpec, ...], Field(max_length=64)] = ()
    """Rewards for type `rlhf`, which needs at least one, unless its environment gives a reward, or its algorithm is
    `distill`."""

    dpo: DPOSpec = DPOSpec()
    scoring: ScoringSpec = ScoringSpec()

    teachers: Annotated[tuple[TeacherSpec, ...], Field(max_length=MOST_TEACHERS)] = ()
    """Teachers of `algorithm.distill`. Several may teach the same prompts; each adds its part to the advantage."""

    generation: GenerationSpec = GenerationSpec()

    steps: Annotated[int, Field(ge=1)] = 100
    """Training steps."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 64
    """Prompts per training step. Each has its samples (`rlhf`), one written response (`sft`), or a pair of
    responses."""

    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    """Samples generated per prompt (the group size)."""

    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per pass over the batch of a training step. Prompts are divided among them."""

    epochs: Epochs = 1
    """Passes over the batch of a training step, each in a different order. Old logprobs are always those from before
    the first update."""

    schedule: ScheduleSpec = SyncSpec()
    """How generation and training steps are ordered."""

    optimizer: AdamWSpec = AdamWSpec()
    learner: LearnerSpec = LearnerSpec()
    reference: ReferenceSpec = ReferenceSpec()

    critic: CriticSpec | None = None
    """The critic, for algorithms that need values, such as PPO. `null`: none."""

    functions: OwnFunctions = Field(default_factory=dict)
    """Your own functions, by name. Each adds one per-token output to the samples of complete groups. See
    docs/extending.md."""

    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    placement: PlacementSpec = PlacementSpec()
    scaling: ScalingSpec = ScalingSpec()
    weights: WeightsSpec = WeightsSpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()
    recovery: RecoverySpec = RecoverySpec()
    logging: LoggingSpec = LoggingSpec()

    limits: LimitsSpec = LimitsSpec()
    sizes: SizesSpec = SizesSpec()

    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Priority among the runs of a service. Higher-priority runs get devices first; lower-priority runs yield
    theirs."""

    metadata: Labels = Field(default_factory=dict)
    """Your own labels, for finding runs. At most 16; keys up to 64 characters, values up to 512."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seed for all random choices of the run."""

    output: str = "runs"
    """Parent folder of the run's own folder, which holds its trace, metrics and checkpoints."""

    @property
    def supervised(self) -> bool:
        """Whether the run learns from written responses, without generation or scoring."""
        return self.type != "rlhf"

    @property
    def data(self) -> DataSpec:
        """The data section of this run type."""
        section: DataSpec = getattr(self, DATA[self.type])
        return section

    @property
    def publishes_adapters(self) -> bool:
        """Whether a version of the weights is an adapter alone, once `generation.lora` is resolved."""
        return self.type == "rlhf" and self.model.lora is not None and self.generation.lora == "adapter"

    @property
    def router_replay(self) -> RouterReplay:
        """Which routes the learner replays."""
        return self.algorithm.router_replay if isinstance(self.algorithm, PolicyLossSpec) else "off"

    @property
    def replays_engine_routes(self) -> bool:
        """Whether engines record the routes of generated tokens for the learner."""
        return self.type == "rlhf" and self.router_replay == "engine"

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs reference logprobs."""
        return self.type == "dpo" or (not self.supervised and self.algorithm.needs.reference)

    @property
    def learner_is_reference(self) -> bool:
        """Whether the learner computes the reference logprobs, by leaving out the adapters that it trains."""
        return self.needs_reference and self.model.lora is not None

    @property
    def scores_samples(self) -> bool:
        """Whether its samples get a reward, from `rewards` or an environment."""
        return bool(self.rewards) or self.environment is not None

    @property
    def sequences_per_prompt(self) -> int:
        """Sequences learned per prompt."""
        return {"rlhf": self.samples_per_prompt, "sft": 1}.get(self.type, 2)

    @property
    def critic_source(self) -> ModelSpec:
        """The model the critic starts from. The critic reads the policy's tokens and is saved with the policy's
        tokenizer."""
        assert self.critic is not None, "ask a run that has a critic"
        paths = {FROM_POLICY: self.model.path, FROM_REWARD_MODEL: next((m.path for m in self.reward_models), "")}
        path = paths.get(self.critic.model, self.critic.model)
        return self.model.model_copy(update={"path": path, "tokenizer": self.model.tokenizer or self.model.path})

    @property
    def trained(self) -> Mapping[str, TrainingSpec]:
        """Settings of trained models, by function name (which is also the spec key)."""
        return {"learner": self.learner, **({} if self.critic is None else {"critic": self.critic})}

    @property
    def optimizers(self) -> Mapping[str, AdamWSpec]:
        """Optimizer settings of trained models, by function name."""
        return {"learner": self.optimizer, **({} if self.critic is None else {"critic": self.critic.optimizer})}

    def epochs_of(self, function: str) -> int:
        """Return the number of passes a function's model makes over the batch of a training step."""
        own = self.critic.epochs if self.critic is not None and function == "critic" else None
        return own or self.epochs

    def planned_updates(self, function: str) -> int:
        """Return the optimizer steps planned for a function over the whole run, assuming every step has enough groups
        for its mini-batches."""
        without = 0 if self.critic is None or function == "critic" else self.critic.warm_up_steps
        return (self.steps - without) * self.mini_batches * self.epochs_of(function)

    def updates_policy(self, step: int) -> bool:
        """Return whether the policy is updated in a training step (not during critic warm-up)."""
        return self.critic is None or step > self.critic.warm_up_steps

    def asked(self) -> Iterator[Size]:
        """Yield the sizes this spec requests."""
        prompts, samples, tokens = self.prompts_per_step, self.samples_per_prompt, self.generation.max_tokens
        yield Size("steps", "steps", self.steps, "steps")
        if self.supervised:
            yield from self._asked_of_responses()
            return
        made = f"prompts_per_step ({prompts:,}) x samples_per_prompt ({samples:,})"
        where = "samples_per_prompt" if samples > prompts else "prompts_per_step"
        yield Size("step_samples", where, prompts * samples, made)
        made = f"{made} x generation.max_tokens ({tokens:,})"
        yield Size("step_tokens", "generation.max_tokens", prompts * samples * tokens, made)
        samples = self.evaluation.samples_per_prompt
        own: list[HeldOutSpec | NamedSetSpec] = [self.data.held_out] if self.data.held_out else []
        sets = [*own, *self.evaluation.sets]
        if not sets:
            return
        prompts = sum(each.max_prompts for each in sets)
        key = "prompts.held_out.max_prompts" if self.data.held_out else "evaluation.sets.0.max_prompts"
        more = " and those of evaluation.sets" if len(sets) > 1 else ""
        made = f"{key}{more} ({prompts:,}) x evaluation.samples_per_prompt ({samples:,})"
        where = "evaluation.samples_per_prompt" if samples > prompts else key
        yield Size("held_out_samples", where, prompts * samples, made)
        made = f"{made} x generation.max_tokens ({tokens:,})"
        yield Size("step_tokens", "generation.max_tokens", prompts * samples * tokens, made)

    def _asked_of_responses(self) -> Iterator[Size]:
        prompts, each, held_out = self.prompts_per_step, self.sequences_per_prompt, self.data.held_out
        made = f"prompts_per_step ({prompts:,}) x {each} response(s)"
        yield Size("step_samples", "prompts_per_step", prompts * each, made)
        if held_out is not None:
            where, most = f"{self.data.section}.held_out.max_prompts", held_out.max_prompts
            yield Size("held_out_samples", where, most * each, f"{where} ({most:,}) x {each} response(s)")

    @property
    def reward_models(self) -> tuple[RewardModelSpec, ...]:
        """Rewards that run on their own replica."""
        return tuple(part for part in self.rewards if isinstance(part, RewardModelSpec))

    @property
    def judges(self) -> tuple[JudgeSpec, ...]:
        """Judges with a function of their own."""
        return tuple(part for part in self.rewards if isinstance(part, JudgeSpec) and part.path is not None)
