"""Detect changes of a run's inputs and learning rates between two attempts.

The inputs are recorded in the run's folder at its start (`inputs.json`). Every later attempt compares them, whether a
user resumes the run or the service starts another driver after a crash.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from rlhfless.algorithms.passes import learning_rate
from rlhfless.prepare.inputs import KINDS, as_json, changes, from_json, inputs_of
from rlhfless.records.checkpoints import CheckpointError, checkpoints_of
from rlhfless.records.journal import Journal, has_rollouts
from rlhfless.records.ledger import JOURNAL_FILE
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.run import OPTIMIZER_KEYS
from rlhfless.util.folders import replace_text

INPUTS_FILE = "inputs.json"

SCHEDULE = "schedule"
ALLOWABLE = (*KINDS, SCHEDULE)
"""Values of `--allow-changed`. A service has no `schedule`, because the steps of its runs do not change."""

ALLOWED = "the change was allowed; the run resumes with it"

NOT_RECORDED = (
    "the inputs of this run were not recorded at its start, so whether its data, model or code have changed since is "
    "not known; they are recorded from now on"
)


def hold_inputs(spec: RunSpec, folder: Path, allowed: Collection[str] = (), before: RunSpec | None = None) -> list[str]:
    """Record the run's inputs, or compare them with the record if the run has started; return warnings.

    After a change, the samples of steps after the newest checkpoint are deleted: they were generated from other data,
    or by weights that the resumed run will not reach. `allowed`: the KINDS that may have changed. `before`: the spec of
    the earlier attempt. Raises InputError if other inputs have changed.
    """
    now, file = inputs_of(spec), folder / INPUTS_FILE
    warnings = []
    if has_begun(spec, folder):
        try:
            recorded = from_json(file.read_text("utf-8"))
        except (OSError, ValueError, TypeError):
            recorded, warnings = [], [NOT_RECORDED]
        found = changes(recorded, now)
        problems = [Problem(each.field, each.what, _hint(each.kind)) for each in found if each.kind not in allowed]
        if problems:
            raise InputError("the run cannot resume: what it reads has changed", problems)
        warnings += [f"{each.field}: {each.what}; {ALLOWED}" for each in found]
        if found or (before is not None and _rescheduled(before, spec)):
            warnings += _generate_again(spec, folder)
    replace_text(file, as_json(now))
    return warnings


def _generate_again(spec: RunSpec, folder: Path) -> list[str]:
    """Delete the samples after the newest checkpoint; return a warning if there were any."""
    newest = checkpoints_of(folder, spec.checkpoint).newest()
    done, file = newest.notes.step if newest is not None else 0, folder / JOURNAL_FILE
    if not file.is_file():
        return []
    with closing(Journal(file)) as journal:
        steps = journal.redraw(done)
    if not steps:
        return []
    place = f"after step {done}, the newest checkpoint" if done else "from step 1, because no checkpoint was saved yet"
    return [
        f"the run resumes {place}: with the change, {steps} later step(s) are generated and learned again; their "
        "figures in metrics and trace stay those of the first time"
    ]


def _hint(kind: str) -> str:
    return (
        f"put it back, start a run of its own, or allow the change: `--allow-changed {kind}`, or "
        f'{{"allow_changed": ["{kind}"]}} with the API\'s resume'
    )


def has_begun(spec: RunSpec, folder: Path) -> bool:
    """Return whether the run has rollouts or a checkpoint."""
    if has_rollouts(folder / JOURNAL_FILE):
        return True
    try:
        return checkpoints_of(folder, spec.checkpoint).newest() is not None
    except CheckpointError:
        return True


def schedule_problems(before: RunSpec, now: RunSpec, done: int) -> list[Problem]:
    """Return a problem for each optimiser whose rates depend on `steps`, if `steps` has changed after `done` steps."""
    if not done:
        return []
    problems = []
    for function in _rescheduled(before, now):
        optimizer = before.optimizers[function]
        updates = max(before.model_copy(update={"steps": done}).planned_updates(function), 0)
        planned, planned_now = before.planned_updates(function), now.planned_updates(function)
        last = learning_rate(optimizer, updates, planned) if updates else 0.0
        next_before = learning_rate(optimizer, updates + 1, planned)
        next_now = learning_rate(optimizer, updates + 1, planned_now)
        key = OPTIMIZER_KEYS[function]
        what = (
            f"{now.steps}, but the run started with {before.steps}, and {key}.rate_schedule is "
            f"{optimizer.rate_schedule}: step {done} ended with a rate of {last:.3g}, and step {done + 1} would "
            f"continue with {next_now:.3g} instead of {next_before:.3g}"
        )
        hint = (
            f"set it back to {before.steps}, start a run of its own from the checkpoint, or accept these rates with "
            f"`--allow-changed {SCHEDULE}`"
        )
        problems.append(Problem("steps", what, hint))
    return problems


def _rescheduled(before: RunSpec, now: RunSpec) -> list[str]:
    """Return the functions whose learning rates change because `steps` has changed."""
    if before.steps == now.steps:
        return []
    return [name for name, optimizer in before.optimizers.items() if optimizer.rate_schedule != "constant"]
