"""Shared prefixes of prompts for planning, from lengths only, and the ones that an actor computes in advance.

A `PrefixForest`, which knows the tokens, gives the same tree.

By default an engine computes a prefix with the first sample that starts with it: its cache contains a block as soon
as it is allocated. Prefixes of several prompts are instead computed before the samples that start with them, shorter
before longer, in a separate call. The ledger then separates their cost from the samples', and all samples hit them,
whatever the order of admission. Prompts of a single group are left to the engine: computing them first would delay
its decoding until all prefills are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfless.prefixes.trie import NONE, PrefixForest, lineage, shared_prefixes
from rlhfless.records import IntArray

LEAST_TOKENS = 256
"""Shorter prefixes are left to the engine: a separate call takes about 10 ms, in which an engine on one CPU core
prefills some hundred tokens of a small model."""

BLOCK_TOKENS = 16
"""Block size for counting prefixes, vLLM's smallest."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on CPU engines. The attention kernel requires multiples of 32, and vLLM's default of 128
shares no short prompts."""


@dataclass(frozen=True)
class PrefixTree:
    """Shared prefixes, each after its parent, and the longest prefix of each prompt.

    Raises ValueError for a parent that comes later or is not shorter.
    """

    tokens: IntArray  # [prefixes], from the first token
    parent: IntArray  # [prefixes], or NONE
    leaf: IntArray  # [prompts], the longest shared prefix of each, or NONE

    def __post_init__(self) -> None:
        above = np.append(self.tokens, 0)[self.parent]
        wrong = np.flatnonzero((self.parent >= np.arange(len(self.tokens))) | (above >= self.tokens))
        if wrong.size:
            number = int(wrong[0])
            raise ValueError(
                f"prefix {number} of {self.tokens[number]} tokens has the parent {self.parent[number]}; a parent comes "
                "before its children, and is shorter"
            )
        if self.leaf.size and not (self.leaf.min() >= NONE and self.leaf.max() < len(self.tokens)):
            raise ValueError(f"leaf names the prefix {self.leaf.max()}; there are {len(self.tokens)}")

    @classmethod
    def nothing(cls, prompts: int) -> PrefixTree:
        """Create the tree of prompts that share nothing."""
        none = np.zeros(0, np.int64)
        return cls(none, none, np.full(prompts, NONE, np.int64))

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]]) -> PrefixTree:
        """Create the tree of these distinct prompts."""
        return cls.of(shared_prefixes(prompts), len(prompts)) if len(prompts) > 1 else cls.nothing(len(prompts))

    @classmethod
    def parse(cls, texts: Sequence[str]) -> PrefixTree:
        """Parse the tree from the `text` of each prompt, `[prompts]`."""
        number: dict[str, int] = {}
        tokens: list[int] = []
        parent: list[int] = []
        leaf = []
        for text in texts:
            above = NONE
            for part in text.split():
                if part not in number:
                    number[part] = len(tokens)
                    tokens.append(int(part.partition(":")[2]))
                    parent.append(above)
                above = number[part]
            leaf.append(above)
        return cls(*(np.array(column, dtype=np.int64) for column in (tokens, parent, leaf)))

    def text(self, prompt: int) -> str:
        """Format the prefixes of a prompt as `number:tokens`, shortest first, as in a trace."""
        return " ".join(f"{prefix}:{self.tokens[prefix]}" for prefix in self.lineage(int(self.leaf[prompt])))

    @classmethod
    def of(cls, forest: PrefixForest, prompts: int) -> PrefixTree:
        """Create the tree of a forest over distinct prompts."""
        return cls(forest.tokens, forest.parent, forest.leaf[:prompts])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def own_tokens(self) -> IntArray:
        """Tokens of each prefix after its parent's, `[prefixes]`."""
        own: IntArray = self.tokens - np.append(self.tokens, 0)[self.parent]
        return own

    @property
    def shared_tokens(self) -> IntArray:
        """Tokens of the longest shared prefix of each prompt, `[prompts]`."""
        shared: IntArray = np.append(self.tokens, 0)[self.leaf]
        return shared

    @cached_property
    def levels(self) -> IntArray:
        """All prefixes of each prompt, `[depth, prompts]`: shortest first, NONE after the longest."""
        above, by_depth = np.append(self.parent, NONE), [self.leaf]
        while (by_depth[-1] != NONE).any():
            by_depth.append(above[by_depth[-1]])
        upwards = np.stack(by_depth)
        depth = (upwards != NONE).sum(axis=0)
        level = depth - 1 - np.arange(len(by_depth) - 1)[:, None]
        levels: IntArray = np.where(level >= 0, np.take_along_axis(upwards, np.maximum(level, 0), axis=0), NONE)
        return levels

    def lineage(self, prefix: int) -> list[int]:
        """Return a prefix and all prefixes that it contains, shortest first; [] for NONE."""
        return lineage(self.parent, prefix)

    def unique_tokens(self, prompt_tokens: IntArray) -> int:
        """Return the number of prompt tokens, counting each shared prefix once; `prompt_tokens` [prompts]."""
        leaves = set(self.leaf.tolist())
        used = np.array(sorted({prefix for leaf in leaves for prefix in self.lineage(leaf)}), np.int64)
        return int(self.own_tokens[used].sum() + (prompt_tokens - self.shared_tokens).sum())

    def long(self, least_tokens: int = LEAST_TOKENS) -> PrefixTree:
        """Return the tree without prefixes that add fewer than `least_tokens`."""
        nearest = nearest_long(self.parent, self.tokens, least_tokens)
        kept = itself(nearest)
        number = np.full(len(self) + 1, NONE)  # the last one stands for NONE
        number[kept] = np.arange(len(kept))
        renamed = np.append(number[nearest], NONE)
        return PrefixTree(self.tokens[kept], renamed[self.parent[kept]], renamed[self.leaf])

    @cached_property
    def ranks(self) -> IntArray:
        """A number per prompt `[prompts]` that groups prompts by prefix.

        Equal for prompts with the same longest prefix, close for prefixes that start alike, 0 for prompts without a
        prefix.
        """
        of_prompts = [tuple(self.lineage(leaf)) for leaf in self.leaf.tolist()]
        rank = {lineage: number for number, lineage in enumerate(sorted({(), *of_prompts}))}
        return np.array([rank[lineage] for lineage in of_prompts], np.int64)

    def to_precompute(self, prompts: IntArray, least_tokens: int = LEAST_TOKENS) -> list[int]:
        """Return the prefixes that at least two of these distinct prompts share; see the function."""
        users = np.zeros(len(self), np.int64)
        for leaf in self.leaf[prompts].tolist():
            users[self.lineage(leaf)] += 1
        return itself(nearest_long(self.parent, self.tokens, least_tokens, (users > 1).tolist()))


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
