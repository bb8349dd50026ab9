"""RunSpec, the full spec of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlhfless.spec.algorithm import AlgorithmSpec, GRPOSpec, OwnAlgorithmSpec, PolicyLossSpec
from rlhfless.spec.base import Duration, Size, SizesSpec, SpecModel, size_problems
from rlhfless.spec.data import DataSpec, HeldOutSpec, ModelSpec, NamedSetSpec, PromptsSpec
from rlhfless.spec.errors import Problem
from rlhfless.spec.evaluation import CheckpointSpec, EvaluationSpec
from rlhfless.spec.explain import nearest, several
from rlhfless.spec.extension import PluginField, PluginSpec
from rlhfless.spec.fleet import PlacementSpec, RecoverySpec, ScalingSpec, TimeoutsSpec, WeightsSpec
from rlhfless.spec.generation import GenerationSpec
from rlhfless.spec.imports import load_target
from rlhfless.spec.learner import (
    FROM_POLICY,
    FROM_REWARD_MODEL,
    AdamWSpec,
    CriticSpec,
    Epochs,
    LearnerSpec,
    ReferenceSpec,
    ScoringSpec,
    TrainingSpec,
)
from rlhfless.spec.removed import REMOVED
from rlhfless.spec.rewards import RewardModelSpec, RewardSpec
from rlhfless.spec.schedule import PartialSpec, ScheduleSpec, SyncSpec
from rlhfless.spec.supervised import (
    DATA,
    DemonstrationsSpec,
    DPOSpec,
    PreferencesSpec,
    RunType,
    absent_key_problems,
    name_elsewhere,
    without_absent,
)

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

    jsonl: bool = True
    """Write one line of metrics per step to metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files under tensorboard/."""

    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on the loopback interface that serves Prometheus metrics. `null`: not served."""

    record_tokens: bool = False
    """Record prompts in the trace, and the text, token ids and logprobs of every response."""


OPTIMIZER_KEYS = MappingProxyType({"learner": "optimizer", "critic": "critic.optimizer"})
"""Spec keys of the sections in `RunSpec.optimizers`, by function."""


