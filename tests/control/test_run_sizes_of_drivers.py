"""The sizes of an elastic run as its driver sees them: which it takes, what it measures, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhfless.control.database.tables import LeaseRow, RunRow
from rlhfless.control.delivery import PushAnswer
from rlhfless.control.driver import main
from rlhfless.control.driver.reporter import Reporter, lease_of
from rlhfless.control.driver.service_client import Outbox
from rlhfless.control.supervisor import request_of
from rlhfless.fleet.protocols import FleetError
from rlhfless.orchestrator import elastic_host, run_sizes
from rlhfless.orchestrator.elastic_host import through_sizes
from rlhfless.orchestrator.host import DevicesWanted, RunPaused, StopCause
from rlhfless.orchestrator.run_sizes import CHANGE_S, SIZES_FILE, RunSizes
from rlhfless.records import ReplicaState
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import FOR_DEVICES

WANTED = DevicesWanted("h100", 2, 8, 1, sizes=(2, 4, 8), present=8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(run_sizes, "monotonic_s", lambda: now[0])
    return now


def elastic() -> RunSizes:
    sizes = RunSizes()
    sizes.offer(WANTED.sizes)
    return sizes


def test_a_grant_between_two_sizes_is_the_lower_one() -> None:
    sizes = elastic()
    assert [sizes.among(granted) for granted in (0, 1, 2, 5, 8, 9)] == [0, 0, 2, 4, 8, 8]


def test_a_run_of_one_size_tells_its_lease_alone() -> None:
    lease = lease_of(RunSizes(), DevicesWanted("h100", 2, 8, 2), 4, 10)
    assert (lease.minimum, lease.maximum, lease.unit, lease.held, lease.sizes) == (2, 8, 2, 4, [])


def test_what_a_change_costs_is_measured_by_its_parts(clock: list[float]) -> None:
    """It starts for the first time in 20 s; a change later saves for 3 s, stops for 1 s and starts for 14 s."""
    sizes = elastic()
    assert lease_of(sizes, WANTED, 0, 10).change_s == CHANGE_S
    sizes.starts(8)
    clock[0] = 20.0
    assert sizes.works() is None
    assert lease_of(sizes, WANTED, 8, 10).change_s == 20.0
    sizes.step_done(50.0)
    assert not sizes.stopping
    sizes.stops()
    assert sizes.stopping, "engines stay"
    clock[0] = 24.0
    sizes.part("start")
    sizes.starts(4)
    assert not sizes.stopping, "if this start fails, everything stops"
    clock[0] = 38.0
    assert sizes.works() == {"save_s": 4.0, "start_s": 14.0}
    assert sizes.works() is None, "told once"
    assert lease_of(sizes, WANTED, 4, 9).change_s == 18.0


def test_the_first_step_at_a_size_counts_until_there_is_another() -> None:
    sizes = elastic()
    sizes.starts(8)
    for step_s in (30.0, 20.0, 22.0):
        sizes.step_done(step_s)
        if step_s == 30.0:
            assert lease_of(sizes, WANTED, 8, 5).seen_s == {"8": 30.0}
    sizes.stops()
    sizes.starts(4)
    sizes.step_done(70.0)
    assert lease_of(sizes, WANTED, 4, 5).seen_s == {"8": 21.0, "4": 70.0}


def test_a_size_at_which_the_run_cannot_start_is_not_asked_for_again() -> None:
    sizes = elastic()
    sizes.starts(4)
    assert not sizes.refuse(), "its first start is no change"
    sizes.works()
    sizes.step_done(10.0)
    sizes.stops()
    sizes.starts(8)
    assert sizes.refuse()
    assert sizes.among(8) == 4, "it goes back"
    lease = lease_of(sizes, WANTED, 8, 5)
    assert (lease.sizes, lease.maximum) == ([2, 4], 4)
    sizes.starts(4)
    assert sizes.decision(3, "") is None, "nothing has changed"
    sizes.works()
    sizes.step_done(10.0)
    sizes.stops()
    sizes.starts(2)
    decision = sizes.decision(4, "b can start")
    assert decision is not None
    assert (decision.kind, decision.choice, decision.inputs) == (
        "size",
        "4 -> 2 devices",
        {"devices_before": 4, "devices": 2, "reason": "b can start"},
    )
    sizes.works()
    sizes.step_done(10.0)
    assert not sizes.refuse(), "a step was done: another fault"


def test_the_next_driver_returns_to_the_size_at_which_the_run_has_worked(tmp_path: Path) -> None:
    """The first driver works on 4 devices, begins to change to 8, and is killed; on 8, its successor cannot start."""

    def driver() -> RunSizes:
        sizes = RunSizes(tmp_path / SIZES_FILE)
        sizes.offer(WANTED.sizes)
        return sizes

    killed = driver()
    killed.starts(4)
    killed.works()
    for step_s in (90.0, 10.0, 12.0):
        killed.step_done(step_s)
    killed.stops()
    killed.starts(8)
    following = driver()
    assert lease_of(following, WANTED, 0, 5).seen_s == {"4": 11.0}, "what was measured is told"
    following.starts(8)
    assert following.refuse()
    following.starts(following.among(8))
    assert following.size == 4
    assert not following.refuse(), "there it has worked: another fault"
    following.works()
    following.step_done(80.0)
    assert lease_of(following, WANTED, 4, 5).seen_s == {"4": 11.0}, "the first step includes what starts late"
    following.step_done(14.0)
    assert lease_of(following, WANTED, 4, 5).seen_s == {"4": 14.0}
    new = RunSizes(tmp_path / "another run")
    new.offer(WANTED.sizes)
    new.starts(8)
    assert not new.refuse(), "a run that has never worked"


def pool(*states: ReplicaState) -> Any:
    return SimpleNamespace(replicas=lambda: [SimpleNamespace(state=state) for state in states])


@pytest.mark.parametrize(
    ("pools", "called_off"),
    [
        ([[ReplicaState.SERVING, ReplicaState.STARTING], [ReplicaState.SERVING]], False),
        ([[ReplicaState.SERVING], [ReplicaState.STARTING], []], True),
        ([[ReplicaState.STARTING, ReplicaState.STARTING], [ReplicaState.SLEEPING]], True),
    ],
    ids=["another actor goes on with the step", "no learner", "no actor"],
)
async def test_a_run_whose_devices_are_lost_ends_its_step_first_if_it_can(
    tmp_path: Path, pools: list[list[ReplicaState]], called_off: bool
) -> None:
    told: list[Any] = []
    with contextlib.closing(Outbox(tmp_path, 1)) as outbox:
        reporter = Reporter(outbox, Console("off", "a", 9), 9, 60.0)
        reporter.sizes.offer((2, 4, 8))
        reporter.sizes.starts(8)
        reporter.cancel = told.append
        reporter._run = cast("Any", SimpleNamespace(pools={str(n): pool(*each) for n, each in enumerate(pools)}))
        answer = PushAnswer(pushed=0, desired_state="run", granted=4, lease_reason="")
        reporter._apply_answer(answer)
        assert told == [], "it waits for no devices"
        with reporter.stage(f"{FOR_DEVICES} (5 s)"):
            reporter._apply_answer(answer)
    assert told == ([StopCause.RESIZE] if called_off else [])


async def test_a_driver_goes_through_the_sizes_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes to 8 devices, where it cannot start, goes on with 4, loses two of them, and goes on with 2 until its
    end; other errors end it."""
    sizes, told = elastic(), list[str]()
    ends: list[Any] = [
        RunPaused(StopCause.RESIZE, "after step 2"),
        FleetError("no engine started"),
        asyncio.CancelledError(),
        "done",
    ]
    starts = iter([4, 8, 4, 2])

    async def execute(_: Any) -> Any:
        sizes.starts(next(starts))
        end = ends.pop(0)
        if isinstance(end, RunPaused):
            sizes.works()
            sizes.step_done(10.0)
            sizes.stops()
        if isinstance(end, BaseException):
            raise end
        return end

    reporter: Any = SimpleNamespace(sizes=sizes, say=told.append)
    monkeypatch.setattr(elastic_host, "execute", execute)
    session: Any = None
    called_off = [True]
    assert await through_sizes(session, reporter, called_off.pop) == "done"
    assert told == ["the run could not start on 8 devices, and does not ask for as many again: no engine started"]
    ends, starts = [FleetError("the learner died")], iter([2])
    sizes.works()
    sizes.step_done(10.0)
    with pytest.raises(FleetError, match="the learner died"):
        await through_sizes(session, reporter, lambda: False)
    ends, starts = [asyncio.CancelledError()], iter([2])
    with pytest.raises(asyncio.CancelledError):
        await through_sizes(session, reporter, lambda: False)


