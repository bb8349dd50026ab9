"""RunSpec, the full spec of a run: the keys of each run type, and combinations of keys that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

from pydantic import (
    BaseModel,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlhfless.spec.algorithm import OwnAlgorithmSpec, PolicyLossSpec
from rlhfless.spec.base import size_problems
from rlhfless.spec.data import DATA, RunType
from rlhfless.spec.environment import MCP
from rlhfless.spec.errors import Problem
from rlhfless.spec.evaluation import CheckpointSpec
from rlhfless.spec.explain import nearest, several
from rlhfless.spec.extension import PluginSpec
from rlhfless.spec.generation import PartialSpec
from rlhfless.spec.imports import load_target
from rlhfless.spec.keys import RunKeys
from rlhfless.spec.learner import FROM_REWARD_MODEL
from rlhfless.spec.removed import NAMES, REMOVED
from rlhfless.spec.rewards import JUDGE_PREFIX
from rlhfless.spec.teachers import FUNCTION_PREFIX, teacher_problems

_OF_RLHF = (
    "prompts",
    "rewards",
    "environment",
    "scoring",
    "algorithm",
    "teachers",
    "generation",
    "samples_per_prompt",
    "schedule",
    "critic",
    "functions",
    "weights",
    "evaluation.samples_per_prompt",
    "evaluation.pass_at",
    "evaluation.pass_from",
    "evaluation.sets",
    "scaling.policy",
    "scaling.contract",
    "scaling.generation",
    "scaling.prefill",
    "scaling.hold_scoring",
)
_OF_REFERENCE = ("reference", "scaling.hold_reference")

ABSENT: Mapping[RunType, tuple[str, ...]] = {
    "rlhf": ("demonstrations", "preferences", "dpo"),
    "sft": (*_OF_RLHF, *_OF_REFERENCE, "preferences", "dpo"),
    "reward_model": (
        *_OF_RLHF,
        *_OF_REFERENCE,
        "demonstrations",
        "dpo",
        "model.lora",
        "learner.logits_mib",
        "learner.head_dtype",
    ),
    "dpo": (*_OF_RLHF, "demonstrations"),
}
"""Keys that do not apply to each run type. They are refused if given, and not written to its spec.yaml."""


def name_elsewhere(key: str, values: Any) -> str | None:
    """Return the dotted spec key for another tool's setting `key`, given the spec's values."""
    name = NAMES.get(key)
    run_type = cast(RunType, values.get("type", "rlhf") if isinstance(values, Mapping) else "rlhf")
    if name is None or run_type not in DATA:
        return name
    if name.startswith("prompts."):
        return name.replace("prompts", DATA[run_type], 1)
    return None if any(f"{name}.".startswith(f"{absent}.") for absent in ABSENT[run_type]) else name


def absent_key_problems(spec: BaseModel, run_type: RunType) -> Iterator[Problem]:
    """Yield a problem for each given key that the run type does not have."""
    for key in ABSENT[run_type]:
        if _is_given(spec, key.split(".")):
            what = f"a run of type {run_type} has no such key"
            yield Problem(key, what, f"leave it out; docs/supervised.md has the keys of each type, and {_types(key)}")


def _types(key: str) -> str:
    having = [name for name, keys in ABSENT.items() if key not in keys]
    return f"it is of {' and '.join(having)}"


def _is_given(model: Any, path: list[str]) -> bool:
    name, *below = path
    return name in model.model_fields_set and (not below or _is_given(getattr(model, name), below))


def without_absent(values: dict[str, Any], run_type: RunType) -> dict[str, Any]:
    """Return a dumped spec without the keys that its type does not have."""
    left = dict(values)
    for key in ABSENT[run_type]:
        section, _, below = key.partition(".")
        if below and section in left:
            left[section] = {name: value for name, value in left[section].items() if name != below}
        elif not below:
            left.pop(section, None)
    return left


def _is_scored(values: Mapping[str, Any]) -> bool:
    """Return whether a spec with these sections has a reward."""
    return bool(values.get("rewards")) or values.get("environment") is not None


OPTIMIZER_KEYS = MappingProxyType({"learner": "optimizer", "critic": "critic.optimizer"})
"""Spec keys of the sections in `RunSpec.optimizers`, by function."""


def check_agreement(spec: RunKeys) -> None:
    """Raise ValueError for the first keys of a spec that exclude each other."""
    for check in _CHECKS:
        check(spec)


def _check_algorithm(spec: RunKeys) -> None:
    name, needs = spec.algorithm.type, spec.algorithm.needs
    if spec.samples_per_prompt < needs.samples_per_prompt:
        raise ValueError(
            f"samples_per_prompt is {spec.samples_per_prompt}, but {name} compares the samples of a prompt with "
            f"each other; set it to {needs.samples_per_prompt} or more"
        )
    if needs.values and isinstance(spec.algorithm, OwnAlgorithmSpec):
        target = load_target(spec.algorithm.type)
        if lacks := [method for method in ("returns", "value_loss") if not hasattr(target, method)]:
            raise ValueError(f"{name} needs values, and has no `{lacks[0]}`: see `needs` in docs/extending.md")
    if needs.values and spec.critic is None:
        raise ValueError(f"{name} needs the values of a critic; add `critic: {{}}`, or keys of that section")
    if spec.critic is not None and not needs.values:
        raise ValueError(f"{name} uses no values, so the critic would learn for nothing; leave `critic` out")


def _check_teachers(spec: RunKeys) -> None:
    if spec.supervised:
        return
    needs, name = spec.algorithm.needs, spec.algorithm.type
    if needs.teachers and not spec.teachers:
        raise ValueError(
            f"{name} learns from `teachers`, and there are none; add `teachers: [{{name: ..., path: ...}}]`"
            + ("" if name == "distill" else ", or set algorithm.distill.coefficient to 0")
        )
    if spec.teachers and not needs.teachers:
        raise ValueError(
            f"teachers is given, but {name} does not learn from them; set algorithm.distill.coefficient, or "
            "algorithm.type to distill"
        )
    sets, call_s = [*spec.data.weights], spec.timeouts.call_s
    for problem in teacher_problems(spec.teachers, sets, spec.generation.temperature, call_s):
        raise ValueError(problem)
    read = next((each for each in spec.teachers if each.prompt_field), None)
    if read is not None and spec.environment is not None:
        raise ValueError(
            f"teachers has prompt_field {read.prompt_field!r} for {read.name!r}, but the run has an environment, which "
            "opens its episodes itself; leave prompt_field out"
        )


def _check_critic(spec: RunKeys) -> None:
    critic, models = spec.critic, spec.reward_models
    if critic is None:
        return
    if critic.model == FROM_REWARD_MODEL and len(models) != 1:
        raise ValueError(
            f"critic.model is {FROM_REWARD_MODEL}, and the run has {len(models)} rewards of type reward_model; "
            "name the folder of one instead"
        )
    if critic.warm_up_steps >= spec.steps:
        raise ValueError(
            f"critic.warm_up_steps is {critic.warm_up_steps}, and the run has {spec.steps} steps: the policy would "
            "never be updated; set it below `steps`"
        )


def _check_rates(spec: RunKeys) -> None:
    for function, optimizer in spec.optimizers.items():
        planned, where = spec.planned_updates(function), OPTIMIZER_KEYS[function]
        if optimizer.rate_schedule != "constant" and optimizer.warmup_steps >= planned:
            raise ValueError(
                f"{where}.warmup_steps is {optimizer.warmup_steps}, and the run plans {planned} optimiser steps: "
                f"none is left for rate_schedule {optimizer.rate_schedule}; set warmup_steps below {planned}, or "
                "rate_schedule to constant"
            )


def _check_sizes(spec: RunKeys) -> None:
    if problems := size_problems(spec.asked(), spec.sizes):
        raise several(problems)


def _check_scoring(spec: RunKeys) -> None:
    if spec.scoring.timeout_s >= spec.timeouts.call_s:
        raise ValueError(
            f"scoring.timeout_s ({spec.scoring.timeout_s:g}) must be below timeouts.call_s "
            f"({spec.timeouts.call_s:g}): a slow reward would stop the run instead of losing its samples"
        )


def _check_prefill(spec: RunKeys) -> None:
    prefill, transport = spec.scaling.prefill, spec.weights.transport
    if not prefill.on:
        return
    apart = f"scaling.prefill.max_actors is {prefill.max_actors}"
    if prefill.kv_connector == "folder" and transport in ("http", "nccl"):
        raise ValueError(
            f"scaling.prefill.kv_connector is folder, but weights.transport is {transport}: engines share no "
            "folder; set weights.transport to shared_memory or file, or kv_connector to nixl"
        )
    if spec.generation.speculation.has_weights:
        method = spec.generation.speculation.method
        raise ValueError(
            f"{apart}, but generation.speculation.method is {method}, which has KV of its own that no connector "
            "moves; set method to ngram, suffix or off, or max_actors to 0"
        )
    if spec.schedule.in_flight:
        raise ValueError(
            f"{apart}, but schedule.in_flight is true: KV on its way between engines cannot be computed again with "
            "new weights; set schedule.in_flight to false, or max_actors to 0"
        )
    if spec.placement.in_turns:
        raise ValueError(
            f"{apart}, but functions take turns on their devices (placement.turns, placement.tenants): engines "
            "that give KV and engines that take it are awake together; set max_actors to 0, or turns to false"
        )
    if transport in ("nccl", "cuda_ipc"):
        raise ValueError(
            f"{apart}, but weights.transport is {transport}, which reaches generation actors only; "
            "set it to auto, or max_actors to 0"
        )


def _check_environment(spec: RunKeys) -> None:
    if spec.environment is not None and spec.scaling.prefill.on:
        raise ValueError(
            f"scaling.prefill.max_actors is {spec.scaling.prefill.max_actors}, but the run has an environment: its "
            "prompts grow from turn to turn on the actor that has their KV; set max_actors to 0"
        )
    if spec.environment is None or spec.supervised:
        return
    if spec.environment.type == MCP and not spec.rewards:
        raise ValueError("rewards is empty, and MCP servers give no reward; add one that scores the transcript")
    column = spec.data.prompt_field  # actors read the prompts of rows, and know one column for all sets
    for index, each in enumerate(spec.data.mixed):
        if each.prompt_field not in (None, column):
            raise ValueError(
                f"prompts.mixture.{index}.prompt_field is {each.prompt_field!r}, but the run has an environment, which "
                f"reads the prompts of all sets from `prompts.prompt_field` ({column!r}); rename the column of the set "
                f"{each.name!r}"
            )


def _check_drafts(spec: RunKeys) -> None:
    method = spec.generation.speculation.method
    if spec.generation.speculation.has_weights and spec.placement.engines_in_turns:
        raise ValueError(
            f"generation.speculation.method is {method}, but functions take turns on their devices: a sleeping "
            "engine drops the draft model's weights, and no version restores them; set method to ngram or suffix, "
            "or placement.turns to false"
        )


def _check_quantization(spec: RunKeys) -> None:
    quantization, loss = spec.generation.quantization, spec.algorithm
    if quantization != "off" and isinstance(loss, PolicyLossSpec) and loss.importance is None:
        raise ValueError(
            f"generation.quantization is {quantization}, so samples are generated with other weights than the "
            "learner's, but algorithm.importance is null: nothing corrects for that; leave `importance` out for "
            "its default, truncated weights, or set generation.quantization to off"
        )


def _check_lora(spec: RunKeys) -> None:
    if spec.type == "rlhf" and spec.model.lora is None and spec.generation.lora != "auto":
        raise ValueError(
            f"generation.lora is {spec.generation.lora}, but the run trains all weights; give model.lora, or leave "
            "generation.lora out"
        )
    if spec.placement.share is None:
        return
    if spec.type != "rlhf" or spec.model.lora is None:
        raise ValueError(
            "placement.share is adapters, but the run trains no adapter for engines; give model.lora in a run of type "
            "rlhf, or leave placement.share out"
        )
    if spec.generation.lora == "merged":
        raise ValueError(
            "placement.share is adapters, but generation.lora is merged: an engine has one set of weights; leave "
            "generation.lora out"
        )


def _check_router_replay(spec: RunKeys) -> None:
    replay, speculation, engine = spec.router_replay, spec.generation.speculation, spec.generation.engine
    if replay == "off" or spec.supervised:
        return
    asked = f"algorithm.router_replay is {replay}"
    if spec.learner.compile:
        raise ValueError(
            f"{asked}, but learner.compile is true: the choice of experts of a compiled layer cannot be replaced; set "
            "one of them to its default"
        )
    if replay != "engine":
        return
    if engine.type != "vllm":
        raise ValueError(
            f"{asked}, but generation.engine.type is {engine.type}, which records no routes; use vllm, or "
            "router_replay: recorded"
        )
    if speculation.remembers:
        raise ValueError(
            f"{asked}, but generation.speculation.method is {speculation.method}, which needs vLLM's older model "
            "runner, and vLLM records routes in the newer one alone; set method to ngram, draft_model, eagle3, mtp or "
            "off, or router_replay to recorded"
        )
    if spec.scaling.prefill.connector == "nixl":
        raise ValueError(
            f"{asked}, but scaling.prefill.kv_connector is nixl: vLLM refuses to record routes with this connector, "
            "because those of prompts stay in the engine that computed them; set scaling.prefill.max_actors to 0, or "
            "router_replay to recorded"
        )
    for key in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if engine.extra.get(key, 1) != 1:
            raise ValueError(
                f"{asked}, but generation.engine.extra has {key}: vLLM refuses to record routes when several workers "
                "have different layers or tokens; leave it out, or set router_replay to recorded"
            )
    if engine.extra.get("enable_prefix_caching", True) is not True:
        raise ValueError(
            f"{asked}, but generation.engine.extra has enable_prefix_caching: vLLM keeps routes beside its prefix "
            "cache; leave it out, or set router_replay to recorded"
        )


def _check_broadcast(spec: RunKeys) -> None:
    actors = spec.scaling.generation
    if spec.weights.transport == "nccl" and actors.min_actors != actors.max_actors:
        raise ValueError(
            f"weights.transport is nccl, but scaling.generation has min_actors {actors.min_actors} and max_actors "
            f"{actors.max_actors}: a broadcast needs a fixed number of actors; make the two equal, or set "
            "weights.transport to auto"
        )


def _check_average(spec: RunKeys) -> None:
    if spec.learner.average_decay is not None and spec.weights.transport == "cuda_ipc":
        raise ValueError(
            "learner.ema_decay is given, but weights.transport is cuda_ipc, which has the learner's own weights "
            "only, and evaluations load their average; set weights.transport to auto, or leave ema_decay out"
        )


def _check_staleness(spec: RunKeys) -> None:
    """Check what a schedule with stale samples needs: an off-policy correction and, if it generates ahead, old
    weight versions and devices to overlap on."""
    behind, of = spec.schedule.max_staleness, f"schedule.type is {spec.schedule.type}"
    if not behind:
        return
    overlaps = spec.schedule.steps_ahead > 0
    if overlaps and spec.placement.engines_in_turns:
        raise ValueError(
            f"{of}, but functions take turns on their devices (placement.turns, placement.tenants): nothing would "
            "overlap, and samples would be old for nothing; set schedule to sync, or placement.turns to false"
        )
    if overlaps and spec.weights.transport == "cuda_ipc":
        raise ValueError(
            f"{of}, but weights.transport is cuda_ipc, which has the newest version only; set weights.transport to auto"
        )
    engine = spec.generation.engine
    own = load_target(engine.type) if ":" in engine.type else None
    if spec.schedule.in_flight and own is not None and not getattr(own, "loads_in_flight", False):
        raise ValueError(
            f"{of}, but the engine {engine.type} cannot load weights while it generates (`loads_in_flight` in "
            "functions/generation/engine.py); set schedule.in_flight to false"
        )
    loss = spec.algorithm
    if isinstance(loss, PolicyLossSpec) and loss.importance is None and loss.rejection is None:
        raise ValueError(
            f"{of}, so samples are up to {behind} versions old, but algorithm.importance and algorithm.rejection "
            "are null: nothing corrects for that; leave `importance` out for its default, or set schedule to sync"
        )


def _check_partial(spec: RunKeys) -> None:
    """Refuse prompt replacement with the `partial` schedule, where a step generates only its own groups."""
    if isinstance(spec.schedule, PartialSpec) and spec.algorithm.needs.redraws:
        raise ValueError(
            f"schedule.type is partial, which leaves groups to later steps, but {spec.algorithm.type} "
            "replaces prompts without signal within a step; set algorithm.max_redraws to 0, "
            "or schedule to sync"
        )


def _check_mini_batches(spec: RunKeys) -> None:
    if spec.mini_batches > spec.prompts_per_step:
        raise ValueError(
            f"mini_batches ({spec.mini_batches}) is above prompts_per_step ({spec.prompts_per_step}): "
            "a mini-batch would be empty"
        )


def _check_sets(spec: RunKeys) -> None:
    if spec.supervised:
        return
    sets = {*spec.data.weights, *(each.name for each in spec.evaluation.sets)}
    for index, part in enumerate(spec.rewards):
        if unknown := sorted({*(part.sets or ())} - sets):
            hint = nearest(unknown[0], sets) or "name sets of prompts.mixture or evaluation.sets, or leave it out"
            raise ValueError(f"rewards.{index}.sets has {unknown[0]!r}, which no set is called; {hint}")
    if spec.environment is not None or not (spec.rewards or spec.algorithm.needs.rewards):
        return
    for name in sorted(sets) if spec.data.mixed else ["", *sorted(sets)]:
        if not any(part.scores(name) for part in spec.rewards):
            what = f"the set {name!r}" if name else "the training prompts, which have no set"
            raise ValueError(f"no reward is for {what}; add one, or its name to the `sets` of one")


def _check_reward_names(spec: RunKeys) -> None:
    labels = [part.label for part in spec.rewards]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(f"two rewards are called {twice[0]!r}; give one of them another `name`")


_CHECKS = (
    _check_algorithm,
    _check_teachers,
    _check_critic,
    _check_rates,
    _check_sizes,
    _check_scoring,
    _check_prefill,
    _check_environment,
    _check_drafts,
    _check_quantization,
    _check_lora,
    _check_broadcast,
    _check_average,
    _check_router_replay,
    _check_staleness,
    _check_partial,
    _check_mini_batches,
    _check_sets,
    _check_reward_names,
)


class RunSpec(RunKeys):
    """The spec of a run."""

    removed: ClassVar[Mapping[str, str]] = REMOVED
    """Removed or foreign key spellings, each refused with its own hint (rlhfless.spec.removed)."""

    name_elsewhere: ClassVar[Callable[[str, Any], str | None]] = staticmethod(name_elsewhere)

    @field_validator("prompts", "demonstrations", "preferences", "rewards")
    @classmethod
    def _has_its_data(cls, value: Any, info: ValidationInfo) -> Any:
        needed = {*cls._needed(info.data["type"])} if "type" in info.data else set()
        if info.field_name == "rewards":
            algorithm = info.data.get("algorithm")
            if info.data.get("environment") is not None or algorithm is None or not algorithm.needs.rewards:
                return value
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
        held_out = held_out and (run_type != "rlhf" or _is_scored(info.data))
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

    @field_validator("functions")
    @classmethod
    def _own_names_are_free(cls, functions: dict[str, PluginSpec]) -> dict[str, PluginSpec]:
        # Built-in functions have the names of their sections, except `reward_model` (started by rewards) and `prefill`
        # (a section of `scaling`).
        taken = sorted({*functions} & {*cls.model_fields, "reward_model", "prefill"})
        if taken := taken + sorted(name for name in functions if name.startswith((FUNCTION_PREFIX, JUDGE_PREFIX))):
            raise ValueError(f"{taken[0]!r} is taken by the runtime; give your function another name")
        return functions

    @model_validator(mode="after")
    def _keys_agree(self) -> RunSpec:
        check_agreement(self)
        return self
