"""The declaration of scoring: rewards that are computed on CPU cores."""

from __future__ import annotations

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_kinds import FunctionKind, held
from rlhfless.scaling.placement import Site, Wanted
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> Wanted | None:
    if spec.supervised:
        return None
    return Wanted(FunctionName.SCORING, Site.CORES, devices=spec.scoring.workers)


KIND = FunctionKind(
    FunctionName.SCORING,
    FunctionRole.SCORES,
    "rlhfless.functions.scoring.deployment:ScoringFunction",
    _wanted,
    lambda spec: held(spec, "hold_scoring"),
)
