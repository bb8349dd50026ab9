"""Policies side by side: which actors run, and which samples each one draws. Pure; docs/policies.md describes each."""

from rlhfless.scaling.policies.registry import POLICIES, PolicyKind, make_policy, policy_kind

__all__ = ["POLICIES", "PolicyKind", "make_policy", "policy_kind"]
