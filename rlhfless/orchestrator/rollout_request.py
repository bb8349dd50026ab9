"""What a generation stage generates: its request, and the request's rows in the journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhfless.functions.calls import Call
from rlhfless.functions.generation.messages import SampleItem, Sampling
from rlhfless.records import Prompt, Rollout, Work, sample_seed
from rlhfless.records.journal import Journal
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """The group selection of a step that does not wait for all groups, but learns from the first to complete."""

    groups: int
    must_include: frozenset[str]
    """Prompts whose groups the step waits for."""
    begun: Mapping[str, int]
    """The step that started each prompt, by prompt id. It is part of the seeds of the prompt's samples."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The samples to generate in one generation stage."""

    call: Call
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampling: Sampling
    work: Work
    seed: int
    seed_step: int
    """Part of every seed: the step, or the same number for all evaluations, so that they differ only in the weights."""
    selection: Selection | None = None
    """Set if the step does not wait for all groups."""
    row_field: str = ""
    """The column of the prompt in the rows that an environment gets; empty in a run without an environment."""

    @property
    def groups(self) -> int:
        """Number of groups that the step learns from."""
        return self.selection.groups if self.selection else len(self.prompts)

    def items(self, prompt: Prompt) -> tuple[SampleItem, ...]:
        """Return the samples of one prompt. Their seeds do not depend on the actor."""
        begun = self.selection.begun[prompt.prompt_id] if self.selection else self.seed_step
        row = {self.row_field: prompt.text, **prompt.columns} if self.row_field else {}
        seeds = [sample_seed(self.seed, begun, prompt.prompt_id, index) for index in range(self.samples_per_prompt)]
        return tuple(
            SampleItem(
                prompt.prompt_id,
                index,
                prompt.token_ids,
                seed,
                row,
                f"{prompt.prompt_id}/{index}/{seed}{self._of_evaluation}" if self.row_field else "",
            )
            for index, seed in enumerate(seeds)
        )

    @property
    def _of_evaluation(self) -> str:
        """Tells the episodes of evaluations apart: all evaluations, greedy or not, have the same seeds."""
        held_out = self.work is Work.HELD_OUT
        return f"/{self.call.step}/{self.sampling.temperature:g}" if held_out else ""


def sampling_of(spec: RunSpec, *, greedy: bool = False) -> Sampling:
    """Return the spec's sampling settings, or their greedy variant."""
    generation = spec.generation
    return Sampling(
        max_tokens=generation.max_tokens,
        temperature=0.0 if greedy else generation.temperature,
        top_p=1.0 if greedy else generation.top_p,
        top_k=0 if greedy else generation.top_k,
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids,
    )


class StageJournal:
    """The journal of one stage; with `None` as journal, all methods do nothing."""

    def __init__(self, journal: Journal | None, request: RolloutRequest) -> None:
        self._journal = journal
        self._request = request

    def load(self, items: Sequence[SampleItem]) -> Iterator[Rollout]:
        """Yield the rollouts of these samples. Rollouts with other seeds are ignored: the data set was edited."""
        if self._journal is None:
            return
        seeds = {item.key: item.seed for item in items}
        rollouts = self._journal.rollouts(*{self._step_of(item.prompt_id) for item in items})
        yield from (rollout for rollout in rollouts if seeds.get(rollout.key) == rollout.seed)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Write finished rollouts. Raises JournalError, StaleAttempt."""
        if self._journal is None:
            return
        for step in sorted({self._step_of(rollout.prompt_id) for rollout in rollouts}):
            self._journal.add(step, [rollout for rollout in rollouts if self._step_of(rollout.prompt_id) == step])

    def keep(self, aborted: Sequence[Rollout]) -> None:
        """Write the tokens of deferred samples."""
        if self._request.selection is not None:
            self.add(aborted)

    def take(self, prompt_ids: Sequence[str]) -> None:
        """Record that the step learns from the groups of these prompts."""
        if self._journal is not None and (selection := self._request.selection) is not None:
            begun = [(selection.begun[prompt_id], prompt_id) for prompt_id in prompt_ids]
            self._journal.take_groups(self._request.call.step, begun)

    def _step_of(self, prompt_id: str) -> int:
        """Return the step under which a prompt's rows are stored: the step that started it."""
        selection = self._request.selection
        return selection.begun[prompt_id] if selection else self._request.call.step
