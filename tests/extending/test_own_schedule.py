"""A schedule of one's own, by import path."""

import asyncio
import functools

import pytest

from rlhfless.loop.schedules import Sync, schedule_of
from rlhfless.spec import SyncSpec
from rlhfless.spec.errors import SpecError
from rlhfless.spec.load import load_spec, resolved_yaml

OWN = "ahead:Ahead"


@pytest.fixture
def load(load_with):
    """Loads a spec whose `schedule` is the given text."""
    return functools.partial(load_with, "schedule: ")


class Steps:
    """Notes what a schedule does, and when."""

    def __init__(self, fails_at=None):
        self.done = []
        self.fails_at = fails_at

    async def rollout(self, step):
        self.done.append(f"draw {step}")
        await asyncio.sleep(0)
        return step

    async def train(self, step, experience):
        assert experience == step
        self.done.append(f"learn {step}")
        await asyncio.sleep(0)
        if step == self.fails_at:
            raise RuntimeError(f"step {step} failed")


async def test_the_built_in_one_does_one_step_after_the_other(load):
    schedule = schedule_of(load("sync").schedule)
    assert type(schedule) is Sync
    steps = Steps()
    await schedule.drive(steps, 3, 4)
    assert steps.done == ["draw 3", "learn 3", "draw 4", "learn 4"]


async def test_one_of_your_own_draws_ahead(load, tmp_path):
    spec = load(f"{{type: '{OWN}', steps_ahead: 1}}")
    steps = Steps()
    await schedule_of(spec.schedule).drive(steps, 1, 3)
    assert sorted(steps.done) == sorted(f"{what} {step}" for what in ("draw", "learn") for step in (1, 2, 3))
    assert steps.done.index("draw 2") < steps.done.index("learn 1")
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(spec))
    assert load_spec(again) == spec
    assert load("{}").schedule == SyncSpec()


async def test_a_step_that_fails_ends_what_was_drawn_ahead(load):
    schedule = schedule_of(load(f"{{type: '{OWN}', steps_ahead: 2}}").schedule)
    with pytest.raises(RuntimeError, match="step 1 failed"):
        await schedule.drive(Steps(fails_at=1), 1, 9)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("synk", ["schedule (line 4)", "'synk' is no schedule", "did you mean `sync`?"]),
        (f"{{type: '{OWN}', steps_ahead: -1}}", ["schedule.steps_ahead", "-1", "greater than or equal to 0"]),
        (f"{{type: '{OWN}', ahead: 1}}", ["schedule.ahead", "unknown key", "steps_ahead"]),
        ("ahead:Behind", ["there is no `Behind`"]),
        ("ahead:OwnSpec", ["is no schedule: it has no `drive`"]),
    ],
)
def test_what_is_wrong_is_named_with_field_value_and_mend(load, schedule, parts):
    with pytest.raises(SpecError) as caught:
        load(schedule)
    for part in parts:
        assert part in str(caught.value)
