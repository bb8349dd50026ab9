"""The samples of one step: their lengths and their progress.

Only the simulator knows the response lengths. A policy that reads `RolloutBatch.response_tokens` is an oracle, and must
say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from rlhfless.prefixes.shared_forward import SharedForward, saved_tokens
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE, lineage
from rlhfless.scaling.policy import UNASSIGNED
from rlhfless.sim.kernel import STRIDE
from rlhfless.sim.kernel_state import Flags, Floats, Ints, Table, table_of


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTurns:
    """The turns of a batch's episodes, one sample after the other. Between two turns a sample waits for its
    environment, and its response goes on with the environment's tokens."""

    count: Ints
    """`[samples]`: turns of each, at least 1."""
    opening: Ints
    """`[samples]`: tokens before the first turn that are not of the prompt: tool schemas, the first observation."""
    end: Ints
    """`[turns]`: response tokens at the end of the turn."""
    given: Ints
    """`[turns]`: tokens that the environment writes after it; 0 after the last."""
    wait_s: Floats
    """`[turns]`: seconds until the environment has answered."""
    reset_s: Floats
    """`[samples]`: seconds until the environment has opened the episode, before the first turn."""

    @property
    def first(self) -> Ints:
        """`[samples]`: the first turn of each."""
        first: Ints = np.cumsum(self.count) - self.count
        return first

    def of(self, samples: Ints) -> EpisodeTurns:
        """Return the turns of some samples, in their order."""
        count, first = self.count[samples], self.first[samples]
        turns = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())
        by_turn = self.end[turns], self.given[turns], self.wait_s[turns]
        return EpisodeTurns(count, self.opening[samples], *by_turn, self.reset_s[samples])

    @classmethod
    def one(cls, opening: int, response_tokens: int) -> EpisodeTurns:
        """Return a response of one turn, which waits for nothing."""
        one, no_tokens, no_wait = np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros(1)
        return cls(one, np.array([opening]), np.array([response_tokens]), no_tokens, no_wait, no_wait)

    @classmethod
    def joined(cls, parts: Sequence[EpisodeTurns]) -> EpisodeTurns:
        """Return the turns of several batches, one after the other."""
        columns = ([getattr(part, column.name) for part in parts] for column in fields(cls))
        return cls(*map(np.concatenate, columns))


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
    turns: EpisodeTurns | None = None
    """None: each response is one turn, and waits for nothing."""

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
        self._check_turns()
        if len(self.group) >= STRIDE:
            raise ValueError(f"{len(self.group)} samples in a step; the simulator takes fewer than {STRIDE}")

    def _check_turns(self) -> None:
        if (turns := self.turns) is None:
            return
        if len(turns.count) != len(self.group) or turns.count.min(initial=1) < 1 or turns.count.sum() != len(turns.end):
            raise ValueError(f"{len(turns.end)} turns do not belong to {len(self.group)} samples, each with 1 or more")
        last = np.cumsum(turns.count) - 1
        after = turns.end + turns.given
        between = np.setdiff1d(np.arange(len(turns.end)), last)
        if not np.array_equal(after[last], self.response_tokens) or np.any(after[between] >= turns.end[between + 1]):
            raise ValueError("the turns of a sample must have tokens, follow each other, and end with its response")
        for column in (turns.wait_s, turns.reset_s, turns.given, turns.opening):
            if column.min(initial=0) < 0:
                raise ValueError(f"turns have a negative wait or number of tokens: {column.min()}")

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

    @property
    def context_tokens(self) -> Ints:
        """`[samples]`: tokens before the first that the model generates."""
        before: Ints = self.prompt_tokens[self.group]
        return before if self.turns is None else before + self.turns.opening

    @property
    def nodes(self) -> int:
        """Prompts, shared prefixes and, with turns, samples: what an engine's cache tells apart."""
        return self.groups + len(self.tree) + (0 if self.turns is None else self.samples)

    def saved_tokens(self, groups: Ints, forward: SharedForward) -> int:
        """Return the tokens that one forward pass over these groups saves by computing shared prefixes once."""
        chosen = np.isin(self.group, groups)
        of, lengths = self.group[chosen], self.response_tokens[chosen]
        return saved_tokens(self.tree, self.prompt_tokens, of, lengths, forward)

    @property
    def samples(self) -> int:
        return len(self.group)

    @property
    def turn_count(self) -> int:
        return 0 if self.turns is None else len(self.turns.end)

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
    turns: slice

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
        count, groups, tree, nodes = batch.samples, batch.groups, batch.tree, batch.nodes
        room = self.samples.stop - self.first_sample, self.nodes.stop - self.first_node
        if count > room[0] or nodes > room[1]:
            raise ValueError(f"step {batch.step} has {count} samples of {nodes} prompts and prefixes, beyond {room}")
        first = self.first_sample, self.first_node
        part = self.table.part(slice(first[0], first[0] + count), slice(first[1], first[1] + nodes))
        sample = part.sample
        sample[:] = 0
        sample["prompt"] = batch.context_tokens
        sample["target"] = batch.response_tokens
        sample["group"] = sample["leaf"] = batch.group + self.first_node
        sample["start_s"] = sample["finish_s"] = sample["ready_s"] = sample["leaves_s"] = np.nan
        sample["cut"] = False if batch.truncated is None else batch.truncated
        part.tokens[:] = 0
        part.finished[:] = part.truncated[:] = False
        part.home[:] = part.actor[:] = UNASSIGNED
        # Prompts are the first nodes, so shared prefixes are numbered after them.
        above = np.concatenate([tree.leaf, tree.parent])
        shared = groups + len(tree)
        part.parent[:shared] = np.where(above == NONE, NONE, above + groups + self.first_node)
        part.depth[:shared] = np.concatenate([batch.prompt_tokens - 1, tree.tokens])
        if batch.turns is not None:
            self._fill_turns(batch.turns, part, shared)
        part.left[:groups] = np.bincount(batch.group, minlength=groups)
        part.complete_s[:] = 0
        return part._replace(left=part.left[:groups], complete_s=part.complete_s[:groups])

    def _fill_turns(self, turns: EpisodeTurns, part: Table, shared: int) -> None:
        """Write the turns, and a node for each sample below its prompt: what its own turns leave in a cache."""
        if len(turns.end) > self.turns.stop - self.turns.start:
            raise ValueError(f"a step has {len(turns.end)} turns, beyond {self.turns.stop - self.turns.start}")
        rows = slice(self.turns.start, self.turns.start + len(turns.end))
        self.table.turn_end[rows] = turns.end
        self.table.turn_given[rows] = turns.given
        self.table.turn_wait_s[rows] = turns.wait_s
        sample = part.sample
        sample["turn"] = sample["answered"] = turns.first + self.turns.start
        sample["last"] = sample["turn"] + turns.count - 1
        sample["target"] = turns.end[turns.first]
        part.parent[shared:] = sample["group"]
        part.depth[shared:] = part.depth[sample["group"] - self.first_node]
        sample["leaf"] = self.first_node + shared + np.arange(len(sample))


