"""Rollouts as a journal has them."""

from __future__ import annotations

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
