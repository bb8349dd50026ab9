"""The learner's data: all sequences of a step, packed into one dimension of tokens.

A sequence is a sample: its prompt, then the generated tokens, interleaved with an environment's tokens. Sequences are
sorted by (prompt id, sample index), so the batch is independent of the order in which they finished. A sequence may
have several *conversations*, one after another, as those of sub-agents: for the loss they are one sequence, and the
network reads each by itself (`conversations`).

Invariants of a `PackedBatch`:

- The value at index t belongs to `tokens[t]` given the tokens before it in its conversation. `response_mask` marks the
  generated tokens; all others hold 0. It may be any mask that excludes the first token of each conversation.
- `sequence_id` counts 0, 1, 2, ... and does not decrease; `group_id` counts 0, 1, 2, ... by first appearance.
- Three kinds of logprobs are never mixed: *rollout* (the engine's at sampling), *old* (the policy before the step's
  first update), *reference* (the frozen policy). The *current* ones exist only inside the learner.
- `denominators` belong to one optimizer step over all ranks and micro-batches. `select` keeps them, so dividing a batch
  does not change the loss; `mini_batches` gives each mini-batch its own.

A column is declared once, as a field of `PackedBatch`: its dtype, whether it has a value per token or per sequence, and
how `pack` reads it from a sample. All other code here works from these declarations.

Padding and micro-batching depend on the device and live in rlhfless.functions.policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.records import FloatArray, GivenSegment, Group, IntArray, Sample, Source
from rlhfless.util.errors import UserError

BoolArray = npt.NDArray[np.bool_]

_COLUMN = "column"
"""Key of the declaration in a field's metadata."""


@dataclass(frozen=True, slots=True)
class Column:
    """The declaration of a column."""

    dtype: type[np.generic]
    per_token: bool
    """A value per token (0 on tokens that were not generated) instead of per sequence."""
    of_sample: Callable[[Sample], Any] | None = None
    """Reads the value from a sample: `[generated tokens]`, or a number per sequence. If this or the value is None, the
    column is added later."""


OWN = Column(np.float32, per_token=True)
"""The declaration of every user-defined function's column."""


def per_token(dtype: type[np.generic], of_sample: Callable[[Sample], Any] | None = None) -> dict[str, Column]:
    """Declare a field as a column with a value per token."""
    return {_COLUMN: Column(dtype, per_token=True, of_sample=of_sample)}


def per_sequence(dtype: type[np.generic], of_sample: Callable[[Sample], Any] | None = None) -> dict[str, Column]:
    """Declare a field as a column with a value per sequence."""
    return {_COLUMN: Column(dtype, per_token=False, of_sample=of_sample)}


class NonFinite(UserError, ValueError):
    """A column has a non-finite value. A single NaN would turn the whole step's gradient into NaN."""

    def __init__(self, column: str, value: float, place: str, count: int) -> None:
        super().__init__(column, value, place, count)
        self.column = column

    def __str__(self) -> str:
        column, value, place, count = self.args
        more = f" ({count} values in all)" if count > 1 else ""
        return f"{column} is not finite: {place} has {value}{more}; look at what computes {column}"


@dataclass(frozen=True, slots=True)
class Denominators:
    """The denominators of one optimizer step."""

    tokens: int
    """Generated tokens."""
    sequences: int
    """Sequences with generated tokens."""
    groups: int


