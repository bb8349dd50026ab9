"""Scaling policies: which actors run, and which samples each one generates. Pure; docs/policies.md describes them."""
