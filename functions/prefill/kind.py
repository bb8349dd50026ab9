"""Declares prefill: engines like those of generation that compute prompts and generate nothing."""

from __future__ import annotations

from rlhfless.functions.generation.kind import engine_phases, engines_wanted
from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_specs import Bounds, FunctionSpec
from rlhfless.scaling.placement import ReplicaRequest
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> ReplicaRequest | None:
    prefill = spec.scaling.prefill
    return engines_wanted(spec, FunctionName.PREFILL, prefill.max_actors) if prefill.on else None


def _bounds(spec: RunSpec) -> Bounds:
    return Bounds(spec.scaling.prefill.min_actors, "scaling.prefill.min_actors are not released")


KIND = FunctionSpec(
    FunctionName.PREFILL,
    FunctionRole.PREFILLS,
    "rlhfless.functions.generation.deployment:GenerationFunction",
    _wanted,
    _bounds,
    engine_phases,
)
