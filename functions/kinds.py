"""Declares the built-in functions: where their replicas run, their memory by phase, and their deployment.

A declaration imports neither Ray nor torch (rlhfless.scaling.function_specs).
"""

from __future__ import annotations

from dataclasses import replace

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.records.ledger import BUCKET_BYTES
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, MemoryTerms, held
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.memory import (
    CPU_KV_GIB,
    GIB,
    LOGITS_CHUNK_ELEMENTS,
    PROCESS,
    PROCESS_BYTES,
    PUBLISH,
    PUBLISHED,
    TENSOR_PARALLEL_BYTES,
    FrozenBase,
    MemoryPart,
    MemoryPhase,
    Scored,
    engine_parts,
    kv_sequence_bytes,
    layer_parameters,
    learn_phases,
    on_device,
    published_bytes,
    reference_phase,
    score_phase,
    sharded,
    stored_versions,
    value_phases,
    with_scores,
)
from rlhfless.scaling.placement import CPU_KIND, ReplicaRequest, Site
from rlhfless.spec import EngineSpec, JudgeSpec, RunSpec, TeacherSpec
from rlhfless.spec.base import Ranks, count_of

# Engines: generation and prefill.


def _engines(spec: RunSpec, function: FunctionName, most: int) -> ReplicaRequest:
    """Return the devices for up to `most` engines of a function."""
    return ReplicaRequest(function, Site.PER_REPLICA, replicas=most, devices=spec.generation.engine.devices_per_actor)


def _generation(spec: RunSpec) -> ReplicaRequest | None:
    most = spec.scaling.generation.most_actors
    return None if spec.supervised else _engines(spec, FunctionName.GENERATION, most)


def _prefill(spec: RunSpec) -> ReplicaRequest | None:
    prefill = spec.scaling.prefill
    return _engines(spec, FunctionName.PREFILL, prefill.max_actors) if prefill.on else None


def engine_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    """Return the memory phases of an engine: on a GPU it takes its fraction and gives the remainder to KV."""
    parts, kv = _engine(terms.spec, terms.shape, terms.sheet, terms.draft)
    return (MemoryPhase("generate", (*parts, MemoryPart("KV", max(kv, 0)))),)


def _engine(
    spec: RunSpec, shape: ModelShape, sheet: DeviceSheet, draft: ModelShape | None
) -> tuple[tuple[MemoryPart, ...], int]:
    """Return the parts of one engine device, and the bytes for KV, negative if the parts do not fit.

    The sampler has a row per draft, and a draft model is split like the model.
    """
    engine, on_gpu = spec.generation.engine, sheet.kind != CPU_KIND
    parts = engine_parts(
        shape,
        spec.model.dtype,
        engine.devices_per_actor,
        engine.batch_tokens,
        min(engine.sequence_limit * (1 + spec.generation.speculation.most), engine.batch_tokens),
        graphs=on_gpu and not engine.eager,
        eight_bits=spec.generation.quantization != "off",
    )
    if draft is not None:
        size = DTYPE_BYTES[spec.model.dtype] * draft.parameters // engine.devices_per_actor
        parts = (*parts, MemoryPart("draft's weights", size))
    if spec.publishes_adapters:
        runs = 1 if spec.placement.share is None else spec.placement.tenants
        slots = MemoryPart("slots of adapters", runs * stored_versions(spec) * published_bytes(shape, spec))
        parts = (*parts, slots)
    if not on_gpu:
        return parts, int((engine.kv_cache_gib or CPU_KV_GIB) * GIB)
    parallel = MemoryPart("tensor parallelism", TENSOR_PARALLEL_BYTES * (engine.devices_per_actor > 1))
    parts = (*parts, MemoryPart(PROCESS, PROCESS_BYTES), parallel)
    budget = int(engine.gpu_memory_fraction * sheet.memory_bytes.value)
    return parts, budget - sum(part.size_bytes for part in parts)


def kv_bytes(spec: RunSpec, shape: ModelShape, sheet: DeviceSheet, draft: ModelShape | None = None) -> int:
    """Return the bytes of the KV cache on each device of an engine."""
    return _engine(spec, shape, sheet, draft)[1]


