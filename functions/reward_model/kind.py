"""Declares the reward models: the part of scoring that runs networks."""

from __future__ import annotations

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_specs import FunctionSpec, MemoryTerms, held
from rlhfless.scaling.memory import MemoryPhase, Scored, on_device, score_phase
from rlhfless.scaling.placement import ReplicaRequest, Site
from rlhfless.spec import RunSpec
from rlhfless.spec.base import count_of


def _wanted(spec: RunSpec) -> ReplicaRequest | None:
    if not spec.reward_models:
        return None
    ranks = count_of(spec.scoring.reward_model_ranks)
    return ReplicaRequest(
        FunctionName.REWARD_MODEL, Site.LEARNER_SHARED, ranks=ranks, ranks_key="scoring.reward_model_ranks"
    )


def _phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    """Return the memory phases of the reward models with known sizes."""
    models = [Scored(of, max(part.micro_batch_tokens, part.max_tokens), part.dtype) for part, of in terms.rewards]
    ranks = count_of(terms.spec.scoring.reward_model_ranks)
    return on_device([score_phase(models, ranks)], terms.sheet.kind, ranks)


KIND = FunctionSpec(
    FunctionName.REWARD_MODEL,
    FunctionRole.SCORES,
    "rlhfless.functions.reward_model.controller:RewardModelFunction",
    _wanted,
    lambda spec: held(spec, "hold_scoring"),
    _phases,
)