class RunSpec(SpecModel):
    """The spec of a run."""

    removed: ClassVar[Mapping[str, str]] = REMOVED
    """Removed or foreign key spellings, each refused with its own hint (rlhfless.spec.removed)."""

    name_elsewhere: ClassVar[Callable[[str, Any], str | None]] = staticmethod(name_elsewhere)
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

    rewards: Annotated[tuple[RewardSpec, ...], Field(max_length=64)] = ()
    """Rewards for type `rlhf`, which needs at least one."""

    dpo: DPOSpec = DPOSpec()
    scoring: ScoringSpec = ScoringSpec()
    algorithm: AlgorithmSpec = GRPOSpec()
    """RL algorithm: a name, `{type: ...}` with its own keys, or your own class (docs/extending.md)."""
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

    @field_validator("prompts", "demonstrations", "preferences", "rewards")
    @classmethod
    def _has_its_data(cls, value: Any, info: ValidationInfo) -> Any:
        needed = {*cls._needed(info.data["type"])} if "type" in info.data else set()
        if info.field_name in needed and not value:
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("checkpoint")
    @classmethod
    def _resolves_the_best(cls, checkpoint: CheckpointSpec, info: ValidationInfo) -> CheckpointSpec:
        run_type, evaluation = info.data.get("type"), info.data.get("evaluation")
        data = info.data.get(DATA[run_type]) if run_type else None
        if data is None or evaluation is None:
            return checkpoint  # one of them is refused
        held_out = data.held_out is not None or bool(evaluation.sets)
        best = checkpoint.best.resolved(supervised=run_type != "rlhf", held_out=held_out)
        return checkpoint.model_copy(update={"best": best})

    @staticmethod
    def _needed(run_type: RunType) -> tuple[str, ...]:
        """Return the sections, besides `model`, that a run type requires."""
        return (DATA[run_type], "rewards") if run_type == "rlhf" else (DATA[run_type],)

    @model_validator(mode="after")
    def _has_the_keys_of_its_type(self) -> RunSpec:
        problems = [*absent_key_problems(self, self.type)]
        if self.supervised and self.placement.mode == "disaggregated":
            what = f"a run of type {self.type} has no generation that could use separate devices"
            problems.append(Problem("placement.mode", what, "leave it out: the learner has all devices"))
        if problems:
            raise several(problems)
        return self

    @model_serializer(mode="wrap")
    def _with_the_keys_of_its_type(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_absent(dump(self), self.type)

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
    def needs_reference(self) -> bool:
        """Whether the run needs a reference function."""
        return self.type == "dpo" or (not self.supervised and self.algorithm.needs.reference)

    @property
    def sequences_per_prompt(self) -> int:
        """Sequences learned per prompt."""
        return {"rlhf": self.samples_per_prompt, "sft": 1}.get(self.type, 2)

    @field_validator("functions")
    @classmethod
    def _own_names_are_free(cls, functions: dict[str, PluginSpec]) -> dict[str, PluginSpec]:
        # Built-in functions have the names of their sections, except `reward_model` (started by rewards) and `prefill`
        # (a section of `scaling`).
        if taken := sorted({*functions} & {*cls.model_fields, "reward_model", "prefill"}):
            raise ValueError(f"{taken[0]!r} is taken by the runtime; give your function another name")
        return functions

    @model_validator(mode="after")
    def _algorithm_gets_what_it_needs(self) -> RunSpec:
        name, needs = self.algorithm.type, self.algorithm.needs
        if self.samples_per_prompt < needs.samples_per_prompt:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but {name} compares the samples of a prompt with "
                f"each other; set it to {needs.samples_per_prompt} or more"
            )
        if needs.values and isinstance(self.algorithm, OwnAlgorithmSpec):
            target = load_target(self.algorithm.type)
            if lacks := [method for method in ("returns", "value_loss") if not hasattr(target, method)]:
                raise ValueError(f"{name} needs values, and has no `{lacks[0]}`: see `needs` in docs/extending.md")
        if needs.values and self.critic is None:
            raise ValueError(f"{name} needs the values of a critic; add `critic: {{}}`, or keys of that section")
        if self.critic is not None and not needs.values:
            raise ValueError(f"{name} uses no values, so the critic would learn for nothing; leave `critic` out")
        return self

    @model_validator(mode="after")
    def _the_critic_starts_from_something(self) -> RunSpec:
        critic, models = self.critic, self.reward_models
        if critic is None:
            return self
        if critic.model == FROM_REWARD_MODEL and len(models) != 1:
            raise ValueError(
                f"critic.model is {FROM_REWARD_MODEL}, and the run has {len(models)} rewards of type reward_model; "
                "name the folder of one instead"
            )
        if critic.warm_up_steps >= self.steps:
            raise ValueError(
                f"critic.warm_up_steps is {critic.warm_up_steps}, and the run has {self.steps} steps: the policy would "
                "never be updated; set it below `steps`"
            )
        return self

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

    @model_validator(mode="after")
    def _rates_have_steps_to_fall_in(self) -> RunSpec:
        for function, optimizer in self.optimizers.items():
            planned, where = self.planned_updates(function), OPTIMIZER_KEYS[function]
            if optimizer.rate_schedule != "constant" and optimizer.warmup_steps >= planned:
                raise ValueError(
                    f"{where}.warmup_steps is {optimizer.warmup_steps}, and the run plans {planned} optimiser steps: "
                    f"none is left for rate_schedule {optimizer.rate_schedule}; set warmup_steps below {planned}, or "
                    "rate_schedule to constant"
                )
        return self

    def updates_policy(self, step: int) -> bool:
        """Return whether the policy is updated in a training step (not during critic warm-up)."""
        return self.critic is None or step > self.critic.warm_up_steps

    @model_validator(mode="after")
    def _is_within_its_sizes(self) -> RunSpec:
        if problems := size_problems(self.asked(), self.sizes):
            raise several(problems)
        return self

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

    @model_validator(mode="after")
    def _scoring_ends_before_its_call(self) -> RunSpec:
        if self.scoring.timeout_s >= self.timeouts.call_s:
            raise ValueError(
                f"scoring.timeout_s ({self.scoring.timeout_s:g}) must be below timeouts.call_s "
                f"({self.timeouts.call_s:g}): a slow reward would stop the run instead of losing its samples"
            )
        return self

    @model_validator(mode="after")
    def _prefilled_kv_reaches_the_actors(self) -> RunSpec:
        prefill, transport = self.scaling.prefill, self.weights.transport
        if not prefill.on:
            return self
        apart = f"scaling.prefill.max_actors is {prefill.max_actors}"
        if prefill.kv_connector == "folder" and transport in ("http", "nccl"):
            raise ValueError(
                f"scaling.prefill.kv_connector is folder, but weights.transport is {transport}: engines share no "
                "folder; set weights.transport to shared_memory or file, or kv_connector to nixl"
            )
        if self.generation.speculation.has_weights:
            method = self.generation.speculation.method
            raise ValueError(
                f"{apart}, but generation.speculation.method is {method}, which has KV of its own that no connector "
                "moves; set method to ngram, suffix or off, or max_actors to 0"
            )
        if self.schedule.in_flight:
            raise ValueError(
                f"{apart}, but schedule.in_flight is true: KV on its way between engines cannot be computed again with "
                "new weights; set schedule.in_flight to false, or max_actors to 0"
            )
        if self.placement.in_turns:
            raise ValueError(
                f"{apart}, but functions take turns on their devices (placement.turns, placement.tenants): engines "
                "that give KV and engines that take it are awake together; set max_actors to 0, or turns to false"
            )
        if transport in ("nccl", "cuda_ipc"):
            raise ValueError(
                f"{apart}, but weights.transport is {transport}, which reaches generation actors only; "
                "set it to auto, or max_actors to 0"
            )
        return self

    @model_validator(mode="after")
    def _drafts_outlive_a_sleep(self) -> RunSpec:
        method = self.generation.speculation.method
        if self.generation.speculation.has_weights and self.placement.in_turns:
            raise ValueError(
                f"generation.speculation.method is {method}, but functions take turns on their devices: a sleeping "
                "engine drops the draft model's weights, and no version restores them; set method to ngram or suffix, "
                "or placement.turns to false"
            )
        return self

    @model_validator(mode="after")
    def _rounded_samples_are_corrected_for(self) -> RunSpec:
        quantization, loss = self.generation.quantization, self.algorithm
        if quantization != "off" and isinstance(loss, PolicyLossSpec) and loss.importance is None:
            raise ValueError(
                f"generation.quantization is {quantization}, so samples are generated with other weights than the "
                "learner's, but algorithm.importance is null: nothing corrects for that; leave `importance` out for "
                "its default, truncated weights, or set generation.quantization to off"
            )
        return self

    @model_validator(mode="after")
    def _a_broadcast_has_a_fixed_group(self) -> RunSpec:
        actors = self.scaling.generation
        if self.weights.transport == "nccl" and actors.min_actors != actors.max_actors:
            raise ValueError(
                f"weights.transport is nccl, but scaling.generation has min_actors {actors.min_actors} and max_actors "
                f"{actors.max_actors}: a broadcast needs a fixed number of actors; make the two equal, or set "
                "weights.transport to auto"
            )
        return self

    @model_validator(mode="after")
    def _the_learner_may_shrink(self) -> RunSpec:
        if self.learner.min_ranks is not None and self.placement.tenants > 1:
            raise ValueError(
                f"learner.min_ranks is {self.learner.min_ranks}, but placement.tenants is {self.placement.tenants}: "
                "devices that runs share are taken in turns, all at once; leave min_ranks out, or set tenants to 1"
            )
        if self.learner.min_ranks is not None and self.weights.transport == "cuda_ipc":
            raise ValueError(
                f"learner.min_ranks is {self.learner.min_ranks}, but weights.transport is cuda_ipc: an actor needs a "
                "rank of the learner on each of its GPUs; set weights.transport to auto, or leave min_ranks out"
            )
        return self

    @model_validator(mode="after")
    def _an_average_can_be_published(self) -> RunSpec:
        if self.learner.average_decay is not None and self.weights.transport == "cuda_ipc":
            raise ValueError(
                "learner.ema_decay is given, but weights.transport is cuda_ipc, which has the learner's own weights "
                "only, and evaluations load their average; set weights.transport to auto, or leave ema_decay out"
            )
        return self

    @model_validator(mode="after")
    def _old_weights_are_allowed_for(self) -> RunSpec:
        """Check what a schedule with stale samples needs: an off-policy correction and, if it generates ahead, old
        weight versions and devices to overlap on."""
        behind, of = self.schedule.max_staleness, f"schedule.type is {self.schedule.type}"
        if not behind:
            return self
        overlaps = self.schedule.steps_ahead > 0
        if overlaps and self.placement.in_turns:
            raise ValueError(
                f"{of}, but functions take turns on their devices (placement.turns, placement.tenants): nothing would "
                "overlap, and samples would be old for nothing; set schedule to sync, or placement.turns to false"
            )
        if overlaps and self.weights.transport == "cuda_ipc":
            raise ValueError(
                f"{of}, but weights.transport is cuda_ipc, which has the newest version only; set weights.transport to "
                "auto"
            )
        engine = self.generation.engine
        own = load_target(engine.type) if ":" in engine.type else None
        if self.schedule.in_flight and own is not None and not getattr(own, "loads_in_flight", False):
            raise ValueError(
                f"{of}, but the engine {engine.type} cannot load weights while it generates (`loads_in_flight` in "
                "functions/generation/engine.py); set schedule.in_flight to false"
            )
        loss = self.algorithm
        if isinstance(loss, PolicyLossSpec) and loss.importance is None and loss.rejection is None:
            raise ValueError(
                f"{of}, so samples are up to {behind} versions old, but algorithm.importance and algorithm.rejection "
                "are null: nothing corrects for that; leave `importance` out for its default, or set schedule to sync"
            )
        return self

    @model_validator(mode="after")
    def _what_is_begun_is_what_is_learned(self) -> RunSpec:
        """Refuse prompt replacement with the `partial` schedule, where a step generates only its own groups."""
        if isinstance(self.schedule, PartialSpec) and self.algorithm.needs.redraws:
            raise ValueError(
                f"schedule.type is partial, which leaves groups to later steps, but {self.algorithm.type} "
                "replaces prompts without signal within a step; set algorithm.max_redraws to 0, "
                "or schedule to sync"
            )
        return self

    @model_validator(mode="after")
    def _mini_batches_have_groups(self) -> RunSpec:
        if self.mini_batches > self.prompts_per_step:
            raise ValueError(
                f"mini_batches ({self.mini_batches}) is above prompts_per_step ({self.prompts_per_step}): "
                "a mini-batch would be empty"
            )
        return self

    @model_validator(mode="after")
    def _every_set_has_a_reward(self) -> RunSpec:
        if self.supervised:
            return self
        sets = {*self.data.weights, *(each.name for each in self.evaluation.sets)}
        for index, part in enumerate(self.rewards):
            if unknown := sorted({*(part.sets or ())} - sets):
                hint = nearest(unknown[0], sets) or "name sets of prompts.mixture or evaluation.sets, or leave it out"
                raise ValueError(f"rewards.{index}.sets has {unknown[0]!r}, which no set is called; {hint}")
        for name in sorted(sets) if self.data.mixed else ["", *sorted(sets)]:
            if not any(part.scores(name) for part in self.rewards):
                what = f"the set {name!r}" if name else "the training prompts, which have no set"
                raise ValueError(f"no reward is for {what}; add one, or its name to the `sets` of one")
        return self

    @model_validator(mode="after")
    def _reward_names_differ(self) -> RunSpec:
        labels = [part.label for part in self.rewards]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two rewards are called {twice[0]!r}; give one of them another `name`")
        return self
