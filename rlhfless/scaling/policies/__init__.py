"""Scaling policies: which actors run, and which samples each one generates. Pure. See docs/policies.md."""
