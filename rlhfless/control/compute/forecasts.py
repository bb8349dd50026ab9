"""Background computations of the service: each run's plan, its best static fleet, and queued simulations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.compute.runner import Runner
from rlhfless.control.database.access import Database
from rlhfless.control.database.tables import RunRow, SimulationRow
from rlhfless.control.errors import ApiError
from rlhfless.control.lifecycle import ENDED, Status
from rlhfless.control.periodic import PeriodicTask
from rlhfless.control.run_files import trace_of
from rlhfless.spec.data import DATA

log = logging.getLogger(__name__)

PERIOD_S = 5.0

PLAN_S, STATIC_S, SIMULATION_S = 120.0, 600.0, 1800.0
"""Maximum durations of the jobs, in seconds."""

FIRST_STEPS = 20
"""A run's static fleet is computed after this many steps, after each doubling, and at the run's end."""

SAME_LENGTHS = ("model", "type", *dict.fromkeys(DATA.values()))
"""Sections of a spec. Runs that agree in them have similar lengths."""

NOTHING: dict[str, Any] = {}
"""Stored result of a failed computation, so that it is not repeated."""


class Forecasts(PeriodicTask):
    """Computes the missing plans and static fleets of the service's runs, one at a time."""

    def __init__(self, database: Database, runner: Runner, devices: Callable[[], Mapping[str, int]]) -> None:
        super().__init__(PERIOD_S)
        self._database = database
        self._runner = runner
        self._devices = devices

    async def tick(self) -> None:
        """Compute the missing plans and static fleets."""
        for row in await self._database.read(_without_plan):
            await self._plan(row)
        for row in await self._database.read(_worth_simulating):
            await self._static(row)

    async def _plan(self, run: RunRow) -> None:
        trace = await self._database.read(lambda session: _similar_trace(session, run))
        devices = dict(self._devices()) or {"cpu-core": 1}
        question: dict[str, Any] = {"spec": run.spec, "present": devices, "trace": trace}
        row = await self._answer("forecast", question, PLAN_S)
        predicted = row.get("predicted") or NOTHING
        values = {"plan": predicted, "sizes": row.get("sizes")}
        await self._database.write(lambda session: _set(session, RunRow, run.id, **values))

    async def _static(self, run: RunRow) -> None:
        trace = trace_of(run.folder)
        static = NOTHING if trace is None else await self._answer("static", {"trace": trace}, STATIC_S)
        values = {"best_static": static or None, "simulated_step": run.step}
        await self._database.write(lambda session: _set(session, RunRow, run.id, **values))

    async def _answer(self, job: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of a job; NOTHING if it refuses or fails, because runs do not depend on it."""
        try:
            return await self._runner.run(job, question, timeout_s)
        except ApiError as error:
            log.info("job %s failed: %s", job, error)
            return NOTHING


class Simulations(PeriodicTask):
    """Runs the queued simulations one at a time, independently of the forecasts, because a simulation may take half an
    hour."""

    def __init__(self, database: Database, runner: Runner) -> None:
        super().__init__(PERIOD_S)
        self._database = database
        self._runner = runner

    async def tick(self) -> None:
        """Run all queued simulations."""
        for simulation in await self._database.read(_waiting):
            await self._simulate(simulation)

    async def _simulate(self, simulation: SimulationRow) -> None:
        await self._set(simulation.id, status="running")
        question = dict(simulation.request)
        result = error = None
        try:
            if question["run"] is not None:
                run = await self._database.read(lambda session: store.run_of(session, question["run"]))
                question["trace"] = trace_of(run.folder)
            result = await self._runner.run("simulation", question, SIMULATION_S)
        except ApiError as refused:
            error = refused.body()["error"]
        status = "failed" if error else "succeeded"
        await self._set(simulation.id, status=status, result=result, error=error, finished_at=time.time())

    async def _set(self, simulation_id: str, **values: Any) -> None:
        await self._database.write(lambda session: _set(session, SimulationRow, simulation_id, **values))


def _without_plan(session: Session) -> list[RunRow]:
    begun = [Status.VALIDATING, Status.PROVISIONING, Status.RUNNING]
    query = select(RunRow).where(RunRow.plan.is_(None), RunRow.status.in_(begun)).order_by(RunRow.created_at)
    return list(session.scalars(query))


def _worth_simulating(session: Session) -> list[RunRow]:
    """Return the runs whose steps have doubled since their last simulation, or that have ended since."""
    query = select(RunRow).where(RunRow.step > RunRow.simulated_step, RunRow.step >= 2)
    rows = session.scalars(query)
    due = [row for row in rows if row.status in ENDED or row.step >= max(2 * row.simulated_step, FIRST_STEPS)]
    return [row for row in due if row.spec.get("type", "rlhf") == "rlhf"]  # other types of runs have no fleet


def _similar_trace(session: Session, run: RunRow) -> str | None:
    """Return the trace of the newest succeeded run of the same type with the same model and data."""
    query = select(RunRow).where(RunRow.status == Status.SUCCEEDED).order_by(RunRow.created_at.desc()).limit(100)
    for row in session.scalars(query):
        same = all(row.spec.get(key) == run.spec.get(key) for key in SAME_LENGTHS)
        if same and (trace := trace_of(row.folder)) is not None:
            return trace
    return None


def _waiting(session: Session) -> list[SimulationRow]:
    """Return the queued simulations in order, including those interrupted by the end of an earlier service."""
    query = select(SimulationRow).where(SimulationRow.status.in_(["queued", "running"]))
    return list(session.scalars(query.order_by(SimulationRow.created_at)))


def _set(session: Session, kind: type[RunRow | SimulationRow], row_id: str, **values: Any) -> None:
    """Set columns of a run or a simulation, unless it was deleted meanwhile."""
    row = session.get(kind, row_id)
    if row is None:
        return
    for name, value in values.items():
        setattr(row, name, value)
    if isinstance(row, RunRow):
        store.touch(session, row)
