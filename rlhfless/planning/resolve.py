"""Resolve a run for its devices, once: `resolve(spec, cluster)` decides every value that the spec leaves open.

Keys set by the user are never changed. The result is written to the run's own spec.yaml, so a resumed run keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from rlhfless.planning.inputs import (
    DeviceCount,
    devices_of,
    draft_shape,
    frozen_shapes,
    host_memory_bytes,
    reward_shapes,
    shape_of,
)
from rlhfless.planning.memory_plan import MemoryPlan, Question, edited, is_set
from rlhfless.planning.placement_search import (
    BATCH_TOKENS,
    MAX_SEQUENCES,
    MOST,
    TENSOR_PARALLEL,
    open_checkpointing,
    open_ranks,
    placed,
    with_fewest_actors,
)
from rlhfless.planning.suggestions import nearest_change
from rlhfless.scaling.latency.devices import UnknownDevice, device_of, load_devices
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import version_bytes
from rlhfless.scaling.placement import CPU_KIND, Node, PlacementError
from rlhfless.spec import DType, RunSpec
from rlhfless.spec.data import is_path
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.load import differences

PROMPT_TOKENS = 1024
"""Room for a prompt if the prompts have not been read: the longest sequence is this plus `generation.max_tokens`."""

RESPONSE_TOKENS = 1024
"""Room for a written response, for runs that learn from written responses."""

SLOWEST_BYTES_PER_S = 1e8
"""Rate of the slowest network by which weights reach a node: 1 Gbit/s minus its overhead. This machine's store was
measured at 5 to 16 times that (docs/benchmarks.md)."""

SMALL_SHARE, MINUTE_S = 0.1, 60.0
"""Timeouts grow with the model only if that adds at least this share, and in whole minutes: 601 s would look like a
mistake."""

SLOWEST_SHARE = 0.05
"""Lowest share of a device's peak at which a learner counts as working rather than hanging. Learners reach 20 to 50 %.
"""


MOST_DRAFTING_SEQUENCES = 32
"""Maximum sequences of an actor on a GPU that drafts from other responses. vLLM's older model runner launches a noise
kernel per seeded row, estimated from its code at 3 to 6 ms per iteration at 256 rows, as long as a small model's pass.
"""

REASONS = {
    "dtype": "GPUs compute in 16 bits",
    "lora": "the smaller of the versions that engines there can load",
    "max_tokens": "half of the model's context is left to prompts",
    "devices": "as many as it may have there",
    "mode": "the cheapest placement that fits",
    "learner_devices": "a device for each rank of the learner",
    "turns": "the functions fit only in turns",
    "gpu_memory_fraction": "the largest engine that leaves room for the learner",
    "tensor_parallel_size": "the fewest devices that hold an engine",
    "max_actors": "as many actors as their devices hold",
    "max_sequences": "the largest batch for which the KV cache has room",
    "max_batch_tokens": "the largest batch for which the KV cache has room",
    "ranks": "as many as the devices hold",
    "reward_model_ranks": "as many as the devices hold",
    "shard_ranks": "states are sharded within a node",
    "expert_parallel": "as many ranks of a node as divide the experts",
    "gradient_checkpointing": "activations are kept where memory is left",
    "offload": "states fit in no other way",
    "micro_batch_tokens": "the largest pass with room to spare",
    "logits_mib": "the largest block of logits with room to spare",
    "start_s": "reading this model at the slowest rate takes longer",
    "sync_s": "pulling this model at the slowest rate takes longer",
    "call_s": "a learning step at the slowest rate takes longer",
    "generate_s": "responses at the slowest rate take longer",
}
"""Why a key gets its value on GPUs, by the last part of the key."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A value that the spec left open."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run on its devices. Every value is decided: nothing changes the spec after this."""

    spec: RunSpec
    devices: DeviceCount
    """Kind and number of the run's devices, without a learner's of another kind."""
    asked: Question | None
    """The run with its model's sizes; None if they are unknown, and for a model of the hub on CPU cores."""
    memory: MemoryPlan | None
    """None without sizes, and with too few devices for a placement, which preflight reports."""
    decided: tuple[Decided, ...]

    def problems(self, shape: ModelShape | None) -> list[Problem]:
        """Return why the run cannot start on its devices: refused settings and insufficient memory.

        `shape` is that of the loaded model. On CPU cores, whose memory other programs share, and for unknown sizes,
        memory is never a reason.
        """
        kind = self.devices.kind
        problems = [*quantization_problems(self.spec, kind, shape), *device_problems(self.spec, kind, shape)]
        if self.asked is None or self.memory is None or self.memory.fits or on_cores(self.spec, kind):
            return problems
        change = nearest_change(self.asked)
        hint = f"it fits with {change.text}" if change else "see docs/sizing.md"
        devices = " and ".join(f"{number} x {of}" for of, number in self.asked.devices.items())
        what = f"{devices} do not hold the run: {'; '.join(self.memory.problems)}"
        return [*problems, Problem("placement", what, hint)]

    def loading_bytes(self) -> int:
        """Return the bytes of host memory needed to load the functions, over all nodes.

        The result is 0 on CPU cores, whose memory other programs share, and for unknown sizes.
        """
        return 0 if self.memory is None or on_cores(self.spec, self.devices.kind) else self.memory.host_bytes


