"""Pack sequences into one row that contains each shared prefix once: the layout of prefix-grouped attention.

A *segment* is a run of new tokens: the own tokens of a shared prefix, or the rest of a sequence after its longest
prefix. Segments are in depth-first order, so all segments that extend a prefix follow it without a gap. Each token
attends to the tokens before it in its segment, and to all own tokens of the prefixes before its segment:

    system | prompt A | response 1 | response 2 | prompt B | response 3

Everything after `system` attends to it; the responses 1 and 2 attend to `prompt A`.

Where packing does not pay, micro-batches are padded, grouping sequences of similar length (`padded_parts`).
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
"""Pack on a CPU if that computes less than this share of the padded pass's tokens. Measured on one core with 0.8 M
parameters: gathers and per-prefix calls make a token a third more expensive, so packing pays below 0.75."""

JOIN_KEYS = 875
"""Cost of joining a prefix to the attention of one later token on a GPU, in attended keys (computed). For each
element of a token's queries, a training step moves 42 more bytes: 10 forward (queries and output of the second
kernel, and the mean of two outputs) and 32 backward (queries, output and two gradients again, and its sum in
float32). An H100 has time for 250 FLOPs per byte (990 TFLOP/s of its data sheet at 65 %, 3.35 TB/s at 80 %);
attention to one key takes 12 in both passes: 42 x 250 / 12. Other devices are within a factor of two."""

SIMILAR_LENGTH = 0.875
"""Minimum length, relative to the longest sequence of the micro-batch, at which a sequence still joins it. On
uniform lengths (20 to 130 tokens) this lowers padding from 20 % to 9 %, and the CPU time of a step by a tenth."""

FAIR_SIZE = 0.25
"""Share of the token budget below which a micro-batch accepts sequences of any length."""

LEAST_SAVED_TOKENS = 32
"""Fewest saved tokens for sharing a prefix on a CPU: each prefix adds an attention call per layer."""


def padded_parts(lengths: IntArray, budget_tokens: int) -> Iterator[IntArray]:
    """Yield index arrays of the sequences of each micro-batch, longest first; `lengths` [sequences].

    The padded size of a micro-batch is at most `budget_tokens`; a longer sequence gets its own micro-batch. A
    micro-batch of fair size takes no much shorter sequences: another pass costs less than the padding. The longest
    come first, so that the memory peak, or running out of memory, occurs at the start of a step.
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
    """Return the tokens of all micro-batches of the padded pass, including padding."""
    return sum(len(part) * int(lengths[part].max()) for part in padded_parts(lengths, budget_tokens))


