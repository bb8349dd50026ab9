"""Declares scoring: rewards computed on CPU cores."""

from __future__ import annotations

from rlhfless.records import FunctionName, FunctionRole
from rlhfless.scaling.function_specs import FunctionSpec, held
from rlhfless.scaling.placement import ReplicaRequest, Site
from rlhfless.spec import RunSpec


def _wanted(spec: RunSpec) -> ReplicaRequest | None:
    if spec.supervised:
        return None
    return ReplicaRequest(FunctionName.SCORING, Site.CPU, devices=spec.scoring.workers)


KIND = FunctionSpec(
    FunctionName.SCORING,
    FunctionRole.SCORES,
    "rlhfless.functions.scoring.deployment:ScoringFunction",
    _wanted,
    lambda spec: held(spec, "hold_scoring"),
)
