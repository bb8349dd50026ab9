"""Chooses the shared prefixes that an actor computes before the samples that begin with them.

An engine by itself computes a prefix with the first sample that begins with it: its cache knows a block as soon as it
is allocated. The prefixes of several prompts are computed ahead of that, the shorter before the longer, in a call of
their own: the ledger then has their cost apart from the samples', and all samples find them, whatever lies between in
the order of admission. Prompts of one group are left to the engine: to compute them first would keep its decoding
waiting for all prefills.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.prefixes.trie import NONE, shared_prefixes
from rlhfless.records import IntArray

LEAST_TOKENS = 256
"""Shorter prefixes are left to the engine: a call of its own takes about 10 ms, in which an engine on one CPU core
prefills some hundred tokens of a small model."""

BLOCK_TOKENS = 16
"""Prefixes are counted in blocks of this size, vLLM's smallest."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block of an engine on CPU cores; the attention kernel wants multiples of 32,
and vLLM's default of 128 shares no short prompts."""


def to_precompute(prompts: Sequence[tuple[int, ...]], least_tokens: int = LEAST_TOKENS) -> list[tuple[int, ...]]:
    """The prefixes, each after those that it begins with, that at least two of these different prompts share; each has
    `least_tokens` that no other in the list has."""
    long = [prompt for prompt in prompts if len(prompt) > least_tokens]
    if len(long) < 2:
        return []
    forest = shared_prefixes(long, block_tokens=BLOCK_TOKENS)
    chosen = itself(nearest_long(forest.parent, forest.tokens, least_tokens))
    return [tuple(long[int(forest.users(prefix)[0])][: int(forest.tokens[prefix])]) for prefix in chosen]


def nearest_long(
    parent: IntArray, tokens: IntArray, least_tokens: int, wanted: Sequence[bool] | None = None
) -> IntArray:
    """The longest chosen prefix at or above each prefix, or NONE, `[prefixes]`. Chosen is a prefix, of those `wanted`
    (all if None), that has `least_tokens` after the longest chosen one above it."""
    nearest = np.full(len(parent) + 1, NONE)  # the last one stands for NONE
    for prefix in range(len(parent)):
        above = int(nearest[parent[prefix]])
        begins = int(tokens[above]) if above != NONE else 0
        chosen = (wanted is None or wanted[prefix]) and tokens[prefix] - begins >= least_tokens
        nearest[prefix] = prefix if chosen else above
    return nearest[:-1]


def itself(nearest: IntArray) -> list[int]:
    """The chosen prefixes: they are their own nearest."""
    own: list[int] = np.flatnonzero(nearest == np.arange(len(nearest))).tolist()
    return own
