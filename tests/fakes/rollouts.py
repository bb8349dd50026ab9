"""Rollouts: as a journal has them, and as they come from an actor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.records import FinishReason, Rollout, VersionSpan


def rollout(prompt_id: str = "p", sample: int = 0, tokens: int = 3) -> Rollout:
    return Rollout(
        prompt_id,
        sample,
        2**62 + 5,
        np.arange(tokens, dtype=np.int64),
        np.linspace(-1, 0, tokens, dtype=np.float32),
        "täxt\n",
        FinishReason.STOP,
        (VersionSpan("run/1/0/ab", 0, 2), VersionSpan("run/1/0/cd", 2, tokens)),
        "actor-0",
        1.5,
        2.5,
        16,
    )


def drawn(
    prompt_id: str,
    index: int,
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray | None = None,
    *,
    text: str = "",
    seed: int = 0,
    reason: FinishReason = FinishReason.STOP,
    spans: tuple[VersionSpan, ...] = (),
    actor: str = "a",
) -> Rollout:
    """With these tokens, drawn within a second; logprobs are 0 unless they are given."""
    token_ids = np.array(tokens, dtype=np.int64)
    given = np.zeros(len(token_ids), np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return Rollout(prompt_id, index, seed, token_ids, given, text, reason, spans, actor, 0.0, 1.0)
