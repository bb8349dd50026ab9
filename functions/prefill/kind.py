"""The declaration of prefill: engines like those of generation, which compute prompts and draw nothing."""

from __future__ import annotations

from rlhfless.functions.generation.kind import engine_phases
from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_kinds import Bounds, FunctionKind
from rlhfless.scaling.placement import Site, Wanted
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> Wanted | None:
    if not spec.scaling.prefill.on:
        return None
    return Wanted(
        FunctionName.PREFILL,
        Site.WINDOWS,
        replicas=spec.scaling.prefill.max_actors,
        devices=spec.generation.engine.tensor_parallel_size,
    )


def _bounds(spec: RunSpec) -> Bounds:
    return Bounds(spec.scaling.prefill.min_actors, "scaling.prefill.min_actors are not released")


KIND = FunctionKind(
    FunctionName.PREFILL,
    FunctionRole.PREFILLS,
    "rlhfless.functions.generation.deployment:GenerationFunction",
    _wanted,
    _bounds,
    engine_phases,
)