NO_DENOMINATORS = Denominators(0, 0, 0)
"""Placeholder while a batch is being packed."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences packed into one dimension. See the module docstring for the invariants."""

    tokens: IntArray  # [tokens]
    positions: IntArray  # [tokens], from 0 in each conversation
    sequence_id: IntArray  # [tokens]
    group_id: IntArray  # [tokens]
    response_mask: BoolArray  # [tokens]
    denominators: Denominators
    rollout_logprobs: FloatArray = dataclasses.field(
        metadata=per_token(np.float32, lambda sample: np.concatenate([each.logprobs for each in sample.rollouts]))
    )
    rewards: npt.NDArray[np.float64] | None = dataclasses.field(
        default=None, metadata=per_sequence(np.float64, lambda sample: sample.score and sample.score.total)
    )
    old_logprobs: FloatArray | None = dataclasses.field(default=None, metadata=per_token(np.float32))
    reference_logprobs: FloatArray | None = dataclasses.field(
        default=None, metadata=per_token(np.float32, lambda sample: sample.outputs.get("reference_logprobs"))
    )
    teacher_logprobs: FloatArray | None = dataclasses.field(default=None, metadata=per_token(np.float32))
    """Sum over each token's teachers of weight times logprob (rlhfless.algorithms.distill)."""
    teacher_weight: FloatArray | None = dataclasses.field(default=None, metadata=per_token(np.float32))
    """Sum of the weights of each token's teachers; 0 without one."""
    values: FloatArray | None = dataclasses.field(
        default=None, metadata=per_token(np.float32, lambda sample: sample.outputs.get("values"))
    )
    earned: FloatArray | None = dataclasses.field(
        default=None, metadata=per_token(np.float32, lambda sample: sample.earned)
    )
    """What the turns before a token's turn have earned; None without an environment."""
    advantages: FloatArray | None = dataclasses.field(default=None, metadata=per_token(np.float32))
    returns: FloatArray | None = dataclasses.field(default=None, metadata=per_token(np.float32))
    staleness: IntArray | None = dataclasses.field(default=None, metadata=per_token(np.int64))
    """Versions by which each token's weights were stale; None if all tokens are equally stale."""
    route_file: IntArray | None = dataclasses.field(default=None, metadata=per_token(np.int64))
    """Where each token's route is: 1 + index in `route_files`, 0 if nowhere (rlhfless.records.routes)."""
    route_row: IntArray | None = dataclasses.field(default=None, metadata=per_token(np.int64))
    """1 + row in that file."""
    route_files: tuple[str, ...] = ()
    oldest: int = 0
    """The largest staleness in the step's batch, which may be larger than this part."""
    own: Mapping[str, FloatArray] = dataclasses.field(default_factory=dict)
    """Columns of user-defined functions, by name, each `[tokens]`."""

    @property
    def sequences(self) -> int:
        return int(self.sequence_id[-1]) + 1 if len(self.sequence_id) else 0

    @property
    def groups(self) -> int:
        return int(self.group_id.max(initial=-1)) + 1

    @property
    def starts(self) -> IntArray:
        """Index of each sequence's first token, `[sequences]`."""
        return np.flatnonzero(np.diff(self.sequence_id, prepend=-1))

    @property
    def conversations(self) -> PackedBatch:
        """The same tokens with each conversation as a sequence of its own, for the network, which has no use for
        columns. The batch itself if no sequence has several."""
        begins = self.positions == 0
        if int(begins.sum()) == self.sequences:
            return self
        own: dict[str, Any] = {name: None for name, column in declared(type(self)).items() if not column.per_token}
        return dataclasses.replace(self, sequence_id=np.cumsum(begins) - 1, **own)

    def tokens_of(self, sequence_indices: IntArray) -> IntArray:
        """Return the indices of the tokens of these sequences, in that order."""
        lengths = self.lengths[sequence_indices]
        return np.repeat(self.starts[sequence_indices], lengths) + _counts_from_zero(lengths)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sequence, `[sequences]`."""
        return np.bincount(self.sequence_id, minlength=self.sequences)

    @property
    def response_lengths(self) -> IntArray:
        """Generated tokens of each sequence, `[sequences]`."""
        return np.bincount(self.sequence_id[self.response_mask], minlength=self.sequences)

    @property
    def sequence_groups(self) -> IntArray:
        """Group of each sequence, `[sequences]`."""
        return self.group_id[self.starts]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns that are set, by name."""
        values = {name: getattr(self, name) for name in declared(type(self))}
        return {name: value for name, value in (values | dict(self.own)).items() if value is not None}

    def with_columns(self, **columns: npt.NDArray[Any]) -> PackedBatch:
        """Return a copy with these columns, `[tokens]` or `[sequences]` as declared.

        An undeclared column is the user's own, `[tokens]`. Raises ValueError for a wrong shape, and NonFinite.
        """
        known = declared(type(self))
        fitted = {name: self._fitted(name, known.get(name, OWN), values) for name, values in columns.items()}
        return dataclasses.replace(self, **self._placed(fitted))

    def _placed(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
        """Return `columns` as field values."""
        known = declared(type(self))
        placed: dict[str, Any] = {name: values for name, values in columns.items() if name in known}
        own = {name: values for name, values in columns.items() if name not in known}
        return placed | {"own": {**self.own, **own}}

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give each generated token its sequence's value: `[sequences]` -> `[tokens]`."""
        if values.shape != (self.sequences,):
            raise ValueError(f"the values have shape {values.shape}, expected one per sequence: ({self.sequences},)")
        return np.where(self.response_mask, values[self.sequence_id], 0)

    def placed(self, generated: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Fill all other tokens with 0: `[generated tokens]` -> `[tokens]`."""
        values = np.zeros(len(self.tokens), dtype=generated.dtype)
        values[self.response_mask] = generated
        return values

    def _fitted(self, name: str, column: Column, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert `values` to the column's dtype, and set tokens without a value to 0."""
        expected = self.tokens.shape if column.per_token else (self.sequences,)
        if values.shape != expected:
            per = "token" if column.per_token else "sequence"
            raise ValueError(f"{name} have shape {values.shape}, expected one per {per}: {expected}")
        with np.errstate(over="ignore"):
            fitted = (np.where(self.response_mask, values, 0) if column.per_token else values).astype(column.dtype)
        odd = np.flatnonzero(~np.isfinite(fitted))
        if len(odd):
            sequence = int(self.sequence_id[odd[0]]) if column.per_token else int(odd[0])
            place = f" at its token {self.positions[odd[0]]}" if column.per_token else ""
            raise NonFinite(name, fitted[odd[0]], f"sequence {sequence} of the batch{place}", len(odd))
        return fitted


def declared(batch: type[PackedBatch]) -> Mapping[str, Column]:
    """Return the declared columns of a batch, by name."""
    fields = dataclasses.fields(batch)
    return {field.name: field.metadata[_COLUMN] for field in fields if _COLUMN in field.metadata}


def in_batch_order(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Sort groups by prompt id and their samples by sample index, as `pack` does. Drops groups without samples."""
    by_sample = (
        Group(group.prompt, tuple(sorted(group.samples, key=attrgetter("sample_index"))))
        for group in groups
        if group.samples
    )
    return tuple(sorted(by_sample, key=attrgetter("prompt.prompt_id")))


def pack(groups: Sequence[Group]) -> PackedBatch:
    """Pack a step's groups with all values of their samples.

    Raises ValueError if there are no samples, a prompt has no tokens (nothing predicts its first response token),
    rollout logprobs are missing, or only some samples have a value; NonFinite, naming column and sample.
    """
    ordered = in_batch_order(groups)
    if not ordered:
        raise ValueError("there is nothing to pack: no group has a sample")
    samples = [sample for group in ordered for sample in group.samples]
    for sample in samples:
        _check(sample)
    segments = [segment for sample in samples for segment in sample.segments]
    segment_lengths = np.array([len(segment.token_ids) for segment in segments])
    generated = np.array([not isinstance(segment, GivenSegment) for segment in segments])
    response_mask = np.repeat(generated, segment_lengths)
    lengths = np.array([sample.tokens for sample in samples])
    begins = [
        not number or (isinstance(segment, GivenSegment) and segment.source is Source.PROMPT)
        for sample in samples
        for number, segment in enumerate(sample.segments)
    ]
    conversations = np.add.reduceat(segment_lengths, np.flatnonzero(begins))
    sizes = np.array([len(group.samples) for group in ordered])
    known = declared(PackedBatch)
    columns: dict[str, Any] = {
        name: _packed(name, column, samples, response_mask)
        for name, column in known.items()
        if column.of_sample is not None
    }
    names = dict.fromkeys(name for sample in samples for name in sample.outputs if name not in known)
    own: dict[str, Any] = {name: _packed(name, _own(name), samples, response_mask) for name in names}
    batch = PackedBatch(
        own=own,
        **_routes(samples, response_mask),
        tokens=np.concatenate([segment.token_ids for segment in segments]).astype(np.int64, copy=False),
        positions=_counts_from_zero(conversations),
        sequence_id=np.repeat(np.arange(len(samples)), lengths),
        group_id=np.repeat(np.repeat(np.arange(len(ordered)), sizes), lengths),
        response_mask=response_mask,
        denominators=NO_DENOMINATORS,
        **columns,
    )
    return own_denominators(batch)


def _routes(samples: Sequence[Sample], mask: BoolArray) -> dict[str, Any]:
    """Return the fields that say where routes are; none if no sample has routes."""
    spans = [sample.routes for sample in samples]
    if not any(spans):
        return {}
    files = tuple(dict.fromkeys(span.file for of_sample in spans for span in of_sample))
    numbers = {name: number for number, name in enumerate(files, 1)}
    generated = np.cumsum([0, *(sample.model_tokens for sample in samples)])
    columns = np.zeros((2, int(generated[-1])), dtype=np.int64)
    for start, of_sample in zip(generated, spans, strict=False):
        for span in of_sample:
            place = slice(start + span.start, start + span.end)
            columns[0, place] = numbers[span.file]
            columns[1, place] = 1 + np.arange(span.row, span.row + span.end - span.start)
    placed = np.zeros((2, len(mask)), dtype=np.int64)
    placed[:, mask] = columns
    return {"route_file": placed[0], "route_row": placed[1], "route_files": files}


def by_sample(batch: PackedBatch, values: FloatArray, groups: Sequence[Group]) -> list[list[FloatArray]]:
    """Split `values` [tokens] of `pack(groups)` by group and sample in `groups` order, each `[generated tokens]`."""
    of_sequences = np.split(values[batch.response_mask], np.cumsum(batch.response_lengths)[:-1])
    keys = [sample.key for group in in_batch_order(groups) for sample in group.samples]
    by_key = dict(zip(keys, of_sequences, strict=True))
    return [[by_key[sample.key] for sample in group.samples] for group in groups]


def select(batch: PackedBatch, sequence_indices: IntArray) -> PackedBatch:
    """Return the sequences `sequence_indices` [selected] in that order, with new ids from 0.

    Keeps the denominators of `batch`, because ranks and micro-batches share an optimizer step. Raises ValueError if a
    sequence is selected twice.
    """
    indices = np.asarray(sequence_indices, dtype=np.int64)
    if len(np.unique(indices)) != len(indices):
        raise ValueError(f"a sequence is selected twice in {indices.tolist()}")
    lengths, source = batch.lengths[indices], batch.tokens_of(indices)
    groups = _ids_by_first_appearance(batch.sequence_groups[indices])
    known = declared(type(batch))
    columns = {
        name: values[source if known.get(name, OWN).per_token else indices] for name, values in batch.columns().items()
    }
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[source],
        positions=batch.positions[source],
        sequence_id=np.repeat(np.arange(len(indices)), lengths),
        group_id=np.repeat(groups, lengths),
        response_mask=batch.response_mask[source],
        **batch._placed(columns),
    )


def leave_out(batch: PackedBatch, sequences: BoolArray) -> PackedBatch:
    """Exclude `sequences` [sequences] from the loss and its denominators, keeping their rewards and groups."""
    mask = batch.response_mask & ~sequences[batch.sequence_id]
    masked = dataclasses.replace(batch, response_mask=mask)
    return own_denominators(masked.with_columns(**masked.columns()))


def own_denominators(batch: PackedBatch) -> PackedBatch:
    """Return the batch with its own denominators, as the data of a separate optimizer step."""
    answered = int(np.count_nonzero(batch.response_lengths))
    own = Denominators(int(batch.response_mask.sum()), answered, batch.groups)
    return dataclasses.replace(batch, denominators=own)


def _own(name: str) -> Column:
    return dataclasses.replace(OWN, of_sample=lambda sample: sample.outputs.get(name))


def _packed(name: str, column: Column, samples: Sequence[Sample], mask: BoolArray) -> npt.NDArray[Any] | None:
    """Collect a column from the samples. Returns None if no sample has it yet."""
    assert column.of_sample is not None
    of_samples = [column.of_sample(sample) for sample in samples]
    lacking = [sample for sample, value in zip(samples, of_samples, strict=True) if value is None]
    if len(lacking) == len(samples):
        return None
    if lacking:
        raise ValueError(f"{lacking[0]} has no {name}, and other samples have")
    for sample, value in zip(samples, of_samples, strict=True):
        with np.errstate(over="ignore"):
            odd = np.argwhere(~np.isfinite(np.atleast_1d(np.asarray(value).astype(column.dtype))))
        if len(odd):
            place = f"{sample} at response token {odd[0][0]}" if column.per_token else str(sample)
            raise NonFinite(name, np.atleast_1d(value)[tuple(odd[0])], place, len(odd))
    if not column.per_token:
        return np.array(of_samples, dtype=column.dtype)
    generated = np.concatenate(of_samples)
    values = np.zeros((len(mask), *generated.shape[1:]), dtype=column.dtype)
    values[mask] = generated
    return values


def _check(sample: Sample) -> None:
    first = sample.segments[0]
    if not isinstance(first, GivenSegment) or not len(first.token_ids):
        name = sample.key[0]
        raise ValueError(f"prompt {name!r} has no tokens; give it at least one, such as a begin-of-sequence token")
    for rollout in sample.rollouts:
        if len(rollout.token_ids) != len(rollout.logprobs):
            raise ValueError(
                f"{sample} has {len(rollout.token_ids)} tokens but {len(rollout.logprobs)} rollout logprobs"
            )


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
