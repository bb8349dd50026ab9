"""The declaration of generation: engines that generate the samples of a step."""

from __future__ import annotations

from dataclasses import replace

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, MemoryTerms
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.memory import (
    CPU_KV_GIB,
    GIB,
    PROCESS,
    PROCESS_BYTES,
    TENSOR_PARALLEL_BYTES,
    MemoryPart,
    MemoryPhase,
    engine_parts,
    kv_sequence_bytes,
)
from rlhfless.scaling.placement import CPU_KIND, ReplicaRequest, Site
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> ReplicaRequest | None:
    if spec.supervised:
        return None
    return engines_wanted(spec, FunctionName.GENERATION, spec.scaling.generation.most_actors)


def engines_wanted(spec: RunSpec, function: FunctionName, most: int) -> ReplicaRequest:
    """Return the devices for up to `most` engines of a function."""
    return ReplicaRequest(function, Site.PER_REPLICA, replicas=most, devices=spec.generation.engine.devices_per_actor)


def _bounds(spec: RunSpec) -> Bounds:
    reason = "scaling.generation.min_actors are not released"
    return Bounds(spec.scaling.generation.min_actors, reason)


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


KIND = FunctionSpec(
    FunctionName.GENERATION,
    FunctionRole.SAMPLES,
    "rlhfless.functions.generation.deployment:GenerationFunction",
    _wanted,
    _bounds,
    engine_phases,
)
