"""The learner's data: all sequences of a step, packed into one dimension of tokens.

There is no padding here. A sequence is a prompt followed by one response; sequences lie one after the other,
sorted by (prompt id, sample index), so the order in which a fleet finished them leaves no trace.

Invariants of a `PackedBatch`:

- The value at index t is about `tokens[t]` given the tokens before it in its sequence. Prompt tokens hold 0.
- `sequence_id` counts 0, 1, 2, ... and does not decrease; `group_id` counts 0, 1, 2, ... in the order of
  first appearance.
- Logprobs come in three kinds that are never mixed: *rollout* (what the engine sampled with), *old* (the
  policy before the first update of the step), *reference* (the frozen policy). The *current* ones exist only
  inside the learner.
- `denominators` are those of one optimiser step over all ranks and micro-batches. `select` keeps them, so
  how a batch is cut up cannot change the loss; `mini_batches` gives each mini-batch its own.

Deliberately not here: padding and micro-batching, which depend on the device (see rlhfless.functions.policy).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from rlhfless.records import FloatArray, Group, IntArray, Rollout

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the losses of one optimiser step are divided by."""

    tokens: int
    """Response tokens."""
    sequences: int
    groups: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences in one dimension of tokens. See the module's docstring for the invariants."""

    tokens: IntArray  # [tokens]
    positions: IntArray  # [tokens], from 0 in each sequence
    sequence_id: IntArray  # [tokens]
    group_id: IntArray  # [tokens]
    response_mask: BoolArray  # [tokens]
    rollout_logprobs: FloatArray  # [tokens]
    denominators: Denominators
    old_logprobs: FloatArray | None = None  # [tokens]
    reference_logprobs: FloatArray | None = None  # [tokens]
    advantages: FloatArray | None = None  # [tokens]

    @property
    def sequences(self) -> int:
        return int(self.sequence_id[-1]) + 1 if len(self.sequence_id) else 0

    @property
    def starts(self) -> IntArray:
        """Index of each sequence's first token, `[sequences]`."""
        return np.flatnonzero(self.positions == 0)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sequence, prompt and response, `[sequences]`."""
        return np.bincount(self.sequence_id, minlength=self.sequences)

    @property
    def response_lengths(self) -> IntArray:
        """Response tokens of each sequence, `[sequences]`."""
        return np.bincount(self.sequence_id[self.response_mask], minlength=self.sequences)

    @property
    def sequence_groups(self) -> IntArray:
        """Group of each sequence, `[sequences]`."""
        return self.group_id[self.starts]

    def with_old_logprobs(self, values: FloatArray) -> PackedBatch:
        """`values` [tokens], from the learner's `evaluate`."""
        return dataclasses.replace(self, old_logprobs=self._per_token("old_logprobs", values))

    def with_reference_logprobs(self, values: FloatArray) -> PackedBatch:
        """`values` [tokens], from the reference function."""
        return dataclasses.replace(self, reference_logprobs=self._per_token("reference_logprobs", values))

    def with_advantages(self, values: FloatArray) -> PackedBatch:
        """`values` [sequences]: each response token gets that of its sequence."""
        if values.shape != (self.sequences,):
            raise ValueError(f"advantages have shape {values.shape}, expected one per sequence: ({self.sequences},)")
        per_token = np.where(self.response_mask, values[self.sequence_id], 0)
        return dataclasses.replace(self, advantages=per_token.astype(np.float32))

    def _per_token(self, name: str, values: FloatArray) -> FloatArray:
        if values.shape != self.tokens.shape:
            raise ValueError(f"{name} have shape {values.shape}, expected one per token: {self.tokens.shape}")
        return np.where(self.response_mask, values, 0).astype(np.float32)