def rows_of(steps: int, samples: int, nodes: int, turns: int = 0) -> list[Rows]:
    """Create the rows of one table for `steps` steps of `samples` samples, `nodes` nodes (RolloutBatch.nodes) and
    `turns` turns each."""
    table = table_of(samples, nodes, turns, steps)
    return [
        Rows(table, step, *(slice(step * size, (step + 1) * size) for size in (samples, nodes, turns)))
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
        self.at = self.rows or rows_of(1, batch.samples, batch.nodes, batch.turn_count)[0]
        self.table = self.at.filled(batch)
        self.safe_tokens = np.zeros(batch.samples, dtype=np.int64)
        self.await_groups(batch.groups)

    def set_tokens(self, samples: Ints, tokens: Ints) -> None:
        """Let samples go on from a number of tokens, within the turn that these reach."""
        table, turns = self.table, self.batch.turns
        table.tokens[samples] = tokens
        if turns is None:
            return
        room = int(turns.end.max(initial=0)) + 1  # keys of one sample are below those of the next
        keys = np.repeat(np.arange(len(turns.count)), turns.count) * room + turns.end
        turn = np.searchsorted(keys, samples * room + tokens, side="right")
        table.sample["turn"][samples] = turn + self.at.turns.start
        table.sample["target"][samples] = turns.end[turn]

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
