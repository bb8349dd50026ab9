"""Sequences in one row of tokens, in which each shared prefix lies once: the layout of prefix-grouped attention.

A *segment* is a run of new tokens: the own tokens of a shared prefix, or the rest of a sequence after its longest one.
Segments lie in depth-first order, so that all segments that begin with a prefix follow it without a gap. Each token
attends to the tokens before it in its segment, and to all own tokens of the prefixes that its segment comes after:

    system | prompt A | response 1 | response 2 | prompt B | response 3
    `system` is attended by everything behind it, `prompt A` by the responses 1 and 2.

Where packing does not pay, micro-batches are padded: sequences of similar length side by side (`padded_parts`).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.prefixes.trie import NONE, lineage, shared_prefixes
from rlhfless.records import IntArray

PAYS_BELOW = 0.7
"""Pack sequences on a CPU where that computes less than this part of the padded pass's tokens. Measured on one core
with 0.8 M parameters: gathers and calls per prefix make a token a third more expensive, so packing pays below 0.75."""

JOIN_KEYS = 875
"""What joining a prefix to the attention of a token behind it costs on a GPU, as attention to so many keys (computed).
For each number of a token's queries a training step moves 42 more bytes: 10 forward (queries and output of the second
kernel, and the mean of two outputs) and 32 backward (queries, output and two gradients once more, and its sum in
float32). An H100 has time for 250 FLOPs a byte (990 TFLOP/s of its data sheet at 65 %, 3.35 TB/s at 80 %), attention to
one key takes 12 in both passes: 42 x 250 / 12. Devices of other kinds are within a factor of two."""

SIMILAR_LENGTH = 0.875
"""A sequence of at least this length, relative to its micro-batch's longest, still joins. On uniform lengths (20 to 130
tokens) it lowers padding from 20 % to 9 %, and thus the CPU time of a step by a tenth."""

FAIR_SIZE = 0.25
"""Part of the token budget below which a micro-batch takes sequences of any length."""

LEAST_SAVED_TOKENS = 32
"""A prefix is shared on a CPU if that saves so many tokens: each one is one more attention call per layer."""


def padded_parts(lengths: IntArray, budget_tokens: int) -> Iterator[IntArray]:
    """Index arrays of the sequences of each micro-batch, `lengths` [sequences], longest first.

    The padded size of a micro-batch is at most `budget_tokens`, except that a longer sequence stands alone. Once
    it is a fair size it takes no more sequences that are much shorter than its longest: another pass costs less
    than the padding. The longest come first, so that the peak of memory, and running out of it, comes at the
    start of a step.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered, start = lengths[order], 0
    while start < len(order):
        width = int(ordered[start])
        alike = int(np.count_nonzero(ordered[start:] >= SIMILAR_LENGTH * width))
        fair = int(FAIR_SIZE * budget_tokens) // width
        rows = max(1, min(budget_tokens // width, max(alike, fair)))
        yield order[start : start + rows]
        start += rows


def padded_tokens(lengths: IntArray, budget_tokens: int) -> int:
    """Tokens of all micro-batches of the padded pass, padding included."""
    return sum(len(part) * int(lengths[part].max()) for part in padded_parts(lengths, budget_tokens))


@dataclass(frozen=True, slots=True)
class Packing:
    """Where sequences lie in one row without padding, and which of their prefixes are computed once."""

    pays_below: float = 0.0
    """Part of the padded pass's tokens: a row is taken where it computes less. 0: never; infinite: always."""
    token_keys: float | None = None
    """On a GPU: how many keys a token could attend to in the time that a layer's other products take it. Decides
    whether a prefix saves more than joining it costs. None: it pays if it saves `least_saved_tokens`."""
    least_saved_tokens: int = LEAST_SAVED_TOKENS

    def pays(self, own: int, depth: int, samples: int, behind: int, row_tokens: int) -> bool:
        """Whether it pays to compute `own` tokens after `depth` others once for several samples, which have `behind`
        tokens behind them, in rows of at most `row_tokens`: a prefix is computed anew in each row."""
        if self.token_keys is None:
            return own * (samples - 1) >= self.least_saved_tokens
        rows = -(-(own + behind) // row_tokens)
        return own * (samples - rows) * (self.token_keys + depth + own / 2) > JOIN_KEYS * behind

    def row_pays(self, alone: int, packed: PackedSegments) -> bool:
        """Whether a row of sequences of `alone` tokens pays in this layout: the kernel of a level passes the whole row,
        also tokens that come after no prefix of it."""
        if self.token_keys is None:
            return True
        computed = len(packed.source)
        return (alone - computed) * self.token_keys > JOIN_KEYS * computed * len(packed.levels())


NEVER, ON_CPUS, ALWAYS = Packing(), Packing(PAYS_BELOW), Packing(math.inf)


@dataclass(frozen=True, slots=True)
class PackedSegments:
    """The layout of some sequences."""

    source: IntArray  # [packed], index of the token in the sequences one after the other
    positions: IntArray  # [packed], in its sequence
    index: IntArray  # [tokens], where each token of the sequences one after the other lies
    segments: tuple[tuple[int, int], ...]
    """(start, tokens) of each segment."""
    shared: tuple[tuple[int, int, int], ...]
    """(start, stop, end) of each prefix: its own tokens are [start, stop), and the tokens that come after it, and
    attend to it, [stop, end)."""

    def levels(self) -> list[list[tuple[int, int, int]]]:
        """`shared` by depth, the shortest prefixes first, without those that no token comes after."""
        levels: list[list[tuple[int, int, int]]] = []
        ends: list[int] = []  # of the prefixes that the next one is inside of
        for start, stop, end in sorted(self.shared):
            while ends and ends[-1] <= start:
                ends.pop()
            if len(ends) == len(levels):
                levels.append([])
            if end > stop:
                levels[len(ends)].append((start, stop, end))
            ends.append(end)
        return [level for level in levels if level]

    @classmethod
    def side_by_side(cls, lengths: IntArray) -> PackedSegments:
        """Sequences one after the other, which share nothing."""
        ends = np.cumsum(lengths)
        every, starts = np.arange(int(lengths.sum())), ends - lengths
        segments = tuple((start, tokens) for start, tokens in zip(starts.tolist(), lengths.tolist(), strict=True))
        return cls(
            source=every,
            positions=every - np.repeat(starts, lengths),
            index=every,
            segments=tuple(segment for segment in segments if segment[1]),
            shared=(),
        )


def pruned(
    tokens: IntArray, above: IntArray, samples: IntArray, total: IntArray, packing: Packing, row_tokens: int
) -> tuple[IntArray, IntArray]:
    """A forest without the prefixes that do not pay; their own tokens then belong to the prefixes, or sequences, that
    come after them. `tokens`, `above`, `samples` and `total`, the tokens of all their samples, [prefixes], each after
    the one above it.

    Returns the one above each that is kept, [prefixes], and for each prefix the longest kept one up to it,
    [prefixes + 1]; the last of these is for NONE.
    """
    parent, kept = above.copy(), np.full(len(tokens) + 1, NONE)
    for prefix in range(len(tokens)):
        parent[prefix] = before = kept[above[prefix]]
        depth, users = int(tokens[before]) if before != NONE else 0, int(samples[prefix])
        own, behind = int(tokens[prefix]) - depth, int(total[prefix] - users * tokens[prefix])
        kept[prefix] = prefix if users and packing.pays(own, depth, users, behind, row_tokens) else before
    return parent, kept


class SharingSequences:
    """Sequences, and those of their shared prefixes that it pays to compute once."""

    def __init__(
        self, tokens: npt.NDArray[Any], lengths: IntArray, packing: Packing = ALWAYS, row_tokens: int = sys.maxsize
    ) -> None:
        """`tokens` [tokens] of all sequences, one after the other; `lengths` [sequences]. `packing` and `row_tokens`:
        see Packing.pays."""
        self.lengths = lengths
        ends = np.cumsum(lengths)
        rows = [tokens[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
        forest = shared_prefixes(rows, last_alone=False)
        total = np.zeros(len(forest) + 1, np.int64)  # the last one is of NONE
        np.add.at(total, forest.leaf, lengths)
        for prefix in range(len(forest) - 1, -1, -1):
            total[forest.parent[prefix]] += total[prefix]
        parent, kept = pruned(forest.tokens, forest.parent, forest.samples, total[:-1], packing, row_tokens)
        leaf = kept[forest.leaf]
        depths = np.append(forest.tokens, 0)
        self.depth = forest.tokens
        """Tokens of each prefix, `[prefixes]`."""
        self.own = forest.tokens - depths[parent]
        """Tokens of each prefix after its parent's, `[prefixes]`."""
        self.rest = lengths - depths[leaf]
        """Tokens of each sequence after its longest prefix, `[sequences]`."""
        self.lineages = [tuple(lineage(parent, prefix)) for prefix in leaf.tolist()]
        """The prefixes of each sequence, the shortest first."""
        self.order = sorted(range(len(lengths)), key=lambda number: (self.lineages[number], -int(lengths[number])))
        """Depth first: users of a prefix one after the other, otherwise the longest first."""
        self.rank = np.argsort(self.order).tolist()
        """Place of each sequence in `order`."""

    def added(self, sequence: int, present: set[int]) -> int:
        """Tokens that a sequence adds to a row that has the prefixes `present`."""
        missing = [prefix for prefix in self.lineages[sequence] if prefix not in present]
        return int(self.own[missing].sum() + self.rest[sequence])

    def cut(self, budget_tokens: int, also: IntArray) -> list[IntArray]:
        """Micro-batches, as index arrays: the row of each has at most `budget_tokens`, and so has its sum of `also`
        [sequences]; a longer sequence stands alone. The largest comes first, so that memory peaks at the start."""
        parts: list[tuple[int, list[int]]] = []
        packed, others, present = 0, 0, set[int]()
        for sequence in self.order:
            packed, others = packed + self.added(sequence, present), others + int(also[sequence])
            if not parts or max(packed, others) > budget_tokens:
                parts.append((0, []))
                packed, others, present = int(self.lengths[sequence]), int(also[sequence]), set()
            present.update(self.lineages[sequence])
            parts[-1] = (packed, [*parts[-1][1], sequence])
        return [np.array(part) for _, part in sorted(parts, key=lambda part: -part[0])]

    def deal(self, ranks: int) -> list[IntArray]:
        """Index arrays, one for each of `ranks`, of about equal packed tokens; users of a prefix stay together."""
        present: set[int] = set()
        weights = np.zeros(len(self.order))
        for place, sequence in enumerate(self.order):
            weights[place] = self.added(sequence, present)
            present.update(self.lineages[sequence])
        middles = np.cumsum(weights) - weights / 2
        rank = np.minimum(middles * ranks // max(weights.sum(), 1), ranks - 1)
        return [np.array(self.order, np.int64)[rank == number] for number in range(ranks)]

    def pack(self, sequences: IntArray) -> PackedSegments:
        """The layout of these sequences in one row; `source` and `index` are about their own tokens, one after the
        other in this order."""
        return _Packing(self, sequences.tolist()).run()


class _Packing:
    """Builds the layout that `SharingSequences.pack` returns."""

    def __init__(self, of: SharingSequences, sequences: list[int]) -> None:
        users = Counter(prefix for sequence in sequences for prefix in of.lineages[sequence])
        lengths = of.lengths[sequences]
        self._of = of
        self._sequences = sequences
        self._lineages = [[prefix for prefix in of.lineages[number] if users[prefix] > 1] for number in sequences]
        self._lengths = lengths.tolist()
        self._starts = (np.cumsum(lengths) - lengths).tolist()
        self._index = np.zeros(int(lengths.sum()), np.int64)
        self._source: list[IntArray] = []
        self._positions: list[IntArray] = []
        self._segments: list[tuple[int, int]] = []
        self._size = 0

    def run(self) -> PackedSegments:
        at: dict[int, int] = {}
        ends: dict[int, int] = {}
        for number in sorted(range(len(self._sequences)), key=lambda number: self._of.rank[self._sequences[number]]):
            depth = 0
            for prefix in self._lineages[number]:
                tokens = int(self._of.depth[prefix]) - depth
                if prefix not in at:
                    at[prefix] = self._add(number, depth, tokens)
                self._place(number, depth, tokens, at[prefix])
                depth += tokens
            rest = self._lengths[number] - depth
            self._place(number, depth, rest, self._add(number, depth, rest))
            ends |= dict.fromkeys(self._lineages[number], self._size)
        stops = {start: start + tokens for start, tokens in self._segments}
        nothing = [np.zeros(0, np.int64)]
        return PackedSegments(
            source=np.concatenate(self._source or nothing),
            positions=np.concatenate(self._positions or nothing),
            index=self._index,
            segments=tuple(self._segments),
            shared=tuple((start, stops[start], ends[prefix]) for prefix, start in at.items()),
        )

    def _add(self, number: int, depth: int, tokens: int) -> int:
        """A segment of the next `tokens` of a sequence, from position `depth` on. Returns where it begins."""
        start, run = self._size, np.arange(depth, depth + tokens)
        self._source.append(self._starts[number] + run)
        self._positions.append(run)
        if tokens:
            self._segments.append((start, tokens))
        self._size += tokens
        return start

    def _place(self, number: int, depth: int, tokens: int, start: int) -> None:
        """The next `tokens` of a sequence lie at `start`."""
        first = self._starts[number] + depth
        self._index[first : first + tokens] = np.arange(start, start + tokens)