def kv_tokens(
    spec: RunSpec, shape: ModelShape, sheet: DeviceSheet, sequence_tokens: int, draft: ModelShape | None = None
) -> int:
    """Return the tokens that an engine's KV cache holds in sequences of `sequence_tokens`, as vLLM reports it.

    A model with windows holds fewer tokens in shorter sequences. With a KV connector all layers hold all tokens:
    vLLM's hybrid cache manager supports few connectors. A draft model keeps KV of the same tokens.
    """
    engine = spec.generation.engine
    shape = shape if spec.scaling.prefill.connector is None else replace(shape, windows=None)
    sequence = sum(
        kv_sequence_bytes(each, spec.model.dtype, engine.devices_per_actor, sequence_tokens, engine.batch_tokens)
        for each in (shape, draft)
        if each is not None
    )
    return kv_bytes(spec, shape, sheet, draft) * sequence_tokens // sequence


GENERATION = FunctionSpec(
    FunctionName.GENERATION,
    FunctionRole.SAMPLES,
    "rlhfless.functions.generation.deployment:GenerationFunction",
    _generation,
    lambda spec: Bounds(spec.scaling.generation.min_actors, "scaling.generation.min_actors are not released"),
    engine_phases,
    shared="rlhfless.functions.generation.shared:SharedGenerationFunction",
)

PREFILL = FunctionSpec(
    FunctionName.PREFILL,
    FunctionRole.PREFILLS,
    "rlhfless.functions.generation.deployment:GenerationFunction",
    _prefill,
    lambda spec: Bounds(spec.scaling.prefill.min_actors, "scaling.prefill.min_actors are not released"),
    engine_phases,
)

# The environment.


def _environment(spec: RunSpec) -> ReplicaRequest | None:
    if spec.environment is None:
        return None
    return ReplicaRequest(FunctionName.ENVIRONMENT, Site.CPU, spec.environment.replicas, devices=spec.environment.cores)


ENVIRONMENT = FunctionSpec(
    FunctionName.ENVIRONMENT,
    FunctionRole.ANSWERS,
    "rlhfless.functions.environment.deployment:EnvironmentFunction",
    _environment,
    lambda _: Bounds(),
)

# Scores: rewards on CPU cores, and reward models.


def _scoring(spec: RunSpec) -> ReplicaRequest | None:
    if spec.supervised or not spec.rewards:
        return None
    return ReplicaRequest(FunctionName.SCORING, Site.CPU, devices=spec.scoring.workers)


def _reward_model(spec: RunSpec) -> ReplicaRequest | None:
    if not spec.reward_models:
        return None
    ranks = count_of(spec.scoring.reward_model_ranks)
    return ReplicaRequest(
        FunctionName.REWARD_MODEL, Site.LEARNER_SHARED, ranks=ranks, ranks_key="scoring.reward_model_ranks"
    )


def _reward_model_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    """Return the memory phases of the reward models with known sizes."""
    models = [Scored(of, max(part.micro_batch_tokens, part.max_tokens), part.dtype) for part, of in terms.rewards]
    ranks = count_of(terms.spec.scoring.reward_model_ranks)
    return on_device([score_phase(models, ranks)], terms.sheet.kind, ranks)


SCORING = FunctionSpec(
    FunctionName.SCORING,
    FunctionRole.SCORES,
    "rlhfless.functions.scoring.deployment:ScoringFunction",
    _scoring,
    lambda spec: held(spec, "hold_scoring"),
)

REWARD_MODEL = FunctionSpec(
    FunctionName.REWARD_MODEL,
    FunctionRole.SCORES,
    "rlhfless.functions.scoring.deployment:RewardModelFunction",
    _reward_model,
    lambda spec: held(spec, "hold_scoring"),
    _reward_model_phases,
)


def judge_kinds(spec: RunSpec) -> tuple[FunctionSpec, ...]:
    """Return the function of each judge with a path: an engine on devices of the learner's side."""
    places = ((index, part) for index, part in enumerate(spec.rewards) if part in spec.judges)
    return tuple(_judge(f"rewards.{index}.tensor_parallel_size", judge) for index, judge in places)


