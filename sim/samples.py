"""The samples of one step: what is to be drawn, and how far it has come.

The response lengths are known to the simulator alone. A policy that looks at `RolloutBatch.response_tokens` is an
oracle, and must say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlhfless.sim.kernel import STRIDE, Flags, Ints, Table


@dataclass(frozen=True)
class RolloutBatch:
    """The prompts of a step, with the length of every response that will be drawn from them.

    Raises ValueError for columns of different lengths, groups that are not 0, 1, 2, ... in order, or lengths below 1.
    """

    step: int
    prompt_ids: tuple[str, ...]  # [groups]
    prompt_tokens: Ints  # [groups]
    group: Ints  # [samples]: place of its prompt, ascending
    response_tokens: Ints  # [samples]
    truncated: Flags | None = None  # [samples]: it ends by max_tokens, not by itself; None: no response does

    def __post_init__(self) -> None:
        if len(self.prompt_tokens) != len(self.prompt_ids):
            raise ValueError(f"{len(self.prompt_ids)} prompt_ids, but {len(self.prompt_tokens)} prompt_tokens")
        if len(self.response_tokens) != len(self.group):
            raise ValueError(f"{len(self.group)} samples in group, but {len(self.response_tokens)} response_tokens")
        if self.truncated is not None and len(self.truncated) != len(self.group):
            raise ValueError(f"{len(self.group)} samples in group, but {len(self.truncated)} truncated")
        if not np.array_equal(np.unique(self.group), np.arange(len(self.prompt_ids))):
            raise ValueError(f"group must name each of 0 .. {self.groups - 1}; leave out prompts without samples")
        if np.any(np.diff(self.group) < 0):
            raise ValueError("group must ascend; sort the samples by it")
        for name, lengths in (("prompt_tokens", self.prompt_tokens), ("response_tokens", self.response_tokens)):
            if len(lengths) and lengths.min() < 1:
                raise ValueError(f"{name} holds {lengths.min()}; a length is at least 1")
        if len(self.group) >= STRIDE:
            raise ValueError(f"{len(self.group)} samples in a step; the simulator takes fewer than {STRIDE}")

    @property
    def samples(self) -> int:
        return len(self.group)

    @property
    def groups(self) -> int:
        return len(self.prompt_ids)

    @property
    def sample_index(self) -> Ints:
        """`[samples]`: 0, 1, ... within each group."""
        first = np.searchsorted(self.group, np.arange(self.groups))
        return np.arange(self.samples) - first[self.group]


@dataclass
class Progress:
    """How far the samples of a batch have come. The engines of a step share one, and write into it."""

    batch: RolloutBatch
    table: Table = field(init=False)
    safe_tokens: Ints = field(init=False)
    """`[samples]`: tokens that the driver has; what an engine drew since is lost with it."""

    def __post_init__(self) -> None:
        count = self.batch.samples

        def zeros() -> Ints:
            return np.zeros(count, dtype=np.int64)

        self.table = Table(
            prompt=np.ascontiguousarray(self.batch.prompt_tokens[self.batch.group], dtype=np.int64),
            target=np.ascontiguousarray(self.batch.response_tokens, dtype=np.int64),
            group=np.ascontiguousarray(self.batch.group, dtype=np.int64),
            tokens=zeros(),
            has_kv=np.zeros(count, dtype=np.bool_),
            arrival_s=np.zeros(count),
            start_s=np.full(count, np.nan),
            finish_s=np.full(count, np.nan),
            admitted=zeros(),
            cached=zeros(),
            finished=np.zeros(count, dtype=np.bool_),
            truncated=np.zeros(count, dtype=np.bool_),
            cut=np.zeros(count, dtype=np.bool_) if self.batch.truncated is None else self.batch.truncated.copy(),
            left=np.bincount(self.batch.group, minlength=self.batch.groups),
            complete_s=np.zeros(self.batch.groups),
            complete=np.zeros(1, dtype=np.int64),
        )
        self.safe_tokens = zeros()

    @property
    def finished(self) -> Flags:
        """`[samples]`."""
        return self.table.finished

    @property
    def unfinished(self) -> int:
        """How many samples have not finished."""
        return self.batch.samples - int(np.count_nonzero(self.table.finished))

    @property
    def complete(self) -> Ints:
        """The groups of which all samples have finished, ascending."""
        return np.flatnonzero(self.table.left == 0)

    @property
    def complete_groups(self) -> int:
        """How many there are."""
        return int(self.table.complete[0])
