"""A step, and an evaluation, of a run that generates: see rlhfless.orchestrator.supervised for the others."""

from __future__ import annotations

from rlhfless.orchestrator.evaluation import evaluate_held_out
from rlhfless.orchestrator.step import rollout, train

__all__ = ["evaluate_held_out", "rollout", "train"]