@dataclass(frozen=True, slots=True)
class Packing:
    """When to pack sequences into rows without padding, and which shared prefixes to compute once."""

    pays_below: float = 0.0
    """Pack a row if it computes less than this share of the padded pass's tokens. 0: never; infinite: always."""
    token_keys: float | None = None
    """On a GPU: the number of keys that a token could attend to in the time of a layer's other products. Decides
    whether sharing a prefix saves more than joining it costs. None: it pays if it saves `least_saved_tokens`."""
    least_saved_tokens: int = LEAST_SAVED_TOKENS

    def pays(self, own: int, depth: int, samples: int, behind: int, row_tokens: int) -> bool:
        """Return whether to compute `own` tokens, after `depth` others, once for several samples.

        The samples have `behind` tokens after them. Rows have at most `row_tokens`, and each row recomputes the
        prefix.
        """
        if self.token_keys is None:
            return own * (samples - 1) >= self.least_saved_tokens
        rows = -(-(own + behind) // row_tokens)
        return own * (samples - rows) * (self.token_keys + depth + own / 2) > JOIN_KEYS * behind

    def row_pays(self, alone: int, packed: PackedSegments) -> bool:
        """Return whether this layout pays for sequences of `alone` tokens.

        Each level's kernel processes the whole row, including tokens without a prefix in it.
        """
        if self.token_keys is None:
            return True
        computed = len(packed.source)
        return (alone - computed) * self.token_keys > JOIN_KEYS * computed * len(packed.levels())


NEVER, ON_CPUS, ALWAYS = Packing(), Packing(PAYS_BELOW), Packing(math.inf)


@dataclass(frozen=True, slots=True)
class PackedSegments:
    """The packed layout of some sequences."""

    source: IntArray  # [packed], index of the token in the concatenated sequences
    positions: IntArray  # [packed], position in its sequence
    index: IntArray  # [tokens], packed index of each token of the concatenated sequences
    segments: tuple[tuple[int, int], ...]
    """(start, tokens) of each segment."""
    shared: tuple[tuple[int, int, int], ...]
    """(start, stop, end) of each prefix: [start, stop) are its own tokens, [stop, end) the tokens after it that
    attend to it."""

    def levels(self) -> list[list[tuple[int, int, int]]]:
        """Return `shared` by depth, shortest prefixes first, omitting prefixes that no token follows."""
        levels: list[list[tuple[int, int, int]]] = []
        ends: list[int] = []  # of the enclosing prefixes
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
        """Lay sequences out one after another, sharing nothing."""
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
    """Remove the prefixes that do not pay from a forest; their tokens move to the prefixes or sequences after them.

    `tokens`, `above`, `samples` and `total` (tokens of all their samples) are [prefixes], each prefix after its
    parent in `above`. Returns the new parent of each prefix, [prefixes], and the longest kept prefix at or above
    each, [prefixes + 1]; the last entry stands for NONE.
    """
    parent, kept = above.copy(), np.full(len(tokens) + 1, NONE)
    for prefix in range(len(tokens)):
        parent[prefix] = before = kept[above[prefix]]
        depth, users = int(tokens[before]) if before != NONE else 0, int(samples[prefix])
        own, behind = int(tokens[prefix]) - depth, int(total[prefix] - users * tokens[prefix])
        kept[prefix] = prefix if users and packing.pays(own, depth, users, behind, row_tokens) else before
    return parent, kept


class SharingSequences:
    """Sequences, and the shared prefixes that pay to be computed once."""

    def __init__(
        self, tokens: npt.NDArray[Any], lengths: IntArray, packing: Packing = ALWAYS, row_tokens: int = sys.maxsize
    ) -> None:
        """`tokens` [tokens] of all concatenated sequences; `lengths` [sequences].

        `packing`, `row_tokens`: see Packing.pays.
        """
        self.lengths = lengths
        ends = np.cumsum(lengths)
        rows = [tokens[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
        forest = shared_prefixes(rows, last_alone=False)
        total = np.zeros(len(forest) + 1, np.int64)  # the last one stands for NONE
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
        """The prefixes of each sequence, shortest first."""
        self.order = sorted(range(len(lengths)), key=lambda number: (self.lineages[number], -int(lengths[number])))
        """Depth first: users of a prefix are adjacent; otherwise the longest first."""
        self.rank = np.argsort(self.order).tolist()
        """Position of each sequence in `order`."""

    def added(self, sequence: int, present: set[int]) -> int:
        """Return the tokens that a sequence adds to a row that already has the prefixes `present`."""
        missing = [prefix for prefix in self.lineages[sequence] if prefix not in present]
        return int(self.own[missing].sum() + self.rest[sequence])

    def cut(self, budget_tokens: int, also: IntArray) -> list[IntArray]:
        """Return micro-batches as index arrays, largest first so that memory peaks at the start.

        The row of each, and its sum of `also` [sequences], is at most `budget_tokens`; a longer sequence gets its
        own micro-batch.
        """
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
        """Return index arrays, one per rank, with about equal packed tokens; users of a prefix stay together."""
        present: set[int] = set()
        weights = np.zeros(len(self.order))
        for place, sequence in enumerate(self.order):
            weights[place] = self.added(sequence, present)
            present.update(self.lineages[sequence])
        middles = np.cumsum(weights) - weights / 2
        rank = np.minimum(middles * ranks // max(weights.sum(), 1), ranks - 1)
        return [np.array(self.order, np.int64)[rank == number] for number in range(ranks)]

    def pack(self, sequences: IntArray) -> PackedSegments:
        """Return the layout of these sequences in one row.

        `source` and `index` refer to the tokens of these sequences, concatenated in this order.
        """
        return _Packing(self, sequences.tolist()).run()


class _Packing:
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
        """Add a segment of the next `tokens` of a sequence, from position `depth` on, and return its start."""
        start, run = self._size, np.arange(depth, depth + tokens)
        self._source.append(self._starts[number] + run)
        self._positions.append(run)
        if tokens:
            self._segments.append((start, tokens))
        self._size += tokens
        return start

    def _place(self, number: int, depth: int, tokens: int, start: int) -> None:
        """Record that the next `tokens` of a sequence are at `start`."""
        first = self._starts[number] + depth
        self._index[first : first + tokens] = np.arange(start, start + tokens)
