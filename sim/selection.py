"""Select the groups of steps under `partial`, which do not learn from all groups that they generate.

The live rules (rlhfless.scaling.selection) apply to groups of known lengths. A step's batch holds groups deferred by
earlier steps and new ones, in data order. A resumed sample keeps its tokens: the engine recomputes their KV before it
generates the next token, as a live engine does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from

import numpy as np

from rlhfless.scaling.selection import is_due, new_groups
from rlhfless.sim.generation import Generation
from rlhfless.sim.kernel_state import Flags, Ints
from rlhfless.sim.samples import RolloutBatch, Selected, StepProgress
from rlhfless.sim.simulation import Simulation
from rlhfless.spec import PartialSpec

AGAIN = "'"
"""Suffix of the name of a prompt that stands in for another, see SelectedDraws._begun."""


def steps_of(simulation: Simulation, batches: Sequence[RolloutBatch]) -> Iterator[Generation]:
    """Yield each step of a run when it has been generated.

    `batches` are the batches that the steps would generate if they deferred nothing.
    """
    schedule = simulation.setup.schedule
    draws = SelectedDraws(schedule, batches) if isinstance(schedule, PartialSpec) else batches
    simulation.reserve(batches)
    for batch in draws:
        generation = simulation.step(batch)
        if isinstance(draws, SelectedDraws):
            draws.end(generation.progress)
        yield generation


def as_begun(learned: Sequence[RolloutBatch], begun: Mapping[tuple[int, str], int]) -> list[RolloutBatch]:
    """Return the input of SelectedDraws for a run of which only the learned groups are known.

    It has these groups in the order of their starts. `begun`: the steps that started them, by step and prompt.
    """
    of_steps = [(begun.get((batch.step, group.prompt_id), batch.step), group) for batch in learned
                for group in _groups(batch)]  # fmt: skip
    sequence = [group for _, group in sorted(of_steps, key=lambda pair: pair[0])]
    ends = np.cumsum([batch.groups for batch in learned])
    return [_batch(batch.step, sequence[end - batch.groups : end]) for batch, end in zip(learned, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that was started, or is to be started."""

    prompt_id: str
    prompt_tokens: int
    response_tokens: Ints  # [its samples]
    truncated: Flags  # [its samples]
    drawn_tokens: Ints  # [its samples]
    begun: int = 0

    @property
    def is_complete(self) -> bool:
        return bool((self.drawn_tokens >= self.response_tokens).all())


class SelectedDraws:
    """The batches that the steps of one run generate."""

    def __init__(self, schedule: PartialSpec, batches: Sequence[RolloutBatch]) -> None:
        """Take the batches that the steps would generate if they deferred nothing; all have equal numbers of groups.

        Raises ValueError for batches whose prompts share prefixes.
        """
        if any(len(batch.tree) for batch in batches):
            raise ValueError("schedule partial mixes the prompts of steps, whose shared prefixes are not known")
        self._schedule = schedule
        self._steps = [batch.step for batch in batches]
        self._learns = batches[0].groups
        self._new = deque(group for batch in batches for group in _groups(batch))
        self._left: list[_Group] = []
        self._drawn: list[_Group] = []

    def __iter__(self) -> Iterator[RolloutBatch]:
        for number, step in enumerate(self._steps, 1):
            count = new_groups(self._schedule, self._learns, len(self._left), len(self._new), prompts=math.inf)
            begun = [*self._left, *self._begun(count, number)]
            self._drawn = sorted(begun, key=lambda group: group.is_complete)  # incomplete groups keep their order
            must_include = np.array([is_due(self._schedule, group.begun, number) for group in self._drawn])
            yield _selected(step, self._drawn, self._learns, must_include)

    def _begun(self, count: int, number: int) -> list[_Group]:
        """Start the next `count` groups in step `number`.

        In a run, a prompt that another group of an earlier pass over the data still holds is replaced by another
        prompt; here by one of equal length under another name.
        """
        used, begun = {group.prompt_id for group in self._left}, []
        for _ in range(count):
            group = self._new.popleft()
            name = next(name for again in count_from(0) if (name := group.prompt_id + AGAIN * again) not in used)
            used.add(name)
            begun.append(replace(group, prompt_id=name, begun=number))
        return begun

    def end(self, progress: StepProgress) -> None:
        """End a step: defer the groups that it did not learn from to later steps."""
        assert progress.batch.selected is not None, "it is of these samples"
        tokens = np.concatenate([group.drawn_tokens for group in self._drawn])
        tokens[_open(self._drawn)] = progress.table.tokens
        by_group = np.split(tokens, np.flatnonzero(np.diff(progress.whole.group)) + 1)
        left = [
            replace(group, drawn_tokens=drawn)
            for group, drawn, is_left in zip(self._drawn, by_group, progress.left_out, strict=True)
            if is_left
        ]
        self._left = sorted(left, key=lambda group: group.begun)


def _groups(batch: RolloutBatch) -> Iterable[_Group]:
    cuts = np.flatnonzero(np.diff(batch.group)) + 1
    truncated = np.zeros(batch.samples, np.bool_) if batch.truncated is None else batch.truncated
    rows = zip(batch.prompt_ids, batch.prompt_tokens.tolist(), strict=True)
    parts = zip(np.split(batch.response_tokens, cuts), np.split(truncated, cuts), strict=True)
    for (prompt_id, prompt_tokens), (response_tokens, cut) in zip(rows, parts, strict=True):
        yield _Group(prompt_id, prompt_tokens, response_tokens, cut, np.zeros_like(response_tokens))


def _open(groups: Sequence[_Group]) -> Flags:
    """Return which samples are to be generated further, `[samples]`.

    If none is, the first sample generates its last token again, because a step that generates nothing would differ in
    kind.
    """
    left: Flags = np.concatenate([group.drawn_tokens < group.response_tokens for group in groups])
    left[0] |= not left.any()
    return left


def _selected(step: int, groups: Sequence[_Group], learns: int, must_include: Flags) -> RolloutBatch:
    """Return the batch of a step; in `groups` the complete ones come last."""
    whole = _batch(step, groups)
    left = _open(groups)
    drawn_tokens = np.minimum(np.concatenate([group.drawn_tokens for group in groups]), whole.response_tokens - 1)
    drawn_groups = len(np.unique(whole.group[left]))
    return RolloutBatch(
        step,
        whole.prompt_ids[:drawn_groups],
        whole.prompt_tokens[:drawn_groups],
        whole.group[left],
        whole.response_tokens[left],
        None if whole.truncated is None else whole.truncated[left],
        selected=Selected(drawn_tokens[left], whole, learns, must_include),
    )


def _batch(step: int, groups: Sequence[_Group]) -> RolloutBatch:
    return RolloutBatch(
        step,
        tuple(group.prompt_id for group in groups),
        np.array([group.prompt_tokens for group in groups]),
        np.repeat(np.arange(len(groups)), [len(group.response_tokens) for group in groups]),
        np.concatenate([group.response_tokens for group in groups]),
        np.concatenate([group.truncated for group in groups]),
    )
