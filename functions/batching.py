"""Cut a batch into micro-batches, for the padded or the packed forward pass.

Both stay within the token budget and give the same logprobs. The padded pass groups sequences of similar length. The
packed pass has no padding, computes shared prefixes once, and groups the users of a prefix. It is chosen if it
computes fewer tokens by a device-dependent factor, and always on GPUs (prefixes.packing.Packing). The choice is
based on token counts, so that the same batch takes the same path in every run and gives the same weights. Sequences of
several conversations are not packed: their conversations stay together, as the loss needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.prefixes.packing import PackedSegments, Packing, SharingSequences, padded_parts, padded_tokens
from rlhfless.records import IntArray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one forward pass."""

    indices: IntArray  # [sequences]
    packed: PackedSegments | None = None
    """Their layout in one row that computes shared prefixes once; None if they are padded."""


NO_SEQUENCES = MicroBatch(np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The micro-batches of a batch: all sequences that have a response."""

    parts: tuple[MicroBatch, ...]
    packed: bool
    prompt_tokens: int
    """Computed tokens before the first response token, over all micro-batches."""

    @property
    def shares(self) -> bool:
        """Whether a prefix is computed once for several sequences."""
        return any(part.packed is not None and part.packed.shared for part in self.parts)


def cut(batch: PackedBatch, budget_tokens: int, *, packing: Packing) -> MicroBatches:
    """Cut a batch into micro-batches, packed where that pays."""
    padded = tuple(MicroBatch(indices) for indices in micro_batches(batch, budget_tokens))
    if packing.pays_below and padded and batch.conversations is batch:
        packed = _packed(batch, budget_tokens, packing)
        fed = batch.lengths[batch.response_lengths > 0] - 1
        computed = sum(len(part.packed.source) for part in packed if part.packed is not None)
        if computed < packing.pays_below * padded_tokens(fed, budget_tokens):
            return MicroBatches(packed, True, sum(_prompt_tokens_of(batch, part) for part in packed))
    return MicroBatches(padded, False, prompt_tokens(batch))


def _packed(batch: PackedBatch, budget_tokens: int, packing: Packing) -> tuple[MicroBatch, ...]:
    answered = np.flatnonzero(batch.response_lengths > 0)
    sequences = fed_sequences(select(batch, answered), budget_tokens, packing)
    parts = sequences.cut(budget_tokens, batch.response_lengths[answered])
    return tuple(MicroBatch(answered[part], _row(sequences, part, budget_tokens, packing)) for part in parts)


def _row(sequences: SharingSequences, part: IntArray, budget_tokens: int, packing: Packing) -> PackedSegments:
    """Lay sequences out in a row, sharing prefixes unless that costs more than it saves."""
    packed, lengths = sequences.pack(part), sequences.lengths[part]
    alone = int(lengths.sum())
    if packed.shared and alone <= budget_tokens and not packing.row_pays(alone, packed):
        return PackedSegments.side_by_side(lengths)
    return packed


def deal(batch: PackedBatch, budget_tokens: int, ranks: int, *, packing: Packing) -> list[IntArray]:
    """Distribute the sequences over `ranks` with equal work. Deterministic on all ranks.

    Users of a prefix stay together if micro-batches share prefixes.
    """
    if ranks > 1 and cut(batch, budget_tokens, packing=packing).shares:
        return [np.sort(part) for part in fed_sequences(batch, budget_tokens, packing).deal(ranks)]
    by_length = np.argsort(-batch.lengths, kind="stable")
    return [by_length[rank::ranks] for rank in range(ranks)]


def deal_pairs(batch: PackedBatch, ranks: int) -> list[IntArray]:
    """Distribute whole pairs over `ranks` with equal work, longest pairs first. Deterministic on all ranks."""
    by_length = np.argsort(-batch.lengths.reshape(-1, 2).sum(1), kind="stable")
    return [_both(by_length[rank::ranks]) for rank in range(ranks)]


def cut_pairs(batch: PackedBatch, budget_tokens: int, *, packing: Packing) -> MicroBatches:
    """Cut a batch of pairs into micro-batches of at least one whole pair.

    The budget also limits the padded size of packed micro-batches, which is larger than their packed size.
    """
    fed = (batch.lengths - 1).reshape(-1, 2).max(1)
    parts = [_both(part) for part in padded_parts(fed, budget_tokens // 2)]
    if packing.pays_below and parts:
        sequences = fed_sequences(batch, budget_tokens, packing)
        packed = tuple(MicroBatch(part, sequences.pack(part)) for part in parts)
        computed = sum(len(part.packed.source) for part in packed if part.packed is not None)
        if computed < packing.pays_below * sum(len(part) * int(fed[part // 2].max()) for part in parts):
            return MicroBatches(packed, True, sum(_prompt_tokens_of(batch, part) for part in packed))
    return MicroBatches(tuple(map(MicroBatch, parts)), False, prompt_tokens(batch))


def _both(pairs: IntArray) -> IntArray:
    """Return the sequence indices of pairs, in order."""
    return np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1)


def fed_sequences(batch: PackedBatch, budget_tokens: int, packing: Packing) -> SharingSequences:
    """Return the tokens fed to a forward pass: all but the last of each sequence, which predicts nothing."""
    fed = batch.positions < batch.lengths[batch.sequence_id] - 1
    return SharingSequences(batch.tokens[fed], batch.lengths - 1, packing, budget_tokens)


def first_responses(batch: PackedBatch) -> IntArray:
    """Return the position of the first generated token of each sequence, `[sequences]`; its length if there is none."""
    firsts = batch.lengths.copy()
    np.minimum.at(firsts, batch.sequence_id[batch.response_mask], batch.positions[batch.response_mask])
    return firsts


def prompt_tokens(batch: PackedBatch) -> int:
    """Return the number of tokens before the first response token, over all conversations that have one."""
    batch = batch.conversations
    return int(first_responses(batch)[batch.response_lengths > 0].sum())


def _prompt_tokens_of(batch: PackedBatch, part: MicroBatch) -> int:
    """Return the number of tokens before the first response token in the packed row of a micro-batch."""
    assert part.packed is not None
    sequence = np.repeat(part.indices, batch.lengths[part.indices] - 1)[part.packed.source]
    return int(np.count_nonzero(part.packed.positions < first_responses(batch)[sequence]))


def micro_batches(batch: PackedBatch, budget_tokens: int) -> Iterator[IntArray]:
    """Yield index arrays `[sequences of a micro-batch]` of the sequences that have a response; see padded_parts."""
    answered = np.flatnonzero(batch.response_lengths > 0)
    for part in padded_parts(_padded_lengths(batch)[answered], budget_tokens):
        yield answered[part]


def _padded_lengths(batch: PackedBatch) -> IntArray:
    """Return the tokens of each sequence that are fed to a padded pass: its conversations, each as long as the
    longest, `[sequences]`."""
    each = batch.conversations
    if each is batch:
        return batch.lengths - 1
    of, longest = batch.sequence_id[each.starts], np.zeros(batch.sequences, dtype=np.int64)
    np.maximum.at(longest, of, each.lengths - 1)
    return longest * np.bincount(of, minlength=batch.sequences)
