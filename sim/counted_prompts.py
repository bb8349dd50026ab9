"""The prompts of a simulated run, and what its steps have generated of them so far.

They take the place of the live run's data (PromptOrder, PromptHistory) and Journal, so that the live rules select the
groups of each step (rlhfless.orchestrator.prompt_selection).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import pairwise

import numpy as np

from rlhfless.records.journal import BegunGroup, JournalError
from rlhfless.scaling.selection import new_groups
from rlhfless.sim.kernel_state import Flags, Ints
from rlhfless.sim.samples import EpisodeTurns, RolloutBatch
from rlhfless.sim.storage import SimulatedDisk
from rlhfless.spec import PartialSpec
from rlhfless.spec.generation import ScheduleSpec

AGAIN = "'"
"""Suffix of the name of a prompt whose group is generated next to another group of the same prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedPrompt:
    """A prompt of a batch, with the lengths of its responses."""

    prompt_id: str
    """Unique in the run: data repeat their prompts."""
    batch: RolloutBatch
    number: int
    """The prompt's group in the batch."""
    samples: slice
    """The samples of that group."""

    @property
    def name(self) -> str:
        return self.batch.prompt_ids[self.number]

    @property
    def prompt_tokens(self) -> int:
        return int(self.batch.prompt_tokens[self.number])

    @property
    def response_tokens(self) -> Ints:
        """`[samples]`: the length of each response."""
        return self.batch.response_tokens[self.samples]

    @property
    def truncated(self) -> Flags:
        """`[samples]`: whether each response ends by max_tokens."""
        whole = np.zeros(self.batch.samples, np.bool_) if self.batch.truncated is None else self.batch.truncated
        return whole[self.samples]

    @property
    def turns(self) -> EpisodeTurns | None:
        turns = self.batch.turns
        return None if turns is None else turns.of(np.arange(self.samples.start, self.samples.stop))

    @classmethod
    def all_of(cls, batch: RolloutBatch) -> list[CountedPrompt]:
        """Return the prompts of a batch."""
        cuts = np.searchsorted(batch.group, np.arange(batch.groups + 1)).tolist()
        spans = [slice(first, end) for first, end in pairwise(cuts)]
        return [cls(f"{batch.step}/{number}", batch, number, span) for number, span in enumerate(spans)]


class CountedPrompts:
    """The prompts of a run in order (takes the place of PromptOrder and PromptHistory)."""

    def __init__(self, batches: Sequence[RolloutBatch]) -> None:
        """`batches`: those that the steps would generate if they deferred nothing."""
        self._of_step = {batch.step: CountedPrompt.all_of(batch) for batch in batches}

    def __len__(self) -> int:
        return sum(map(len, self._of_step.values()))

    def prompts(self, order: CountedPrompts, step: int, n: int) -> list[CountedPrompt]:  # noqa: ARG002
        """Return the prompts of a step's batch."""
        return self._of_step[step]

    def prompt(self, prompt_id: str) -> CountedPrompt:
        step, number = map(int, prompt_id.split("/"))
        return self._of_step[step][number]


def largest_step(schedule: ScheduleSpec, batches: Sequence[RolloutBatch]) -> tuple[int, int, int]:
    """Return the samples, the nodes and the turns of the largest step.

    Raises ValueError for batches that `partial` cannot mix.
    """
    if not isinstance(schedule, PartialSpec):
        return (
            max(batch.samples for batch in batches),
            max(batch.nodes for batch in batches),
            max(batch.turn_count for batch in batches),
        )
    if any(len(batch.tree) for batch in batches):
        raise ValueError("schedule partial mixes the prompts of steps, whose shared prefixes are not known")
    if len({batch.groups for batch in batches}) > 1:
        raise ValueError("schedule partial needs batches of equal numbers of groups")
    groups = new_groups(schedule, batches[0].groups, 0, sum(batch.groups for batch in batches), math.inf)
    samples = groups * max(int(np.bincount(batch.group).max()) for batch in batches)
    turns = [batch.turns for batch in batches if batch.turns is not None]
    most_turns = max((int(each.count.max(initial=0)) for each in turns), default=0)
    return samples, groups + (samples if turns else 0), samples * most_turns


