"""Rollouts as a trace has them."""

from __future__ import annotations

from rlhfless.records import FinishReason
from rlhfless.records.traces import TracedRollout

TOKENS = 50


def traced(
    step: int,
    prompt_id: str = "p",
    index: int = 0,
    *,
    prompt_tokens: int = 10,
    tokens: int = TOKENS,
    actor: str = "a",
    started_s: float = 0.0,
    finished_s: float = 1.0,
    reason: FinishReason = FinishReason.STOP,
) -> TracedRollout:
    ends = actor, started_s, finished_s, None, None
    return TracedRollout(step, prompt_id, index, 0, prompt_tokens, tokens, 0, 0.0, {}, {}, reason, (), *ends)


def rollout(actor: str, step: int, index: int, token_s: float) -> TracedRollout:
    """Of TOKENS tokens, of which each takes so long."""
    return traced(step, index=index, prompt_tokens=4, actor=actor, finished_s=TOKENS * token_s)