async def test_only_a_change_of_size_lets_the_work_go_on_that_was_called_off() -> None:
    went_on: list[bool] = []

    async def work() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                went_on.append(attempt._is_resized())
                if not went_on[-1]:
                    raise

    attempt: Any = SimpleNamespace(_called_off=[], _task=asyncio.create_task(work()))
    attempt._is_resized = lambda: main._Attempt._is_resized(attempt)
    for causes in ([StopCause.RESIZE], [StopCause.RESIZE, None], [None]):
        await asyncio.sleep(0)
        for cause in causes:
            main._Attempt._abort_all(attempt, cause)
    await asyncio.wait([attempt._task])
    assert went_on == [True, True, False], "a user who cancels meanwhile is heard again with the next answer"
    assert attempt._task.cancelled()


def test_what_the_broker_knows_of_a_run() -> None:
    planned = {"maximum": 4, "sizes": [{"devices": 2, "step_s": 40.0}, {"devices": 4, "step_s": 30.0}]}
    contract = {"type": "cheapest", "deadline_s": 35.0}
    run = RunRow(id="a", owner="key", priority=1, steps=10, sizes=planned, spec={"scaling": {"contract": contract}})
    lease = LeaseRow(
        run_id="a", kind="h100", minimum=2, maximum=8, unit=1, granted=2, held=2, asked_at=1.0, tenants=1,
        sizes=[2, 4, 8], seen_s={"2": 20.0}, steps_left=7.0, change_s=5.0,
    )  # fmt: skip
    request = request_of(lease, run)
    assert request.sizes == (2, 4), "no more than the plan's maximum"
    assert request.curve.step_s == {2: 20.0, 4: 15.0}, "measured at 2, and scaled at 4"
    assert request.needed == 2, "20 s keep 35 s"
    slower = request_of(
        lease, RunRow(**{**_values(run), "spec": {"scaling": {"contract": contract | {"deadline_s": 18}}}})
    )
    assert slower.needed == 4
    per_run = contract | {"deadline_s": 160.0, "per": "run"}
    assert request_of(lease, RunRow(**{**_values(run), "spec": {"scaling": {"contract": per_run}}})).needed == 4
    unplanned = request_of(lease, RunRow(**{**_values(run), "sizes": None, "spec": {}}))
    assert (unplanned.sizes, unplanned.curve.step_s, unplanned.needed) == ((2, 4, 8), {2: 20.0}, 0)


def _values(run: RunRow) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("id", "owner", "priority", "steps", "sizes", "spec")}
