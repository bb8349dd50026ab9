"""Policies side by side: who draws what, and which replicas live. Pure; docs/policies.md describes each."""

from rlhfless.scaling.policies.registry import POLICIES, PolicyKind, make_policy
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

__all__ = [
    "POLICIES",
    "CostAwareSettings",
    "KedaSettings",
    "KnativeSettings",
    "PolicyKind",
    "PolicySettings",
    "PublishedSettings",
    "RayServeSettings",
    "StaticSettings",
    "TailSettings",
    "make_policy",
]