class CountedJournal:
    """What the steps of a run have generated (takes the place of Journal). Writes raise JournalError if the disk is
    full."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.attempt = 0
        self._groups: list[BegunGroup] = []
        self._tokens: dict[str, tuple[int, Ints]] = {}
        """By prompt id: the step that started the prompt, and the tokens of each of its samples."""
        self._names: dict[str, str] = {}

    def begin_attempt(self) -> int:
        """Number the next attempt, from 1."""
        self.attempt += 1
        return self.attempt

    def _write(self) -> None:
        try:
            self._disk.write()
        except OSError as error:
            raise JournalError(f"the journal cannot be written: {error}") from error

    # -- the groups of steps that do not learn from all groups: see Journal

    def groups(self, step: int) -> list[BegunGroup]:
        return [group for group in self._groups if group.begun <= step and (group.taken or step) >= step]

    def begin_groups(self, step: int, prompt_ids: Sequence[str]) -> None:
        self._write()
        self._groups += [BegunGroup(step, prompt_id, None) for prompt_id in prompt_ids]

    def take_groups(self, step: int, groups: Sequence[tuple[int, str]]) -> None:
        self._write()
        taken = set(groups)
        self._groups = [
            replace(group, taken=step) if (group.begun, group.prompt_id) in taken else group for group in self._groups
        ]

    def forget(self, up_to_step: int) -> None:
        self._groups = [group for group in self._groups if group.taken is None or group.taken > up_to_step]
        kept = {group.prompt_id for group in self._groups}
        self._tokens = {
            prompt_id: (step, tokens)
            for prompt_id, (step, tokens) in self._tokens.items()
            if step > up_to_step or prompt_id in kept
        }

    # -- the samples

    def add(self, step: int, prompt_id: str, tokens: Ints) -> None:
        """Keep the tokens that the samples of a prompt have, which `step` has started."""
        self._write()
        self._tokens[prompt_id] = step, tokens

    def tokens(self, prompt_id: str) -> Ints | None:
        """Return the tokens of a prompt's samples; None if no step has generated any."""
        return self._tokens[prompt_id][1] if prompt_id in self._tokens else None

    def names(self, prompts: Sequence[CountedPrompt]) -> tuple[str, ...]:
        """Return the names of a step's prompts for its policy. They differ, and stay the same in later steps."""
        names = {prompt.prompt_id: self._names.get(prompt.prompt_id, "") for prompt in prompts}
        used = set(names.values())
        for prompt in prompts:
            if not names[prompt.prompt_id]:
                name = next(name for again in count_from(0) if (name := prompt.name + AGAIN * again) not in used)
                names[prompt.prompt_id] = name
                used.add(name)
        self._names = names
        return tuple(names.values())


@dataclass(frozen=True, slots=True)
class SamplesLeft:
    """The samples of a step, and those that are left to generate."""

    whole: RolloutBatch
    """All groups of the step with all their samples."""
    batch: RolloutBatch
    """The groups and samples that are left."""
    samples: Ints
    """`[samples of batch]`: the number of each in `whole`."""
    groups: Ints
    """`[groups of batch]`: the number of each in `whole`."""
    tokens: Ints
    """`[samples of batch]`: tokens that earlier steps have generated."""

    @property
    def complete(self) -> list[int]:
        """The groups of `whole` that earlier steps have completed."""
        return sorted({*range(self.whole.groups)} - {*self.groups.tolist()})


def samples_left(step: int, prompts: Sequence[CountedPrompt], journal: CountedJournal) -> SamplesLeft:
    """Return the samples of a step's prompts, of which the journal has some."""
    whole = _whole(step, prompts, journal)
    known = [journal.tokens(prompt.prompt_id) for prompt in prompts]
    if all(tokens is None for tokens in known):
        tokens = np.zeros(whole.samples, np.int64)
    else:
        counts = np.bincount(whole.group, minlength=whole.groups).tolist()
        given = zip(known, counts, strict=True)
        tokens = np.concatenate([np.zeros(count, np.int64) if of is None else of for of, count in given])
    left = tokens < whole.response_tokens
    if left.all():
        return SamplesLeft(whole, whole, np.arange(whole.samples), np.arange(whole.groups), tokens)
    groups, group = np.unique(whole.group[left], return_inverse=True)
    batch = RolloutBatch(
        step,
        tuple(whole.prompt_ids[number] for number in groups.tolist()),
        whole.prompt_tokens[groups],
        group,
        whole.response_tokens[left],
        None if whole.truncated is None else whole.truncated[left],
        turns=None if whole.turns is None else whole.turns.of(np.flatnonzero(left)),
    )
    return SamplesLeft(whole, batch, np.flatnonzero(left), groups, tokens[left])


def _whole(step: int, prompts: Sequence[CountedPrompt], journal: CountedJournal) -> RolloutBatch:
    """Return the batch of all samples of these prompts."""
    batch = prompts[0].batch
    if batch.step == step and len(prompts) == batch.groups and all(prompt.batch is batch for prompt in prompts):
        return batch
    return batch_of(step, prompts, journal.names(prompts))


def batch_of(step: int, prompts: Sequence[CountedPrompt], names: Sequence[str] = ()) -> RolloutBatch:
    """Return a batch of these prompts. `names`: by default their own."""
    lengths = [prompt.response_tokens for prompt in prompts]
    turns = [turns for prompt in prompts if (turns := prompt.turns) is not None]
    return RolloutBatch(
        step,
        tuple(names or (prompt.name for prompt in prompts)),
        np.array([prompt.prompt_tokens for prompt in prompts]),
        np.repeat(np.arange(len(prompts)), list(map(len, lengths))),
        np.concatenate(lengths),
        np.concatenate([prompt.truncated for prompt in prompts]),
        turns=EpisodeTurns.joined(turns) if turns else None,
    )
