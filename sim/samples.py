"""The samples of one step: their lengths and their progress.

Only the simulator knows the response lengths. A policy that reads `RolloutBatch.response_tokens` is an oracle, and must
say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlhfless.prefixes.shared_forward import SharedForward, saved_tokens
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE, lineage
from rlhfless.scaling.policy import UNASSIGNED
from rlhfless.sim.kernel import STRIDE
from rlhfless.sim.kernel_state import Flags, Ints, Table, table_of


@dataclass(frozen=True)
class RolloutBatch:
    """The prompts of a step, with the length of every response that will be generated from them.

    Raises ValueError for arrays of different lengths, groups that are not 0, 1, 2, ... in order, or lengths below 1.
    """

    step: int
    prompt_ids: tuple[str, ...]  # [groups]
    prompt_tokens: Ints  # [groups]
    group: Ints  # [samples]: index of the sample's prompt, ascending
    response_tokens: Ints  # [samples]
    truncated: Flags | None = None  # [samples]: ends by max_tokens, not by itself; None: no response does
    prefixes: PrefixTree | None = None
    """The prefixes that prompts share; None: they share nothing."""

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
        if self.prefixes is not None:
            self._check_prefixes(self.prefixes)
        if len(self.group) >= STRIDE:
            raise ValueError(f"{len(self.group)} samples in a step; the simulator takes fewer than {STRIDE}")

    def _check_prefixes(self, prefixes: PrefixTree) -> None:
        if len(prefixes.leaf) != self.groups:
            raise ValueError(f"{self.groups} prompt_ids, but prefixes of {len(prefixes.leaf)} prompts")
        short = np.flatnonzero(prefixes.shared_tokens >= self.prompt_tokens)
        if short.size:
            prompt = int(short[0])
            raise ValueError(
                f"prompt {self.prompt_ids[prompt]!r} has {self.prompt_tokens[prompt]} tokens, and shares "
                f"{prefixes.shared_tokens[prompt]} with others; at least its last token is its own"
            )

    @property
    def tree(self) -> PrefixTree:
        """`prefixes`, or a tree without shared prefixes."""
        return PrefixTree.nothing(self.groups) if self.prefixes is None else self.prefixes

    def saved_tokens(self, groups: Ints, forward: SharedForward) -> int:
        """Return the tokens that one forward pass over these groups saves by computing shared prefixes once."""
        chosen = np.isin(self.group, groups)
        of, lengths = self.group[chosen], self.response_tokens[chosen]
        return saved_tokens(self.tree, self.prompt_tokens, of, lengths, forward)

    @property
    def samples(self) -> int:
        return len(self.group)

    @property
    def groups(self) -> int:
        return len(self.prompt_ids)


@dataclass
class Rows:
    """Rows of the engines' table, used by one step after another."""

    table: Table
    number: int
    samples: slice
    nodes: slice

    @property
    def first_sample(self) -> int:
        return int(self.samples.start)

    @property
    def first_node(self) -> int:
        return int(self.nodes.start)

    def filled(self, batch: RolloutBatch) -> Table:
        """Write the samples of a batch into the first rows, and return views of them.

        `group` and `parent` index the whole table. Raises ValueError for a batch that does not fit.
        """
        count, groups, tree = batch.samples, batch.groups, batch.tree
        nodes = groups + len(tree)
        room = self.samples.stop - self.first_sample, self.nodes.stop - self.first_node
        if count > room[0] or nodes > room[1]:
            raise ValueError(f"step {batch.step} has {count} samples of {nodes} prompts and prefixes, beyond {room}")
        first = self.first_sample, self.first_node
        part = self.table.part(slice(first[0], first[0] + count), slice(first[1], first[1] + nodes))
        sample = part.sample
        sample[:] = 0
        sample["prompt"] = batch.prompt_tokens[batch.group]
        sample["target"] = batch.response_tokens
        sample["group"] = batch.group + self.first_node
        sample["start_s"] = sample["finish_s"] = np.nan
        sample["cut"] = False if batch.truncated is None else batch.truncated
        part.tokens[:] = 0
        part.finished[:] = part.truncated[:] = False
        part.home[:] = part.actor[:] = UNASSIGNED
        # Prompts are the first nodes, so shared prefixes are numbered after them.
        above = np.concatenate([tree.leaf, tree.parent])
        part.parent[:] = np.where(above == NONE, NONE, above + groups + self.first_node)
        part.depth[:] = np.concatenate([batch.prompt_tokens - 1, tree.tokens])
        part.left[:groups] = np.bincount(batch.group, minlength=groups)
        part.complete_s[:] = 0
        return part._replace(left=part.left[:groups], complete_s=part.complete_s[:groups])


def rows_of(steps: int, samples: int, nodes: int) -> list[Rows]:
    """Create the rows of one table for `steps` steps of `samples` samples and `nodes` prompts and prefixes each."""
    table = table_of(samples, nodes, steps)
    return [
        Rows(table, step, slice(step * samples, (step + 1) * samples), slice(step * nodes, (step + 1) * nodes))
        for step in range(steps)
    ]


@dataclass
class StepProgress:
    """The progress of the samples of a batch. The engines of a step share it, and write to it."""

    batch: RolloutBatch
    rows: Rows | None = None
    """The step's rows in a table shared with other steps; None: it has a table of its own."""
    table: Table = field(init=False)
    safe_tokens: Ints = field(init=False)
    """`[samples]`: tokens that the driver has received; later tokens are lost if their engine crashes."""

    def __post_init__(self) -> None:
        batch = self.batch
        self.at = self.rows or rows_of(1, batch.samples, batch.groups + len(batch.tree))[0]
        self.table = self.at.filled(batch)
        self.safe_tokens = np.zeros(batch.samples, dtype=np.int64)
        self.await_groups(batch.groups)

    @property
    def awaited(self) -> int:
        """The number of complete groups at which engines stop; 0 or less when they have."""
        return int(self.table.awaited[self.at.number])

    def await_groups(self, count: int) -> None:
        """Let the engines stop when `count` more groups are complete (rlhfless.sim.kernel.run)."""
        self.table.awaited[self.at.number] = count

    @property
    def finished(self) -> Flags:
        """`[samples]`."""
        return self.table.finished

    @property
    def unfinished(self) -> int:
        """The number of unfinished samples."""
        return self.batch.samples - int(np.count_nonzero(self.table.finished))

    def lineage(self, node: int) -> list[int]:
        """Return a prompt (by its group) or a shared prefix with all prefixes that it starts with, shortest first."""
        first = self.at.first_node
        return [each - first for each in lineage(self.at.table.parent, node + first)]
