"""Find the shared prefixes of many sequences with a trie over blocks of token IDs.

A *shared prefix* is the longest run of whole blocks that a set of samples has in common: a system prompt, a few-shot
block, the prompt of a group, the history of a conversation. Shared prefixes are nested and form a forest: the
*parent* of a prefix is the next shorter one, shared by more samples.

Algorithm: all sequences start in one class. Level by level, a class whose members do not all have the same next
block ends there as a shared prefix and splits into one class per block; a class with a single sample is dropped.
While no class splits, the step to the next level doubles, so that long common prefixes cost only comparisons. No
hashing is involved: two prefixes are the same if their tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.records import IntArray

NONE = -1
"""No shared prefix: the parent of the shortest ones, and the leaf of a sequence that shares nothing."""

_FILL = -1
"""Padding after the end of a sequence; token IDs are never negative."""


@dataclass(frozen=True, slots=True)
class PrefixForest:
    """Shared prefixes, each after its parent."""

    tokens: IntArray  # [prefixes], from the first token
    parent: IntArray  # [prefixes], or NONE
    samples: IntArray  # [prefixes], number of samples that start with it
    leaf: IntArray  # [sequences], the longest shared prefix of each, or NONE
    lengths: IntArray  # [sequences]
    counts: IntArray  # [sequences], samples that have exactly these tokens
    _order: IntArray = field(repr=False)  # [sequences]; those of a prefix are adjacent
    _first: IntArray = field(repr=False)  # [prefixes], index into _order
    _stop: IntArray = field(repr=False)  # [prefixes], index into _order

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def own_tokens(self) -> IntArray:
        """Tokens of each prefix after its parent's, `[prefixes]`."""
        return self.tokens - self._at(self.tokens, self.parent)

    @property
    def shared_tokens(self) -> IntArray:
        """Tokens of the longest shared prefix of each sequence, `[sequences]`."""
        return self._at(self.tokens, self.leaf)

    @property
    def unique_tokens(self) -> int:
        """Fewest tokens to compute: each shared prefix once, plus each sample's tokens after its longest prefix."""
        return int(self.own_tokens.sum() + (self.lengths - self.shared_tokens) @ self.counts)

    def users(self, prefix: int) -> IntArray:
        """Return the sequences that start with a prefix, ascending."""
        return np.sort(self._order[self._first[prefix] : self._stop[prefix]])

    @staticmethod
    def _at(values: IntArray, indices: IntArray) -> IntArray:
        """Return `values` at `indices`, 0 at NONE."""
        return np.append(values, 0)[indices]


def lineage(parent: IntArray, prefix: int) -> list[int]:
    """Return a prefix and all prefixes that it contains, shortest first; [] for NONE. `parent` [prefixes]."""
    upwards = []
    while prefix != NONE:
        upwards.append(prefix)
        prefix = int(parent[prefix])
    return upwards[::-1]


