"""The declaration of the learner: the policy that is trained, with its optimiser."""

from __future__ import annotations

from dataclasses import replace

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.records.ledger import BUCKET_BYTES
from rlhfless.scaling.function_kinds import Bounds, FunctionKind, MemoryTerms
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
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
)
from rlhfless.scaling.placement import Site, Wanted
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> Wanted:
    learner = spec.learner
    return Wanted(
        FunctionName.LEARNER,
        Site.SIDE,
        ranks=learner.world_size,
        ranks_key="learner.ranks",
        fewest_ranks=learner.min_ranks,
    )


def _phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    spec = terms.spec
    learner, phases = spec.learner, learner_phases(spec, terms.shape, terms.micro_batch_tokens, terms.sheet.kind)
    phases = on_device(phases, terms.sheet.kind, learner.world_size, learner.copies)
    if spec.weights.transport != "cuda_ipc":
        return phases
    # Of a layer, or one other tensor: this rank's part in float32, what is gathered, and its order for the engines.
    whole = max(layer_parameters(terms.shape), terms.shape.head)
    part = 4 * whole // spec.learner.world_size
    gathered = MemoryPart(PUBLISHED, BUCKET_BYTES + part + 2 * DTYPE_BYTES[spec.model.dtype] * whole)
    return tuple(replace(phase, parts=(*phase.parts, gathered)) for phase in phases)


def learner_phases(spec: RunSpec, shape: ModelShape, tokens: int, kind: str) -> tuple[MemoryPhase, ...]:
    """The phases of a rank on a kind of device with micro-batches of so many tokens, without what its process holds."""
    learner = spec.learner
    if spec.type == "reward_model":
        return value_phases(shape, tokens, sharded(learner, kind))
    how = replace(sharded(learner, kind), exact_head=learner.head_dtype == "float32")
    phases = learn_phases(shape, tokens, how, learner.logits_elements or LOGITS_CHUNK_ELEMENTS)
    return tuple(phase for phase in phases if not (spec.supervised and phase.name == PUBLISH))


KIND = FunctionKind(
    FunctionName.LEARNER,
    FunctionRole.UPDATES,
    "rlhfless.functions.learner.deployment:LearnerFunction",
    _wanted,
    lambda _: Bounds(1, "the learner keeps the run's state"),
    _phases,
    publishes=True,
)
