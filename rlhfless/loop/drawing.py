"""A step, and an evaluation, of a run that draws what it learns from: see rlhfless.loop.supervised for the others."""

from __future__ import annotations

from rlhfless.loop.evaluation import evaluate_held_out
from rlhfless.loop.step import rollout, train

__all__ = ["evaluate_held_out", "rollout", "train"]
