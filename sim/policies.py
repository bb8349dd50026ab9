"""The policies that a scenario or a replay can name: those of runs, the baselines, and a user's own by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasts import PredictedLengths
from rlhfless.scaling.policies.static import Static
from rlhfless.scaling.policy import Policy
from rlhfless.sim.baselines.queue_reactive import KedaSpec, KnativeSpec, RayServeSpec, keda, knative, ray_serve
from rlhfless.sim.baselines.rlhfless_published import RLHFlessPaperSpec, RLHFlessPublished
from rlhfless.sim.baselines.rlhfuse_tail import RLHFuseTail, TailSpec
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import nearest
from rlhfless.spec.fleet import POLICY_SEAM, CostAwareSpec, StaticSpec
from rlhfless.spec.imports import load_target


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One policy of `POLICIES`."""

    settings: type[SpecModel]
    make: Callable[[Any, RunContract], Policy]
    placement: Literal["colocated", "disaggregated"] | None = None
    """The placement that it is made for; None: any."""
    reserved: bool = False
    """Whether its users rent all devices for the whole run, so that idle devices are paid for as well."""


def _without_contract(
    settings: type[SpecModel],
    make: Callable[[Any], Policy],
    placement: Literal["colocated", "disaggregated"] | None = None,
    *,
    reserved: bool = False,
) -> PolicyKind:
    return PolicyKind(settings, lambda chosen, run: make(chosen), placement, reserved)  # noqa: ARG005


POLICIES: Mapping[str, PolicyKind] = MappingProxyType(
    {
        "static_colocated": _without_contract(StaticSpec, Static, "colocated", reserved=True),
        "static_disaggregated": _without_contract(StaticSpec, Static, "disaggregated", reserved=True),
        "static": _without_contract(StaticSpec, Static),
        "queue_reactive_ray_serve": _without_contract(RayServeSpec, ray_serve),
        "queue_reactive_knative": _without_contract(KnativeSpec, knative),
        "queue_reactive_keda": _without_contract(KedaSpec, keda),
        "rlhfuse_tail": _without_contract(TailSpec, RLHFuseTail, reserved=True),
        "rlhfless_published": _without_contract(RLHFlessPaperSpec, RLHFlessPublished),
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
    """Return the policy of this name, or the user's own for an import path (docs/extending.md). Raises PolicyError."""
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
    """Make a policy for one run, with its default settings if none are given.

    Raises PolicyError for an unknown name, ValueError for settings of another policy.
    """
    kind = policy_kind(name)
    settings = configured(name, {}) if settings is None else settings
    if not isinstance(settings, kind.settings):
        given = type(settings).__name__
        raise ValueError(f"{name} takes {kind.settings.__name__}, got {given}; make it with configured({name!r}, ...)")
    return kind.make(settings, run or RunContract())


def configured(name: str, keys: Mapping[str, Any]) -> SpecModel:
    """Validate a policy's own keys. Raises PolicyError, or pydantic's ValidationError."""
    named = {"type": name} if ":" in name else {}
    return policy_kind(name).settings.model_validate({**keys, **named})