def shared_prefixes(
    sequences: Sequence[Sequence[int] | npt.NDArray[Any]],
    counts: npt.ArrayLike = 1,
    *,
    block_tokens: int = 1,
    last_alone: bool = True,
) -> PrefixForest:
    """Find the shared prefixes of `sequences`; `counts` is the number of samples of each, `[sequences]` or a scalar.

    Prefixes are whole blocks of `block_tokens`. With `last_alone`, a sequence's last token is never part of a
    prefix: engines also compute it for each sample, because it predicts the first response token. Raises ValueError
    if `block_tokens` or a count is below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; a block has at least one token")
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    samples = np.broadcast_to(np.asarray(counts, dtype=np.int64), lengths.shape)
    if samples.size and samples.min() < 1:
        raise ValueError(f"a count is {samples.min()}; each sequence belongs to at least one sample")
    blocks = np.maximum(lengths - last_alone, 0) // block_tokens
    search = _Search(_block_table(sequences, lengths, blocks, block_tokens), blocks, samples)
    prefixes = search.run()
    levels, parents, users, first, stop = prefixes.columns()
    return PrefixForest(
        levels * block_tokens, parents, users, prefixes.leaf, lengths, samples, search.order, first, stop
    )


def _block_table(
    sequences: Sequence[Sequence[int] | npt.NDArray[Any]], lengths: IntArray, blocks: IntArray, block_tokens: int
) -> npt.NDArray[Any]:
    """Return the whole blocks of each sequence, `[sequences, blocks, block_tokens]`, padded with _FILL."""
    width = int(blocks.max(initial=0)) * block_tokens
    whole = blocks * block_tokens
    table = np.full((len(sequences), width), _FILL, dtype=np.int32)
    for row, sequence, tokens in zip(table, sequences, whole.tolist(), strict=True):
        row[:tokens] = sequence[:tokens]
    return table.reshape(len(lengths), width // block_tokens, block_tokens)


class _Search:
    """The search of `shared_prefixes`. Members are the sequences of unfinished classes, ordered by class."""

    def __init__(self, table: npt.NDArray[Any], blocks: IntArray, samples: IntArray) -> None:
        self._table = table
        self._blocks = blocks
        self._samples = samples
        self.order = np.arange(len(blocks))
        self._at = np.arange(len(blocks))
        """Index of each member in `order`."""
        self._class = np.zeros(len(blocks), np.int64)
        self._parents = np.array([NONE], np.int64)
        """The shared prefix that each class split from."""
        self._found = _Found(len(blocks))

    def run(self) -> _Found:
        level, stride = 0, 1
        self._keep(np.ones(len(self.order), bool))
        while len(self._at):
            members = self.order[self._at]
            same = self._same(members, level, stride)
            if same.all():
                level, stride = level + stride, 2 * stride
            elif stride > 1:
                stride //= 2
            else:
                self._split(members, level, np.logical_and.reduceat(same, self._firsts()))
                level += 1
        return self._found

    def _firsts(self) -> IntArray:
        """Return the index of the first member of each class."""
        return np.flatnonzero(np.diff(self._class, prepend=-1))

    def _same(self, members: IntArray, level: int, stride: int) -> npt.NDArray[np.bool_]:
        """Return which members have the same next `stride` blocks as the first member of their class."""
        has = self._blocks[members] >= level + stride
        if not has.all() and (stride > 1 or not has.any()):
            return has
        blocks = self._table[:, level : level + stride]
        first = blocks[members[self._firsts()]]
        alike: npt.NDArray[np.bool_] = blocks[members] == (first if len(first) == 1 else first[self._class])
        return has & alike.all(axis=(1, 2))

    def _split(self, members: IntArray, level: int, kept: npt.NDArray[np.bool_]) -> None:
        """End the classes that are not `kept` before `level`, and split each by its members' next block."""
        splits = ~kept[self._class]
        inside, of = members[splits], self._class[splits]
        parents = self._parents[self._class]
        parents[splits] = self._emit(level, of)
        has = self._blocks[inside] > level
        key = _ranks(self._table[inside, level]) if has.any() else np.zeros(len(inside), np.int64)
        key[~has] = NONE  # ended: first of its class, and alone
        by_block = np.lexsort((key, of))
        self.order[self._at[splits]] = inside[by_block]
        alive = np.ones(len(members), bool)
        alive[splits] = has[by_block]
        begins = np.diff(self._class, prepend=-1) != 0
        begins[splits] |= np.diff(key[by_block], prepend=-2) != 0
        self._class, self._parents = np.cumsum(begins) - 1, parents[begins]
        self._keep(alive)

    def _emit(self, level: int, of: IntArray) -> IntArray:
        """Add the shared prefixes of the classes `of` [members], which end before `level`.

        Returns the prefix of each of these members; NONE where no token is shared.
        """
        if level == 0:
            return np.full(len(of), NONE, np.int64)
        ends, rank = np.unique(of, return_inverse=True)
        samples = np.bincount(self._class, weights=self._samples[self.order[self._at]]).astype(np.int64)[ends]
        start = self._at[self._firsts()[ends]]
        levels = np.full(len(ends), level)
        number = self._found.add(levels, self._parents[ends], samples, start, start + np.bincount(self._class)[ends])
        prefix: IntArray = number[rank]
        self._found.leaf[self.order[self._at[np.isin(self._class, ends)]]] = prefix
        return prefix

    def _keep(self, alive: npt.NDArray[np.bool_]) -> None:
        """Drop members that are not `alive`, and classes of a single sample.

        A class with a single sequence but several samples ends where the sequence does.
        """
        members = self.order[self._at]
        weights = np.where(alive, self._samples[members], 0)
        samples = np.bincount(self._class, weights=weights, minlength=len(self._parents))
        sequences = np.bincount(self._class, weights=alive, minlength=len(self._parents))
        alone = alive & ((samples > 1) & (sequences == 1))[self._class] & (self._blocks[members] > 0)
        if alone.any():
            one, at = members[alone], self._at[alone]
            parents = self._parents[self._class[alone]]
            self._found.leaf[one] = self._found.add(self._blocks[one], parents, self._samples[one], at, at + 1)
        stays = alive & (sequences > 1)[self._class]
        kept, self._class = np.unique(self._class[stays], return_inverse=True)
        self._at, self._parents = self._at[stays], self._parents[kept]


class _Found:
    """The columns of the forest, filled by the search."""

    def __init__(self, sequences: int) -> None:
        self.leaf: IntArray = np.full(sequences, NONE, np.int64)
        self._size = 0
        self._columns: list[tuple[IntArray, ...]] = []

    def add(self, *columns: IntArray) -> IntArray:
        """Add prefixes by their levels, parents, samples, first and stop, `[added]` each, and return their numbers."""
        self._columns.append(columns)
        self._size += len(columns[0])
        return np.arange(self._size - len(columns[0]), self._size)

    def columns(self) -> tuple[IntArray, ...]:
        """Return levels, parents, samples, first and stop of all prefixes, `[prefixes]` each."""
        nothing = np.zeros(0, np.int64)
        return tuple(map(np.concatenate, zip(*self._columns, strict=True))) if self._columns else (nothing,) * 5


def _ranks(rows: npt.NDArray[Any]) -> IntArray:
    """Return a number per row of `rows` [rows, columns], equal for equal rows."""
    whole = np.ascontiguousarray(rows)
    _, ranks = np.unique(whole.view(np.dtype((np.void, whole.strides[0]))).ravel(), return_inverse=True)
    return ranks.astype(np.int64)
