"""Declares the learner: the policy under training, with its optimiser."""

from __future__ import annotations

from dataclasses import replace

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.records.ledger import BUCKET_BYTES
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, MemoryTerms
from rlhfless.scaling.latency.shape import DTYPE_BYTES
from rlhfless.scaling.memory import (
    LOGITS_CHUNK_ELEMENTS,
    PUBLISH,
    PUBLISHED,
    MemoryPart,
    MemoryPhase,
    layer_parameters,
    learn_phases,
    on_device,
    sharded,
    value_phases,
    with_scores,
)
from rlhfless.scaling.placement import ReplicaRequest, Site
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> ReplicaRequest:
    learner = spec.learner
    return ReplicaRequest(
        FunctionName.LEARNER,
        Site.LEARNER,
        ranks=learner.world_size,
        ranks_key="learner.ranks",
        fewest_ranks=learner.min_ranks,
    )


def _phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    spec = terms.spec
    learner, phases = spec.learner, learner_phases(terms, terms.micro_batch_tokens)
    phases = on_device(phases, terms.sheet.kind, learner.world_size, learner.copies)
    if spec.weights.transport != "cuda_ipc":
        return phases
    # Per layer or other tensor: this rank's float32 shard, the gathered tensor, and its layout for the engines.
    whole = max(layer_parameters(terms.shape), terms.shape.head)
    part = 4 * whole // spec.learner.world_size
    gathered = MemoryPart(PUBLISHED, BUCKET_BYTES + part + 2 * DTYPE_BYTES[spec.model.dtype] * whole)
    return tuple(replace(phase, parts=(*phase.parts, gathered)) for phase in phases)


def learner_phases(terms: MemoryTerms, tokens: int) -> tuple[MemoryPhase, ...]:
    """Return a rank's memory phases with micro-batches of `tokens` tokens, without its process overhead."""
    spec, shape, learner = terms.spec, terms.shape, terms.spec.learner
    how = sharded(learner, terms.sheet.kind)
    if spec.type == "reward_model":
        phases = value_phases(shape, tokens, how)
    else:
        how = replace(how, exact_head=learner.head_dtype == "float32")
        phases = learn_phases(shape, tokens, how, learner.logits_elements or LOGITS_CHUNK_ELEMENTS)
        phases = tuple(phase for phase in phases if not (spec.supervised and phase.name == PUBLISH))
    kept_layers = 1 if learner.recomputes else shape.layers
    return with_scores(phases, shape, tokens, terms.sequence_tokens, learner.dtype, kept_layers)


KIND = FunctionSpec(
    FunctionName.LEARNER,
    FunctionRole.UPDATES,
    "rlhfless.functions.learner.controller:LearnerFunction",
    _wanted,
    lambda _: Bounds(1, "the learner keeps the run's state"),
    _phases,
    publishes=True,
)
