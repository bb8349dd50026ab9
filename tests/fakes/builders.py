"""Builders of values that many tests need: rollouts, trace rows, reward samples, and arbitrary text."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rlhfless.records import FinishReason, Rollout, VersionSpan
from rlhfless.records.traces import TracedRollout
from rlhfless.rewards import RewardSample


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
    """Return a rollout with these tokens, generated within a second. Logprobs default to 0."""
    token_ids = np.array(tokens, dtype=np.int64)
    given = np.zeros(len(token_ids), np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return Rollout(prompt_id, index, seed, token_ids, given, text, reason, spans, actor, 0.0, 1.0)


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


def timed(actor: str, step: int, index: int, token_s: float) -> TracedRollout:
    """Return a trace row of TOKENS tokens at `token_s` seconds per token."""
    return traced(step, index=index, prompt_tokens=4, actor=actor, finished_s=TOKENS * token_s)


def samples_of(*responses, prompt_id="p-1", **columns):
    """Return the samples of one prompt."""
    return [
        RewardSample("the prompt", text, len(text), FinishReason.LENGTH, columns, prompt_id, index)
        for index, text in enumerate(responses)
    ]


TEXTS = st.text(alphabet=st.characters(exclude_categories=()))
"""Arbitrary text, including lone surrogates and control characters."""


ANY_TEXT = TEXTS | st.binary().map(os.fsdecode)
"""Arbitrary text, including file names that are not UTF-8."""