def resolve(
    spec: RunSpec, cluster: Sequence[Node] | DeviceCount, sequence_tokens: int | None = None, *, required: bool = False
) -> ResolvedRun:
    """Decide what a spec leaves open, for the devices that the run gets on these nodes.

    `sequence_tokens` is the length of the longest sequence; without it, prompts have PROMPT_TOKENS. If the model's
    sizes are unknown, only values that depend on the kind of the devices are decided. For CPU cores the sizes are not
    fetched from the hub. Raises PlacementError if no kind can be chosen.

    With `required` there is always a memory plan: sizes are fetched, and InputError or PlacementError says why
    there is none.
    """
    devices = cluster if isinstance(cluster, DeviceCount) else devices_of(spec, cluster)
    given = spec
    if spec.placement.size_range is not None:
        spec = edited(spec, {"placement.devices": devices.count})
    asked = memory = None
    if required or is_path(spec.model.path) or not on_cores(spec, devices.kind):
        try:
            asked = question_of(spec, devices.kind, devices.count, sequence_tokens)
            memory = asked.plan()
        except (InputError, UnknownDevice, PlacementError):  # unknown, or reported by preflight
            if required:
                raise
    final = unplanned(spec, devices.kind) if asked is None else asked.spec
    reasons = {} if on_cores(final, devices.kind) else REASONS
    decided = tuple(
        Decided(key, value, reasons.get(key.rpartition(".")[2], f"the default on {devices.kind}"))
        for key, _, value in differences(given, final)
    )
    return ResolvedRun(final, devices, asked, memory, decided)


def question_of(spec: RunSpec, kind: str, count: int, sequence_tokens: int | None = None) -> Question:
    """Return a spec on devices of a kind, with all device-dependent values resolved.

    Raises InputError if the model's sizes cannot be read from its config.json.
    """
    shape, config = shape_of(spec)
    limit = config.get("max_position_embeddings")
    spec = _within_context(spec, limit)
    wanted = sequence_tokens or PROMPT_TOKENS + (RESPONSE_TOKENS if spec.supervised else spec.generation.max_tokens)
    tokens = min(wanted, spec.model.max_context_tokens or limit or wanted)
    sheet = device_of(kind)
    others = reward_shapes(spec), frozen_shapes(spec), draft_shape(spec)
    given = resolve_for_kind(spec, kind, shape)
    asked = Question(given, shape, sheet, count, tokens, host_memory_bytes(), *others, given)
    asked = replace(asked, spec=_with_divided_experts(placed(asked), shape))
    return replace(asked, spec=timed(asked))