def _judge(key: str, judge: JudgeSpec) -> FunctionSpec:
    name, count = judge.function, judge.tensor_parallel_size
    return FunctionSpec(
        name,
        FunctionRole.SCORES,
        "rlhfless.functions.scoring.judge:JudgeFunction",
        lambda _: ReplicaRequest(name, Site.LEARNER_SHARED, ranks=count, ranks_key=key, one_node=True),
        lambda spec: held(spec, "hold_scoring"),
        lambda terms: _judge_phases(terms, judge),
        settings=judge,
    )


def _judge_phases(terms: MemoryTerms, judge: JudgeSpec) -> tuple[MemoryPhase, ...]:
    """Return the memory of one device of a judge's engine."""
    on_gpu, engine, count = terms.sheet.kind != CPU_KIND, EngineSpec(), judge.tensor_parallel_size
    parts = engine_parts(
        terms.frozen.get(judge.function, terms.shape),
        judge.dtype,
        count,
        engine.batch_tokens,
        engine.sequence_limit,
        graphs=on_gpu,
    )
    parts = (*parts, MemoryPart("KV", int(judge.kv_cache_gib * GIB)))
    if on_gpu:
        parallel = MemoryPart("tensor parallelism", TENSOR_PARALLEL_BYTES * (count > 1))
        parts = (*parts, MemoryPart(PROCESS, PROCESS_BYTES), parallel)
    return (MemoryPhase("judge", parts),)


# Frozen models that compute logprobs: the reference, and teachers.


def _reference(spec: RunSpec) -> ReplicaRequest | None:
    if not spec.needs_reference or spec.learner_is_reference:
        return None
    return _frozen_ranks(FunctionName.REFERENCE, spec.reference.ranks, "reference.ranks")


def _frozen_ranks(name: str, ranks: Ranks, key: str) -> ReplicaRequest:
    return ReplicaRequest(name, Site.LEARNER_SHARED, ranks=count_of(ranks), ranks_key=key)


def _reference_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    return _frozen_phases(terms, terms.shape, terms.spec.reference.ranks)


def _frozen_phases(terms: MemoryTerms, shape: ModelShape, ranks: Ranks) -> tuple[MemoryPhase, ...]:
    count = count_of(ranks)
    return on_device([frozen_phase(terms, shape, count)], terms.sheet.kind, count)


def frozen_phase(terms: MemoryTerms, shape: ModelShape, ranks: int) -> MemoryPhase:
    """Return the phase of one rank of a frozen model of this shape (FrozenPolicy)."""
    learner = terms.spec.learner
    phase = reference_phase(
        shape,
        terms.micro_batch_tokens,
        learner.dtype,
        learner.logits_elements or LOGITS_CHUNK_ELEMENTS,
        sharing=learner.share_prefixes,
        ranks=ranks,
        on_gpu=terms.sheet.kind != CPU_KIND,
    )
    return with_scores([phase], shape, terms.micro_batch_tokens, terms.sequence_tokens, learner.dtype, 0)[0]


REFERENCE = FunctionSpec(
    FunctionName.REFERENCE,
    FunctionRole.ANNOTATES,
    "rlhfless.functions.per_token:PerTokenFunction",
    _reference,
    lambda spec: held(spec, "hold_reference"),
    _reference_phases,
    output="reference_logprobs",
    worker="rlhfless.functions.shares:FrozenPolicy",
)


def teacher_kinds(spec: RunSpec) -> tuple[FunctionSpec, ...]:
    """Return the function of each teacher: a model like the reference, or on a CPU core the client of a server."""
    return tuple(_teacher(index, teacher) for index, teacher in enumerate(spec.teachers))


def _teacher(index: int, teacher: TeacherSpec) -> FunctionSpec:
    name = teacher.function

    def ranks_of(spec: RunSpec) -> Ranks:
        return spec.teachers[index].ranks

    if teacher.url is not None:
        return FunctionSpec(
            name,
            FunctionRole.ANNOTATES,
            "rlhfless.functions.remote_teacher:RemoteTeacher",
            lambda _: ReplicaRequest(name, Site.CPU),
            lambda spec: held(spec, "hold_reference"),
            output=name,
            computes=teacher.teaches,
            settings=teacher,
        )
    return FunctionSpec(
        name,
        FunctionRole.ANNOTATES,
        "rlhfless.functions.per_token:PerTokenFunction",
        lambda spec: _frozen_ranks(name, ranks_of(spec), f"teachers.{index}.ranks"),
        lambda spec: held(spec, "hold_reference"),
        lambda terms: _frozen_phases(terms, terms.frozen.get(name, terms.shape), ranks_of(terms.spec)),
        output=name,
        computes=teacher.teaches,
        width=2,
        worker="rlhfless.functions.shares:FrozenTeacher",
        model=teacher.model_of,
        settings=teacher,
    )


