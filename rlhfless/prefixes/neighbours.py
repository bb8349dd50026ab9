"""An order of prompts in which prompts with a long common prefix are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.prefixes.precompute import BLOCK_TOKENS, LEAST_TOKENS
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import shared_prefixes
from rlhfless.records import IntArray


def prefix_ranks(prompts: Sequence[Sequence[int]], least_tokens: int = LEAST_TOKENS) -> IntArray:
    """A number per prompt `[prompts]`: equal for prompts with the same prefix, near for prefixes that begin alike, 0
    for prompts without a prefix of at least `least_tokens` that another prompt has."""
    if sum(len(prompt) > least_tokens for prompt in prompts) < 2:
        return np.zeros(len(prompts), np.int64)
    forest = shared_prefixes(prompts, block_tokens=BLOCK_TOKENS)
    return PrefixTree.of(forest, len(prompts)).ranks(least_tokens)
