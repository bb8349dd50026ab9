"""A schedule of one's own, by import path."""

import functools

import pytest

from fakes.builders import Steps
from rlhfless.orchestrator.schedules import schedule_of
from rlhfless.spec import SyncSpec
from rlhfless.spec.errors import SpecError
from rlhfless.spec.load import load_spec, resolved_yaml

OWN = "rounds:Rounds"


@pytest.fixture
def load(load_with):
    """Loads a spec whose `schedule` is the given text."""
    return functools.partial(load_with, "schedule: ")


async def test_one_of_your_own_draws_in_rounds(load, tmp_path):
    spec = load(f"{{type: '{OWN}', steps_per_round: 2}}")
    steps = Steps()
    await schedule_of(spec.schedule).drive(steps, 1, 3)
    assert steps.done == ["draw 1", "draw 2", "learn 1", "learn 2", "draw 3", "learn 3"]
    assert spec.schedule.max_staleness == 1
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(spec))
    assert load_spec(again) == spec
    assert load("{}").schedule == SyncSpec()


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("synk", ["schedule (line 4)", "'synk' is no schedule", "did you mean `sync`?"]),
        (f"{{type: '{OWN}', steps_per_round: 0}}", ["schedule.steps_per_round", "0", "greater than or equal to 1"]),
        (f"{{type: '{OWN}', steps: 1}}", ["schedule.steps", "unknown key", "steps_per_round"]),
        ("rounds:Squares", ["there is no `Squares`"]),
        ("rounds:OwnScheduleSpec", ["is no schedule: it has no `drive`"]),
        ("{type: async, max_staleness: 0}", ["schedule.max_staleness", "0", "greater than or equal to 1"]),
        ("{type: one_step_off, max_staleness: 2}", ["schedule.max_staleness", "unknown key"]),
    ],
)
def test_what_is_wrong_is_named_with_field_value_and_mend(load, schedule, parts):
    with pytest.raises(SpecError) as caught:
        load(schedule)
    for part in parts:
        assert part in str(caught.value)