# Trained models: the critic, and the learner of the policy.


def _critic(spec: RunSpec) -> ReplicaRequest | None:
    if spec.critic is None:
        return None
    return ReplicaRequest(
        FunctionName.CRITIC, Site.LEARNER_SHARED, ranks=spec.critic.world_size, ranks_key="critic.ranks"
    )


def _critic_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    """Return the memory phases of a critic, assumed to have the policy's size even if it starts from other files."""
    critic = terms.spec.critic
    if critic is None:
        return ()
    tokens = max(critic.pass_tokens, terms.sequence_tokens)
    how = sharded(critic, terms.sheet.kind, experts=terms.shape.divisible_experts if critic.new_head else 0)
    phases = value_phases(terms.shape, tokens, how)
    kept_layers = 1 if critic.recomputes else terms.shape.layers
    phases = with_scores(phases, terms.shape, tokens, terms.sequence_tokens, critic.dtype, kept_layers)
    return on_device(phases, terms.sheet.kind, critic.world_size, critic.copies, how.expert_ranks)


def _learner(spec: RunSpec) -> ReplicaRequest:
    return ReplicaRequest(
        FunctionName.LEARNER,
        Site.LEARNER,
        ranks=spec.learner.world_size,
        ranks_key="learner.ranks",
    )


def _learner_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    spec = terms.spec
    learner, phases = spec.learner, learner_phases(terms, terms.micro_batch_tokens)
    experts = learner.experts_over(learner.world_size, terms.shape.divisible_experts)
    phases = on_device(phases, terms.sheet.kind, learner.world_size, learner.copies, experts)
    if spec.weights.transport != "cuda_ipc":
        return phases
    # Per layer or other tensor: this rank's float32 shard, the gathered tensor, and its layout for the engines.
    whole = max(layer_parameters(terms.shape), terms.shape.head)
    part = 4 * whole // spec.learner.world_size
    gathered = MemoryPart(PUBLISHED, BUCKET_BYTES + part + 2 * DTYPE_BYTES[spec.model.dtype] * whole)
    return tuple(replace(phase, parts=(*phase.parts, gathered)) for phase in phases)


def learner_phases(terms: MemoryTerms, tokens: int) -> tuple[MemoryPhase, ...]:
    """Return a learner rank's memory phases with micro-batches of `tokens` tokens, without its process overhead."""
    spec, shape, learner = terms.spec, terms.shape, terms.spec.learner
    base = FrozenBase.of(terms.shape, terms.spec.model)
    how = sharded(learner, terms.sheet.kind, base, shape.divisible_experts)
    if spec.type == "reward_model":
        phases = value_phases(shape, tokens, how)
    else:
        how = replace(how, exact_head=learner.head_dtype == "float32")
        phases = learn_phases(shape, tokens, how, learner.logits_elements or LOGITS_CHUNK_ELEMENTS)
        phases = tuple(phase for phase in phases if not (spec.supervised and phase.name == PUBLISH))
    kept_layers = 1 if learner.recomputes else shape.layers
    return with_scores(phases, shape, tokens, terms.sequence_tokens, learner.dtype, kept_layers)


CRITIC = FunctionSpec(
    FunctionName.CRITIC,
    FunctionRole.UPDATES,
    "rlhfless.functions.training.controller:CriticFunction",
    _critic,
    lambda _: Bounds(1, "the critic keeps a part of the run's state"),
    _critic_phases,
    output="values",
)

LEARNER = FunctionSpec(
    FunctionName.LEARNER,
    FunctionRole.UPDATES,
    "rlhfless.functions.learner.controller:LearnerFunction",
    _learner,
    lambda _: Bounds(1, "the learner keeps the run's state"),
    _learner_phases,
    publishes=True,
    output_in=lambda spec: REFERENCE.output if spec.learner_is_reference else "",
)
