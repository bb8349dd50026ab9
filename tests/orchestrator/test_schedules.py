"""The order of rollouts and updates in each schedule, and the bound on the age of samples."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.builders import Steps
from rlhfless.orchestrator.schedules import schedule_of
from rlhfless.spec import AsyncSpec, OneStepOffSpec, RunSpec, SyncSpec

MINIMAL = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}

TURNS = st.dictionaries(
    st.sampled_from([f"{what} {step}" for what in ("draw", "learn") for step in range(1, 9)]), st.integers(1, 30)
)


async def test_sync_does_one_step_after_the_other() -> None:
    steps = Steps(learned=2)
    await schedule_of(SyncSpec()).drive(steps, 3, 4)
    assert steps.done == ["draw 3", "learn 3", "draw 4", "learn 4"]
    assert steps.behind == {3: 0, 4: 0}


async def test_one_step_off_draws_the_next_step_while_one_is_learned() -> None:
    steps = Steps({"learn 1": 9, "draw 2": 3, "learn 2": 2, "draw 3": 9})
    await schedule_of(OneStepOffSpec()).drive(steps, 1, 4)
    assert steps.done == [f"{what} {step}" for step in range(1, 5) for what in ("draw", "learn")]
    assert steps.behind == {1: 0, 2: 1, 3: 1, 4: 1}
    assert steps.most_at_once == 1


async def test_async_draws_as_far_ahead_as_the_bound_lets_it() -> None:
    steps = Steps({"draw 1": 5, "learn 1": 9})
    await schedule_of(AsyncSpec(max_staleness=2)).drive(steps, 1, 6)
    assert steps.done[:4] == ["draw 1", "draw 2", "draw 3", "learn 1"]
    assert steps.done.index("draw 4") > steps.done.index("learn 1")
    assert steps.behind == {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2}
    assert steps.most_at_once == 3


@given(TURNS, st.integers(1, 8))
def test_one_step_off_is_async_with_one_version_that_loads_between_rollouts(turns: dict[str, int], last: int) -> None:
    done = []
    for settings in (OneStepOffSpec(), AsyncSpec(max_staleness=1, in_flight=False)):
        steps = Steps(turns)
        asyncio.run(schedule_of(settings).drive(steps, 1, last))
        assert steps.most_at_once == 1
        done.append((steps.done, steps.behind))
    assert done[0] == done[1]


@given(TURNS, st.integers(1, 4), st.integers(1, 8))
def test_every_step_is_learned_once_and_none_is_older_than_the_bound(
    turns: dict[str, int], bound: int, last: int
) -> None:
    """Holds for any duration of rollouts and updates."""
    for settings in (OneStepOffSpec(), AsyncSpec(max_staleness=bound)):
        steps = Steps(turns)
        asyncio.run(schedule_of(settings).drive(steps, 1, last))
        assert sorted(steps.done) == sorted(
            f"{what} {step}" for what in ("draw", "learn") for step in range(1, last + 1)
        )
        assert max(steps.behind.values()) <= settings.max_staleness


@pytest.mark.parametrize("settings", [OneStepOffSpec(), AsyncSpec(max_staleness=3)])
async def test_a_step_that_fails_ends_the_waits_for_other_rollouts(settings: OneStepOffSpec | AsyncSpec) -> None:
    with pytest.raises(RuntimeError, match="step 1 failed"):
        await schedule_of(settings).drive(Steps({"draw 2": 10**6}, fails_at=1), 1, 9)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"placement": {"turns": True}}, ["take turns", "set schedule to sync", "placement.turns to false"]),
        ({"weights": {"transport": "cuda_ipc"}}, ["cuda_ipc", "the newest version only", "auto"]),
        ({"algorithm": {"importance": None}}, ["up to 1 versions old", "nothing corrects", "leave `importance` out"]),
    ],
)
def test_what_old_weights_do_not_go_with_is_refused(changes: dict[str, object], parts: list[str]) -> None:
    RunSpec.model_validate(MINIMAL | changes)
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(MINIMAL | changes | {"schedule": "one_step_off"})
    for part in ("schedule.type is one_step_off", *parts):
        assert part in str(refused.value)


def test_an_engine_that_cannot_load_in_flight_is_refused_unless_it_need_not() -> None:
    engine = {"type": "rlhfless.functions.generation.engine:Engine"}
    values = MINIMAL | {"generation": {"engine": engine}, "schedule": {"type": "async", "in_flight": False}}
    assert not RunSpec.model_validate(values).schedule.in_flight
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(values | {"schedule": "async"})
    for part in ("cannot load weights while it generates", "in_flight"):
        assert part in str(refused.value)


def test_a_rejection_alone_is_a_correction() -> None:
    spec = RunSpec.model_validate(
        MINIMAL | {"schedule": "one_step_off", "algorithm": {"importance": None, "rejection": {}}}
    )
    assert spec.schedule.max_staleness == 1
