"""Choose the shared prefixes that an actor computes before the samples that start with them.

By default an engine computes a prefix with the first sample that starts with it: its cache contains a block as soon
as it is allocated. Prefixes of several prompts are instead computed in advance, shorter before longer, in a separate
call. The ledger then separates their cost from the samples', and all samples hit them, whatever the order of
admission. Prompts of a single group are left to the engine: computing them first would delay its decoding until all
prefills are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.prefixes.trie import NONE, shared_prefixes
from rlhfless.records import IntArray

LEAST_TOKENS = 256
"""Shorter prefixes are left to the engine: a separate call takes about 10 ms, in which an engine on one CPU core
prefills some hundred tokens of a small model."""

BLOCK_TOKENS = 16
"""Block size for counting prefixes, vLLM's smallest."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on CPU engines. The attention kernel requires multiples of 32, and vLLM's default of 128
shares no short prompts."""


def to_precompute(prompts: Sequence[tuple[int, ...]], least_tokens: int = LEAST_TOKENS) -> list[tuple[int, ...]]:
    """Return the prefixes shared by at least two of these distinct prompts, parents first.

    Each adds at least `least_tokens` to the previously chosen prefix that it starts with.
    """
    long = [prompt for prompt in prompts if len(prompt) > least_tokens]
    if len(long) < 2:
        return []
    forest = shared_prefixes(long, block_tokens=BLOCK_TOKENS)
    chosen = itself(nearest_long(forest.parent, forest.tokens, least_tokens))
    return [tuple(long[int(forest.users(prefix)[0])][: int(forest.tokens[prefix])]) for prefix in chosen]


def nearest_long(
    parent: IntArray, tokens: IntArray, least_tokens: int, wanted: Sequence[bool] | None = None
) -> IntArray:
    """Return the longest chosen prefix at or above each prefix, or NONE, `[prefixes]`.

    A prefix is chosen if it is `wanted` (all if None) and adds `least_tokens` to the longest chosen prefix above it.
    """
    nearest = np.full(len(parent) + 1, NONE)  # the last one stands for NONE
    for prefix in range(len(parent)):
        above = int(nearest[parent[prefix]])
        begins = int(tokens[above]) if above != NONE else 0
        chosen = (wanted is None or wanted[prefix]) and tokens[prefix] - begins >= least_tokens
        nearest[prefix] = prefix if chosen else above
    return nearest[:-1]


def itself(nearest: IntArray) -> list[int]:
    """Return the chosen prefixes: those that are their own nearest."""
    own: list[int] = np.flatnonzero(nearest == np.arange(len(nearest))).tolist()
    return own
