"""All policies by name, and how to make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.forecasters import Forecaster, PredictedLengths
from rlhfless.scaling.policies.published import Published
from rlhfless.scaling.policies.queue_reactive import QueueReactive
from rlhfless.scaling.policies.scalers import Keda, Knative, RayServe
from rlhfless.scaling.policies.settings import (
    CostAwareSettings,
    KedaSettings,
    KnativeSettings,
    PolicySettings,
    PublishedSettings,
    RayServeSettings,
    StaticSettings,
    TailSettings,
)
from rlhfless.scaling.policies.static import Static
from rlhfless.scaling.policies.tail import TailMigration
from rlhfless.scaling.policy import Policy
from rlhfless.spec.explain import nearest


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One policy of the registry."""

    settings: type[PolicySettings]
    make: Callable[[Any], Policy]
    summary: str
    placement: Literal["colocated", "disaggregated"] | None = None
    """The placement that it is about; None: any."""
    prefill: bool = False
    """It gives work to actors that prefill only."""
    reserved: bool = False
    """Its users rent all devices for the whole run: what it does not hold is paid for as well."""


POLICIES: Mapping[str, PolicyKind] = MappingProxyType(
    {
        "static_colocated": PolicyKind(
            StaticSettings,
            Static,
            "all functions on all devices in turn (verl)",
            "colocated",
            prefill=True,
            reserved=True,
        ),
        "static_disaggregated": PolicyKind(
            StaticSettings,
            Static,
            "own devices for generation and learner (OpenRLHF)",
            "disaggregated",
            prefill=True,
            reserved=True,
        ),
        "static": PolicyKind(StaticSettings, Static, "so many actors in every step", prefill=True),
        "queue_reactive_ray_serve": PolicyKind(
            RayServeSettings, lambda settings: QueueReactive(RayServe(settings)), "replicas by Ray Serve's queue rule"
        ),
        "queue_reactive_knative": PolicyKind(
            KnativeSettings, lambda settings: QueueReactive(Knative(settings)), "replicas by Knative's concurrency rule"
        ),
        "queue_reactive_keda": PolicyKind(
            KedaSettings, lambda settings: QueueReactive(Keda(settings)), "replicas by KEDA's queue rule"
        ),
        "rlhfuse_tail": PolicyKind(TailSettings, TailMigration, "the tail moved together (RLHFuse)", reserved=True),
        "rlhfless_published": PolicyKind(PublishedSettings, Published, "RLHFless (arXiv 2602.22718)"),
        "cost_aware": PolicyKind(
            CostAwareSettings, lambda settings: CostAware(settings, PredictedLengths()), "the run's own scaler"
        ),
    }
)
"""By name; docs/policies.md describes each."""


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A policy for one run. Without settings it has its defaults.

    Raises ValueError for an unknown name, or settings of another policy.
    """
    kind = POLICIES.get(name)
    if kind is None:
        raise ValueError(f"no policy {name!r}; {nearest(name, POLICIES)}There are {', '.join(POLICIES)}")
    settings = kind.settings() if settings is None else settings
    if not isinstance(settings, kind.settings):
        given = type(settings).__name__
        raise ValueError(
            f"{name} takes {kind.settings.__name__}, got {given}; make it with POLICIES[{name!r}].settings"
        )
    return kind.make(settings)


def make_bound(settings: CostAwareSettings, forecaster: Forecaster) -> Policy:
    """`cost_aware` with a forecaster that knows more than it could: a bound, not a policy."""
    return CostAware(settings, forecaster)
