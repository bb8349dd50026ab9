"""Shared prefixes of prompts for planning, from lengths only: the simulator's side of `rlhfless.prefixes`.

A `PrefixForest`, which knows the tokens, gives the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfless.prefixes.precompute import LEAST_TOKENS, itself, nearest_long
from rlhfless.prefixes.trie import NONE, PrefixForest, lineage, shared_prefixes
from rlhfless.records import IntArray


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
        used = self._used(self.leaf)
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
        """Return the prefixes that at least two of these distinct prompts share; see `precompute.to_precompute`."""
        users = np.zeros(len(self), np.int64)
        for leaf in self.leaf[prompts].tolist():
            users[self.lineage(leaf)] += 1
        return itself(nearest_long(self.parent, self.tokens, least_tokens, (users > 1).tolist()))

    def _used(self, leaves: IntArray) -> IntArray:
        """Return the prefixes of these leaves, ascending."""
        return np.array(sorted({prefix for leaf in set(leaves.tolist()) for prefix in self.lineage(leaf)}), np.int64)
