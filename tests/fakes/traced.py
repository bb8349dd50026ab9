"""Rollouts as a trace has them."""

from __future__ import annotations

from rlhfless.records import FinishReason
from rlhfless.records.traces import TracedRollout

TOKENS = 50


def rollout(actor: str, step: int, index: int, token_s: float) -> TracedRollout:
    return TracedRollout(
        step, "p", index, 0, 4, TOKENS, 0, 0.0, {}, {}, FinishReason.STOP, (), actor, 0.0, TOKENS * token_s, None, None
    )