def _within_context(spec: RunSpec, limit: int | None) -> RunSpec:
    """Set a default `generation.max_tokens` that exceeds a small model's context to half of the context.

    The other half is room for prompts.
    """
    context = spec.model.max_context_tokens or limit
    if context is None or is_set(spec, "generation.max_tokens") or spec.generation.max_tokens < context:
        return spec
    return edited(spec, {"generation.max_tokens": max(context // 2, 1)})


def _with_divided_experts(spec: RunSpec, shape: ModelShape) -> RunSpec:
    """Resolve `expert_parallel: auto` of each trained model, once its ranks are decided."""
    for name, part in spec.trained.items():
        experts = shape.divisible_experts if name == "learner" or (spec.critic and spec.critic.new_head) else 0
        number = part.experts_over(part.world_size, experts)
        spec = edited(spec, {f"{name}.expert_parallel": number} if part.expert_parallel == "auto" else {})
    return spec


def on_cores(spec: RunSpec, kind: str) -> bool:
    """Return whether all devices of a run are CPU cores. `kind` is generation's."""
    return {kind, spec.placement.kind_of_learner(kind)} == {CPU_KIND}


def resolve_for_kind(spec: RunSpec, kind: str, shape: ModelShape | None = None) -> RunSpec:
    """Return the spec with the defaults for devices of a kind, such as bfloat16 on GPUs.

    `shape` is None for a model of unknown size. `placed` resolves the values that depend on memory.
    """
    learning = spec.placement.kind_of_learner(kind)
    wanted: dict[str, Any] = {} if kind == CPU_KIND else {"model.dtype": "bfloat16"}
    if kind == CPU_KIND:
        engine = spec.generation.engine
        open_keys = {TENSOR_PARALLEL: engine.devices_per_actor, MAX_SEQUENCES: engine.sequence_limit}
        spec = edited(spec, open_keys | {BATCH_TOKENS: engine.batch_tokens})
    wanted |= {f"{name}.dtype": "bfloat16" for name in spec.trained if learning != CPU_KIND}
    spec = edited(spec, {key: value for key, value in wanted.items() if not is_set(spec, key)})
    if spec.type == "rlhf" and spec.model.lora is not None and spec.generation.lora == "auto":
        merged = spec.placement.share is None and why_merged(spec, kind, shape) is not None
        spec = edited(spec, {"generation.lora": "merged" if merged else "adapter"})
    if learning == CPU_KIND:
        spec = edited(spec, dict.fromkeys(open_ranks(spec), 1))
        for name, part in spec.trained.items():
            passes = {"micro_batch_tokens": part.pass_tokens, "gradient_checkpointing": part.recomputes}
            spec = edited(spec, {f"{name}.{key}": value for key, value in passes.items()})
    if kind != CPU_KIND:
        return spec
    return with_fewest_actors(edited(spec, {"placement.mode": "colocated"}) if spec.placement.mode == "auto" else spec)


def why_merged(spec: RunSpec, kind: str, shape: ModelShape | None) -> tuple[str, str] | None:
    """Return the reason that engines on devices of a kind cannot serve adapters, and a hint; None if they can."""
    generation, transport = spec.generation, spec.weights.transport
    if generation.engine.type != "vllm":
        return f"generation.engine.type is {generation.engine.type}, which loads all weights", "use vllm"
    if generation.quantization != "off":
        what = f"generation.quantization is {generation.quantization}, and adapters have not been tried on such layers"
        return what, "set it to off"
    if transport in ("nccl", "cuda_ipc"):
        return f"weights.transport is {transport}, which moves all weights", "set it to auto"
    if shape is not None and shape.experts:
        return "the model has experts, for which vLLM takes other kernels beside adapters", "leave generation.lora out"
    if kind != CPU_KIND and spec.model.dtype == "float32":
        return f"model.dtype is float32, and the kernels of {kind} for adapters have 16 bits", "set it to bfloat16"
    return None


def unplanned(spec: RunSpec, kind: str) -> RunSpec:
    """Resolve a spec for a model of unknown size: GPUs recompute activations, which works for every model that fits."""
    spec = resolve_for_kind(spec, kind)
    return edited(spec, {f"{name}.gradient_checkpointing": True for name in open_checkpointing(spec)})


SETTLED = (
    "model.dtype",
    "generation.lora",
    "learner.dtype",
    "learner.gradient_checkpointing",
    "learner.offload",
    "learner.micro_batch_tokens",
    "learner.logits_mib",
    "learner.ranks",
    "learner.shard_ranks",
    "learner.expert_parallel",
    "critic.dtype",
    "critic.gradient_checkpointing",
    "critic.offload",
    "critic.micro_batch_tokens",
    "critic.ranks",
    "critic.shard_ranks",
    "critic.expert_parallel",
    "reference.ranks",
    "scoring.reward_model_ranks",
    TENSOR_PARALLEL,
    MOST,
)
"""Keys whose resolved values are kept for the rest of the run."""


def keep_resolved(spec: RunSpec, before: RunSpec) -> RunSpec:
    """Return the spec of a resumed run, keeping resolved values of open keys from `before`, the run's own spec."""
    kept = {}
    for key in SETTLED:
        section = key.partition(".")[0]
        if getattr(spec, section) is None or getattr(before, section) is None:
            continue
        value = attrgetter(key)(spec)
        if value == "auto" or not is_set(spec, key):
            kept[key] = attrgetter(key)(before)
    for index, (now, then) in enumerate(zip(spec.teachers, before.teachers, strict=False)):
        if now.ranks == "auto":
            kept[f"teachers.{index}.ranks"] = then.ranks
    return edited(spec, kept)


def device_problems(spec: RunSpec, kind: str, shape: ModelShape | None = None) -> list[Problem]:
    """Return the reasons to refuse devices of a kind for a spec and a model, regardless of their number."""
    return [
        *_format_problems(spec, kind),
        *_speculation_problems(spec, kind),
        *_adapter_problems(spec, kind, shape),
        *_expert_problems(spec, shape),
    ]


def _without_experts(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of keys that a model without experts cannot have."""
    learner, what = spec.learner, "but the model has no experts"
    if not spec.supervised and spec.router_replay != "off":
        yield Problem("algorithm.router_replay", f"{spec.router_replay}, {what}", "set it to off, or leave it out")
    if learner.freeze_router:
        yield Problem("learner.freeze_router", f"true, {what}", "leave it out")
    if learner.router_dtype is not None:
        yield Problem("learner.router_dtype", f"{learner.router_dtype}, {what}", "leave it out")


def _expert_problems(spec: RunSpec, shape: ModelShape | None) -> list[Problem]:
    """Return the problems of a number of ranks that cannot divide the model's experts."""
    if shape is None:
        return []
    problems = [] if shape.experts else [*_without_experts(spec)]
    for name, part in spec.trained.items():
        number, experts = part.expert_parallel, shape.divisible_experts
        if number in ("auto", 1) or (name == "critic" and not (spec.critic and spec.critic.new_head)):
            continue
        key = f"{name}.expert_parallel"
        if not experts:
            what = f"{number}, but the model has no experts that ranks can divide"
            problems.append(Problem(key, what, "set it to 1, or leave it out"))
        elif experts % int(number):
            what = f"{number}, which does not divide the model's {experts} experts"
            problems.append(Problem(key, what, f"set it to {math.gcd(experts, int(number))}, or leave it out"))
    return problems


def _adapter_problems(spec: RunSpec, kind: str, shape: ModelShape | None) -> list[Problem]:
    """Return the problem of a run that asks for adapters where engines cannot serve them."""
    if not spec.publishes_adapters or (why := why_merged(spec, kind, shape)) is None:
        return []
    return [Problem("generation.lora", f"adapter, but {why[0]}", f"set it to merged, or {why[1]}")]


def _speculation_problems(spec: RunSpec, kind: str) -> list[Problem]:
    """Return the problem of drafting from other responses with many sequences on a GPU."""
    if spec.supervised or kind == CPU_KIND or not spec.generation.speculation.remembers:
        return []
    method, sequences = spec.generation.speculation.method, spec.generation.engine.sequence_limit
    if sequences <= MOST_DRAFTING_SEQUENCES:
        return []
    what = (
        f"{method} on {kind} with {sequences} sequences per actor: vLLM's older model runner samples each sequence by "
        "a kernel of its own and does not schedule ahead, which costs more than drafts save"
    )
    hint = f"set {MAX_SEQUENCES}: {MOST_DRAFTING_SEQUENCES}, or use ngram, draft_model, eagle3, mtp or off"
    return [Problem("generation.speculation.method", what, hint)]


def _format_problems(spec: RunSpec, kind: str) -> list[Problem]:
    """Return the problems of float32 on GPUs, which is useful only for comparisons."""
    if spec.placement.float32_on_gpus:
        return []
    learning = spec.placement.kind_of_learner(kind)
    kinds = {"model.dtype": kind} | {f"{name}.dtype": learning for name in spec.trained}
    return [
        Problem(
            key,
            f"float32 on {of}: twice the memory of bfloat16, and matrix products at an eighth of its rate or less",
            "leave it out, or set placement.float32_on_gpus: true",
        )
        for key, of in kinds.items()
        if of != CPU_KIND and getattr(spec, key.partition(".")[0]).dtype == "float32"
    ]


def why_not(kind: str, dtype: DType, shape: ModelShape | None) -> tuple[str, str] | None:
    """Return the reason that vLLM cannot generate in fp8 on devices of a kind, and a hint; None if it can.

    `shape` is None for a model of unknown size.
    """
    if shape is not None and shape.experts:
        return (
            "the model has experts, and neither what an engine has of experts in 8 bits nor what it computes with them "
            "could be checked after a load",
            "set it to off",
        )
    if kind == CPU_KIND:
        return None
    if dtype == "float32":
        return f"model.dtype is float32, and the kernels of {kind} for 8 bits give 16", "set model.dtype to bfloat16"
    sheet = load_devices().get(kind)
    if sheet is not None and sheet.fp8_flops_per_s is None:
        return f"{kind} has no products of 8 bit floats", "set it to off"
    return None


def quantization_problems(spec: RunSpec, kind: str, shape: ModelShape | None) -> list[Problem]:
    """Return the reasons that a run cannot generate in its format on devices of a kind."""
    quantization = spec.generation.quantization
    if spec.supervised or quantization == "off":
        return []
    refused = why_not(kind, spec.model.dtype, shape)
    return (
        [] if refused is None else [Problem("generation.quantization", f"{quantization}, but {refused[0]}", refused[1])]
    )


def plan_problems(asked: Question, plan: MemoryPlan) -> tuple[str, ...]:
    """Return the reasons to refuse a run on these devices: rejected settings and insufficient memory."""
    refused = (
        f"{problem.where}: {problem.what}; {problem.hint}"
        for problem in device_problems(asked.spec, asked.sheet.kind, asked.shape)
    )
    return (*refused, *plan.problems)


def timed(asked: Question) -> RunSpec:
    """Resolve timeouts that a model of this size stays within even at the slowest rates above, in whole minutes.

    The defaults are for small models and stay if the size adds less than SMALL_SHARE to them.

        start_s      + b P / rate            reading the model
        sync_s       + 2 b P / rate          an actor's pull of the weights, and reading them again
        call_s       + b P / rate + 8 P T / (share of the ranks' peak)
                                             a learning step of T tokens, with activations computed twice, and its
                                             publication
        generate_s   + waves x longest response x b P / (share of the engine's bandwidth)
    """
    spec, shape, sheet, sequence_tokens = asked.spec, asked.shape, asked.sheet, asked.sequence_tokens
    size_s = version_bytes(shape, spec.model.dtype) / SLOWEST_BYTES_PER_S
    samples = spec.prompts_per_step * spec.sequences_per_prompt
    learned_tokens = samples * (sequence_tokens if spec.supervised else spec.generation.max_tokens)
    ranks = min(part.world_size for part in spec.trained.values())
    flops_per_s = SLOWEST_SHARE * asked.learner_sheet.flops_per_s.value * ranks
    learning_s = 8 * shape.active * learned_tokens / flops_per_s
    engine = spec.generation.engine
    waves = math.ceil(samples / (engine.sequence_limit * spec.scaling.generation.min_actors))
    bandwidth = SLOWEST_SHARE * sheet.memory_bytes_per_s.value * engine.devices_per_actor
    token_s = version_bytes(shape, spec.model.dtype) / bandwidth
    more_s = {
        "timeouts.start_s": size_s,
        "timeouts.sync_s": 2 * size_s,
        "timeouts.call_s": size_s + learning_s,
        "timeouts.generate_s": waves * spec.generation.max_tokens * token_s,
    }
    values = {}
    for key, more in more_s.items():
        default_s = getattr(spec.timeouts, key.partition(".")[2])
        if more >= SMALL_SHARE * default_s and not is_set(spec, key):
            values[key] = MINUTE_S * math.ceil((default_s + more) / MINUTE_S)
    return edited(spec, values)
