"""What the journal has of one draw: finished samples, tokens of samples to continue, and the groups that are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhfless.functions.generation.messages import SampleItem
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.records import Rollout
from rlhfless.records.journal import Journal


class DrawJournal:
    """The journal, as one draw reads and writes it; without a journal nothing is read nor written."""

    def __init__(self, journal: Journal | None, request: RolloutRequest) -> None:
        self._journal = journal
        self._request = request

    def recall(self, items: Sequence[SampleItem]) -> Iterator[Rollout]:
        """The rollouts of these samples. Another seed means another draw, for example because the data set has been
        edited since."""
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
        """Write the tokens of samples that are left to later steps."""
        if self._request.selection is not None:
            self.add(aborted)

    def take(self, prompt_ids: Sequence[str]) -> None:
        """Write that the step learns from the groups of these prompts."""
        if self._journal is not None and (selection := self._request.selection) is not None:
            begun = [(selection.begun[prompt_id], prompt_id) for prompt_id in prompt_ids]
            self._journal.take_groups(self._request.call.step, begun)

    def _step_of(self, prompt_id: str) -> int:
        """The step of a prompt's rows: the one that began it."""
        selection = self._request.selection
        return selection.begun[prompt_id] if selection else self._request.call.step
