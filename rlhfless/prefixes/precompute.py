"""Which shared prefixes an actor computes before the samples that begin with them.

An engine by itself computes a prefix with the first sample that begins with it: its cache knows a block as soon as it
is allocated. The prefixes of several prompts are computed ahead of that, the shorter before the longer, in a call of
their own: the ledger then has their cost apart from the samples', and all samples find them, whatever lies between in
the order of admission. Prompts of one group are left to the engine: to compute them first would keep its decoding
waiting for all prefills.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.prefixes.trie import NONE, shared_prefixes

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
    found, kept = [], {NONE: 0}
    for prefix in range(len(forest)):
        above = kept[int(forest.parent[prefix])]
        tokens = int(forest.tokens[prefix])
        kept[prefix] = tokens if tokens - above >= least_tokens else above
        if kept[prefix] == tokens:
            found.append(tuple(long[int(forest.users(prefix)[0])][:tokens]))
    return found