def in_batch_order(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups by prompt id, and the rollouts of each by sample index: the order of `pack`'s sequences.

    Groups without rollouts are left out.
    """
    by_sample = (Group(group.prompt, tuple(sorted(group.rollouts, key=_sample_index))) for group in groups)
    return tuple(sorted((group for group in by_sample if group.rollouts), key=_prompt_id))


def pack(groups: Sequence[Group]) -> PackedBatch:
    """Pack the groups of a step. Rewards and scores belong in the order of `in_batch_order`.

    Raises ValueError for no sequences at all, a prompt without tokens (its first response token would be
    predicted from nothing), and rollout logprobs that are missing or not finite.
    """
    ordered = in_batch_order(groups)
    if not ordered:
        raise ValueError("there is nothing to pack: no group has a rollout")
    for group in ordered:
        _check(group)
    rollouts = [rollout for group in ordered for rollout in group.rollouts]
    prompts = [np.asarray(group.prompt.token_ids, dtype=np.int64) for group in ordered]
    sizes = np.array([len(group.rollouts) for group in ordered])
    sequence_prompts = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
    prompt_lengths = np.array([len(prompt) for prompt in sequence_prompts])
    lengths = prompt_lengths + np.array([len(rollout.token_ids) for rollout in rollouts])
    positions = _counts_from_zero(lengths)
    response_mask = positions >= np.repeat(prompt_lengths, lengths)
    tokens = np.empty(len(positions), dtype=np.int64)
    tokens[response_mask] = np.concatenate([rollout.token_ids for rollout in rollouts])
    tokens[~response_mask] = np.concatenate(sequence_prompts)
    logprobs = np.zeros(len(positions), dtype=np.float32)
    logprobs[response_mask] = np.concatenate([rollout.logprobs for rollout in rollouts])
    if not np.isfinite(logprobs).all():
        _refuse(next(rollout for rollout in rollouts if not np.isfinite(rollout.logprobs).all()))
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        sequence_id=np.repeat(np.arange(len(rollouts)), lengths),
        group_id=np.repeat(np.repeat(np.arange(len(ordered)), sizes), lengths),
        response_mask=response_mask,
        rollout_logprobs=logprobs,
        denominators=Denominators(int(response_mask.sum()), len(rollouts), len(ordered)),
    )


def select(batch: PackedBatch, sequence_indices: IntArray) -> PackedBatch:
    """The sequences `sequence_indices` [selected], in that order, with ids counted anew.

    The denominators stay those of `batch`: use it for ranks and micro-batches, which share an optimiser step.
    Raises ValueError for a sequence that is named twice.
    """
    indices = np.asarray(sequence_indices, dtype=np.int64)
    if len(np.unique(indices)) != len(indices):
        raise ValueError(f"a sequence is selected twice in {indices.tolist()}")
    lengths = batch.lengths[indices]
    positions = _counts_from_zero(lengths)
    source = np.repeat(batch.starts[indices], lengths) + positions
    groups = _ids_by_first_appearance(batch.sequence_groups[indices])
    return PackedBatch(
        tokens=batch.tokens[source],
        positions=positions,
        sequence_id=np.repeat(np.arange(len(indices)), lengths),
        group_id=np.repeat(groups, lengths),
        response_mask=batch.response_mask[source],
        rollout_logprobs=batch.rollout_logprobs[source],
        denominators=batch.denominators,
        old_logprobs=_at(batch.old_logprobs, source),
        reference_logprobs=_at(batch.reference_logprobs, source),
        advantages=_at(batch.advantages, source),
    )


def mini_batches(batch: PackedBatch, count: int) -> tuple[PackedBatch, ...]:
    """Cut into `count` mini-batches of whole groups, in order, whose numbers of groups differ by at most one.

    Each is the data of one optimiser step, so each has denominators of its own. Raises ValueError when there
    are fewer groups than mini-batches.
    """
    if count == 1:
        return (batch,)
    groups = batch.sequence_groups
    total = int(groups.max(initial=-1)) + 1
    if not 1 <= count <= total:
        raise ValueError(f"cannot cut {total} groups into {count} mini-batches of whole groups")
    parts = np.array_split(np.arange(total), count)
    return tuple(_own_denominators(select(batch, np.flatnonzero(np.isin(groups, part)))) for part in parts)


def _own_denominators(batch: PackedBatch) -> PackedBatch:
    groups = int(batch.group_id.max(initial=-1)) + 1
    own = Denominators(int(batch.response_mask.sum()), batch.sequences, groups)
    return dataclasses.replace(batch, denominators=own)


def _check(group: Group) -> None:
    name = group.prompt.prompt_id
    if not group.prompt.token_ids:
        raise ValueError(f"prompt {name!r} has no tokens; give it at least one, such as a begin-of-sequence token")
    for rollout in group.rollouts:
        if len(rollout.token_ids) != len(rollout.logprobs):
            raise ValueError(
                f"sample {rollout.sample_index} of prompt {name!r} has {len(rollout.token_ids)} tokens but "
                f"{len(rollout.logprobs)} rollout logprobs"
            )


def _refuse(rollout: Rollout) -> NoReturn:
    raise ValueError(
        f"sample {rollout.sample_index} of prompt {rollout.prompt_id!r} has a rollout logprob that is not finite, on a "
        "token that the engine drew itself"
    )


def _prompt_id(group: Group) -> str:
    return group.prompt.prompt_id


def _sample_index(rollout: Rollout) -> int:
    return rollout.sample_index


def _counts_from_zero(lengths: IntArray) -> IntArray:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _ids_by_first_appearance(values: IntArray) -> IntArray:
    """[7, 7, 3, 7] -> [0, 0, 1, 0]."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _at(values: FloatArray | None, source: IntArray) -> FloatArray | None:
    return None if values is None else values[source]
