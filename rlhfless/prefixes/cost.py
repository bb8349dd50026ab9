"""The time that shared prefixes cost and save, by an engine's latency model."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rlhfless.prefixes.trie import PrefixForest
from rlhfless.records import FloatArray


class PrefillModel(Protocol):
    """The part of an engine's latency model (rlhfless.scaling.engine_model) that prefixes need."""

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to prefill `tokens` new tokens after `context_tokens` that are cached already."""
        ...


def compute_s(forest: PrefixForest, model: PrefillModel) -> FloatArray:
    """Seconds to compute the own tokens of each prefix once, after its parent's, `[prefixes]`."""
    own = forest.own_tokens
    pairs = zip(own.tolist(), (forest.tokens - own).tolist(), strict=True)
    return np.array([model.prefill_s(new, cached) for new, cached in pairs], dtype=np.float32)


def move_pays(tokens: int, compute_s: float, kv_token_s: float) -> bool:
    """Whether an actor should get `tokens` of a prefix from another actor, by a KV connector that takes `kv_token_s`
    per token, rather than compute them in `compute_s`. Infinite `kv_token_s`: the platform has no connector."""
    return tokens * kv_token_s < compute_s


def saved_s(forest: PrefixForest, model: PrefillModel) -> FloatArray:
    """Seconds saved when each prefix is computed once and not for each of its samples, `[prefixes]`."""
    return (forest.samples - 1).astype(np.float32) * compute_s(forest, model)
