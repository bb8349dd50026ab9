"""All policies by name, and how to make one: a built-in policy, a baseline, or the user's own by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasters import PredictedLengths
from rlhfless.scaling.policies.static import Static
from rlhfless.scaling.policy import Policy
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import nearest
from rlhfless.spec.imports import load_target
from rlhfless.spec.policies import (
    POLICY_SEAM,
    CostAwareSpec,
    KedaSpec,
    KnativeSpec,
    RayServeSpec,
    RLHFlessPaperSpec,
    StaticSpec,
    TailSpec,
)


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One policy of the registry."""

    settings: type[SpecModel]
    make: Callable[[Any, RunContract], Policy]
    placement: Literal["colocated", "disaggregated"] | None = None
    """The placement for which it is made; None: any."""
    reserved: bool = False
    """Whether its users rent all devices for the whole run, so that devices that are not held are paid for as well."""


def _baseline(name: str) -> Callable[[Any, RunContract], Policy]:
    """Makes a policy of rlhfless.sim.baselines, which ignores the contract. It is imported by its path when it is asked
    for: a run with another policy loads nothing of the simulator, and this package does not depend on it."""
    return lambda settings, run: load_target(f"rlhfless.sim.baselines.{name}")(settings)  # noqa: ARG005


def _static(placement: Literal["colocated", "disaggregated"] | None = None) -> PolicyKind:
    reserved = placement is not None
    return PolicyKind(StaticSpec, lambda settings, run: Static(settings), placement, reserved=reserved)  # noqa: ARG005


POLICIES: Mapping[str, PolicyKind] = MappingProxyType(
    {
        "static_colocated": _static("colocated"),
        "static_disaggregated": _static("disaggregated"),
        "static": _static(),
        "queue_reactive_ray_serve": PolicyKind(RayServeSpec, _baseline("queue_reactive:ray_serve")),
        "queue_reactive_knative": PolicyKind(KnativeSpec, _baseline("queue_reactive:knative")),
        "queue_reactive_keda": PolicyKind(KedaSpec, _baseline("queue_reactive:keda")),
        "rlhfuse_tail": PolicyKind(TailSpec, _baseline("rlhfuse_tail:RLHFuseTail"), reserved=True),
        "rlhfless_published": PolicyKind(RLHFlessPaperSpec, _baseline("rlhfless_published:RLHFlessPublished")),
        "cost_aware": PolicyKind(CostAwareSpec, lambda settings, run: CostAware(settings, run, PredictedLengths())),
    }
)
"""By name; docs/policies.md describes each."""


class PolicyError(ValueError):
    """A name or import path that names no policy."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; {hint}")
        self.what = what
        self.hint = hint


def policy_kind(name: str) -> PolicyKind:
    """The policy of this name, or the user's own if it is an import path (docs/extending.md). Raises PolicyError."""
    if ":" not in name:
        if name in POLICIES:
            return POLICIES[name]
        raise PolicyError(f"no policy {name!r}", f"{nearest(name, POLICIES)}There are {', '.join(POLICIES)}")
    try:
        return PolicyKind(POLICY_SEAM.model_of(name), load_target(name))
    except PydanticCustomError as error:
        problem: Problem = (error.context or {})["problems"][0]
        raise PolicyError(problem.what, problem.hint) from error


def make_policy(name: str, settings: SpecModel | None = None, run: RunContract | None = None) -> Policy:
    """A policy for one run. Without settings it has its defaults.

    Raises PolicyError for an unknown name, ValueError for settings of another policy.
    """
    kind = policy_kind(name)
    settings = configured(name, {}) if settings is None else settings
    if not isinstance(settings, kind.settings):
        given = type(settings).__name__
        raise ValueError(f"{name} takes {kind.settings.__name__}, got {given}; make it with configured({name!r}, ...)")
    return kind.make(settings, run or RunContract())


def configured(name: str, keys: Mapping[str, Any]) -> SpecModel:
    """A policy's own keys, validated. Raises PolicyError, or pydantic's ValidationError."""
    named = {"type": name} if ":" in name else {}
    return policy_kind(name).settings.model_validate({**keys, **named})
