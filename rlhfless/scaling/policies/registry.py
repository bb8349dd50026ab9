"""All policies by name, and how to make one: a built-in policy, or the user's own by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies.autoscalers import Autoscaler, Keda, Knative, RayServe
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasters import PredictedLengths
from rlhfless.scaling.policies.queue_reactive import QueueReactive
from rlhfless.scaling.policies.rlhfless_paper import RLHFlessPaper
from rlhfless.scaling.policies.static import Static
from rlhfless.scaling.policies.tail_migration import TailMigration
from rlhfless.scaling.policy import Policy
from rlhfless.spec.base import SpecModel
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
    prefill: bool = False
    """Whether it gives work to actors that prefill only."""
    reserved: bool = False
    """Whether its users rent all devices for the whole run, so that devices that are not held are paid for as well."""


def _contractless(make: Callable[[Any], Policy]) -> Callable[[Any, RunContract], Policy]:
    """Makes a policy that ignores the contract."""
    return lambda settings, run: make(settings)  # noqa: ARG005


def _following(autoscaler: Callable[[Any], Autoscaler]) -> Callable[[Any, RunContract], Policy]:
    return _contractless(lambda settings: QueueReactive(autoscaler(settings)))


def _static(placement: Literal["colocated", "disaggregated"] | None = None) -> PolicyKind:
    reserved = placement is not None
    return PolicyKind(StaticSpec, _contractless(Static), placement, prefill=True, reserved=reserved)


POLICIES: Mapping[str, PolicyKind] = MappingProxyType(
    {
        "static_colocated": _static("colocated"),
        "static_disaggregated": _static("disaggregated"),
        "static": _static(),
        "queue_reactive_ray_serve": PolicyKind(RayServeSpec, _following(RayServe)),
        "queue_reactive_knative": PolicyKind(KnativeSpec, _following(Knative)),
        "queue_reactive_keda": PolicyKind(KedaSpec, _following(Keda)),
        "rlhfuse_tail": PolicyKind(TailSpec, _contractless(TailMigration), reserved=True),
        "rlhfless_published": PolicyKind(RLHFlessPaperSpec, _contractless(RLHFlessPaper)),
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
        found = error.context or {}
        raise PolicyError(str(found["what"]), str(found["hint"])) from error


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
