"""Declares the critic: values of complete groups, trained alongside the policy."""

from __future__ import annotations

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, MemoryTerms
from rlhfless.scaling.memory import MemoryPhase, on_device, sharded, value_phases, with_scores
from rlhfless.scaling.placement import ReplicaRequest, Site
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> ReplicaRequest | None:
    if spec.critic is None:
        return None
    return ReplicaRequest(
        FunctionName.CRITIC, Site.LEARNER_SHARED, ranks=spec.critic.world_size, ranks_key="critic.ranks"
    )


def _phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:
    """Return the memory phases of a critic, assumed to have the policy's size even if it starts from other files."""
    critic = terms.spec.critic
    if critic is None:
        return ()
    tokens = max(critic.pass_tokens, terms.sequence_tokens)
    phases = value_phases(terms.shape, tokens, sharded(critic, terms.sheet.kind))
    kept_layers = 1 if critic.recomputes else terms.shape.layers
    phases = with_scores(phases, terms.shape, tokens, terms.sequence_tokens, critic.dtype, kept_layers)
    return on_device(phases, terms.sheet.kind, critic.world_size, critic.copies)


KIND = FunctionSpec(
    FunctionName.CRITIC,
    FunctionRole.UPDATES,
    "rlhfless.functions.critic.controller:CriticFunction",
    _wanted,
    lambda _: Bounds(1, "the critic keeps a part of the run's state"),
    _phases,
    output="values",
)
