"""Which groups a step generates, and which of them it learns from, with `partial` (rlhfless.spec.schedule), whose steps
do not learn from all groups that they begin.

Prompts are begun in the order of the data, and only as many as the steps of the run learn from: P for each step, where
P is `prompts_per_step`. What a step leaves is drawn by a later one, so at the end of the run nothing is left: a run
learns from all groups that it begins, whatever their lengths.

Invariants:
- Each step learns from P groups, of P prompts.
- Which groups a step has begun, and which it takes, is in the journal before anything comes of it. A step that is done
  again has the same groups, and a resumed run goes on with those that were left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rlhfless.orchestrator.prompt_history import PromptHistory
from rlhfless.orchestrator.rollout_request import Selection
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Prompt
from rlhfless.records.journal import BegunGroup, Journal
from rlhfless.scaling.selection import is_due, new_groups
from rlhfless.spec import PartialSpec, RunSpec


def select(
    spec: RunSpec, step: int, order: PromptOrder, history: PromptHistory, journal: Journal
) -> tuple[Sequence[Prompt], Selection | None]:
    """The prompts of a step, oldest first, and how it chooses among their groups; None if it learns from all. Raises
    JournalError, and InputError for a prompt that was begun and is no longer in the data."""
    schedule, wanted = spec.schedule, spec.prompts_per_step
    if not isinstance(schedule, PartialSpec):
        return history.prompts(order, step, wanted), None
    known = journal.groups(step)
    if taken := [group for group in known if group.taken == step]:
        return _selection(schedule, step, order, taken, wanted)
    left = [group for group in known if group.begun < step]
    began = wanted * (step - 1) + len(left)
    """Groups that earlier steps have begun, all of which they took or left."""
    count = new_groups(schedule, wanted, len(left), wanted * spec.steps - began, len(order))
    new = [group for group in known if group.begun == step]
    if not new and count:
        sequence = _sequence(order, history, wanted, began)
        used = {group.prompt_id for group in left}
        prompt_ids = [prompt.prompt_id for prompt in islice(_distinct(sequence, order, step, used), count)]
        journal.begin_groups(step, prompt_ids)
        new = [BegunGroup(step, prompt_id, None) for prompt_id in prompt_ids]
    return _selection(schedule, step, order, [*left, *new], wanted)


def _selection(
    schedule: PartialSpec, step: int, order: PromptOrder, groups: Sequence[BegunGroup], wanted: int
) -> tuple[Sequence[Prompt], Selection]:
    begun = {group.prompt_id: group.begun for group in groups}
    due = frozenset(prompt_id for prompt_id, by in begun.items() if is_due(schedule, by, step))
    return [order.prompt(prompt_id) for prompt_id in begun], Selection(wanted, due, begun)


def _sequence(order: PromptOrder, history: PromptHistory, wanted: int, began: int) -> Iterator[Prompt]:
    """The prompts of the run in their order, after the first `began`: those of one batch after the other."""
    batch, place = divmod(began, wanted)
    while True:
        yield from history.prompts(order, batch + 1, wanted)[place:]
        batch, place = batch + 1, 0


def _distinct(sequence: Iterator[Prompt], order: PromptOrder, step: int, used: set[str]) -> Iterator[Prompt]:
    """The prompts of a sequence; one that is `used`, or was there before, gives its place to another."""
    for prompt in sequence:
        chosen = prompt if prompt.prompt_id not in used else order.others(step - 1, 1, used)[0]
        used.add(chosen.prompt_id)
        yield chosen
