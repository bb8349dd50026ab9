"""Declares the reference: logprobs of samples under the policy from before training."""

from __future__ import annotations

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_specs import FunctionSpec, MemoryTerms, held
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import LOGITS_CHUNK_ELEMENTS, MemoryPhase, on_device, reference_phase, with_scores
from rlhfless.scaling.placement import CPU_KIND, ReplicaRequest, Site
from rlhfless.spec import RunSpec
from rlhfless.spec.base import count_of


def _wanted(spec: RunSpec) -> ReplicaRequest | None:
    if not spec.needs_reference:
        return None
    return ReplicaRequest(
        FunctionName.REFERENCE, Site.LEARNER_SHARED, ranks=count_of(spec.reference.ranks), ranks_key="reference.ranks"
    )


def _phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    ranks = count_of(terms.spec.reference.ranks)
    return on_device([frozen_phase(terms, terms.shape, ranks)], terms.sheet.kind, ranks)


def frozen_phase(terms: MemoryTerms, shape: ModelShape, ranks: int) -> MemoryPhase:
    """Return the phase of one rank of a frozen model of this shape (rlhfless.functions.reference.model)."""
    learner = terms.spec.learner
    chunk = learner.logits_elements or LOGITS_CHUNK_ELEMENTS
    tokens = terms.micro_batch_tokens
    phase = reference_phase(
        shape,
        tokens,
        learner.dtype,
        chunk,
        sharing=learner.share_prefixes,
        ranks=ranks,
        on_gpu=terms.sheet.kind != CPU_KIND,
    )
    return with_scores([phase], shape, tokens, terms.sequence_tokens, learner.dtype, 0)[0]


KIND = FunctionSpec(
    FunctionName.REFERENCE,
    FunctionRole.ANNOTATES,
    "rlhfless.functions.per_token:PerTokenFunction",
    _wanted,
    lambda spec: held(spec, "hold_reference"),
    _phases,
    output="reference_logprobs",
    worker="rlhfless.functions.reference.model:FrozenPolicy",
)
