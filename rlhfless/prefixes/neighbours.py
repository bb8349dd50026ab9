"""An order of prompts in which prompts with a long common prefix are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.prefixes.precompute import BLOCK_TOKENS, LEAST_TOKENS
from rlhfless.prefixes.trie import NONE, shared_prefixes
from rlhfless.records import IntArray


def prefix_ranks(prompts: Sequence[Sequence[int]], least_tokens: int = LEAST_TOKENS) -> IntArray:
    """A number per prompt `[prompts]`: equal for prompts with the same prefix, near for prefixes that begin alike, 0
    for prompts without a prefix of at least `least_tokens` that another prompt has."""
    if sum(len(prompt) > least_tokens for prompt in prompts) < 2:
        return np.zeros(len(prompts), np.int64)
    forest = shared_prefixes(prompts, block_tokens=BLOCK_TOKENS)
    lineages: dict[int, tuple[int, ...]] = {NONE: ()}
    for prefix in range(len(forest)):
        above = lineages[int(forest.parent[prefix])]
        lineages[prefix] = (*above, prefix) if forest.tokens[prefix] >= least_tokens else above
    of_prompts = [lineages[leaf] for leaf in forest.leaf.tolist()]
    rank = {lineage: number for number, lineage in enumerate(sorted({(), *of_prompts}))}
    return np.array([rank[lineage] for lineage in of_prompts], np.int64)
