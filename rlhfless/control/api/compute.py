"""Computations on request: plans, reward trials and simulations."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from pydantic import ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from rlhfless.control.api.results import trace_folder
from rlhfless.control.api.routes import OfService, Runs, object_of
from rlhfless.control.api.runs import EXAMPLE
from rlhfless.control.database.tables import SimulationRow
from rlhfless.control.errors import ApiError, not_found, refused
from rlhfless.control.objects import ListObject, RewardTrialObject, SimulationObject
from rlhfless.control.service import Service
from rlhfless.control.spec_admission import accepted_spec, simulation_problems, unstorable
from rlhfless.planning.dimensions import Dimensions
from rlhfless.planning.inputs import parsed_sides
from rlhfless.planning.objects import ComparisonObject, PlanObject
from rlhfless.spec.base import StrictModel
from rlhfless.spec.errors import InputError, Problem

router = APIRouter(tags=["compute"])

PLAN_S, COMPARE_S, REWARDS_S, CHECK_S = 120.0, 240.0, 120.0, 60.0
"""Maximum durations of jobs. A comparison over all kinds in the price book takes up to a minute."""


class _Question(StrictModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PlanQuestion(_Question):
    """A run to plan."""

    spec: dict[str, Any]
    lengths_of: str | None = None
    """Id of an earlier run, for its response lengths and, on the same devices, its latencies."""


class CompareQuestion(Dimensions, PlanQuestion):
    """A run, and the devices to compare for it."""

    devices: list[Annotated[str, Field(max_length=64)]] = Field(default_factory=list, max_length=32)
    """Devices such as `8xh100`, or `8xl40s+2xh100` with the learner's last. By default those of the service, and the
    best of the price book for the model's size."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Deadline of the whole run in seconds; devices that meet it come first."""
    limit: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Maximum number of rows, best first. By default 20, or all of `devices`."""


@router.post("/runs:plan", summary="Plan a run: memory, time and cost")
async def plan_run(
    service: OfService,
    question: Annotated[PlanQuestion, Body(openapi_examples={"small": {"value": {"spec": EXAMPLE}}})],
) -> PlanObject:
    """Predict memory per device and phase, and time and cost of a step and of the run, with a band, on the devices of
    the spec or of the service. The answer lists the inputs that a better prediction needs. Starts nothing."""
    await accepted_spec(question.spec, service.settings)
    answer = await service.runner.run("plan", await plan_question(service, question), PLAN_S)
    return PlanObject.model_validate(answer)


@router.post("/runs:compare", summary="Compare devices and placements for a run")
async def compare_run(
    service: OfService,
    question: Annotated[CompareQuestion, Body(openapi_examples={"small": {"value": {"spec": EXAMPLE}}})],
) -> ComparisonObject:
    """Predict time, cost, energy and the slowest part of a run for kinds and numbers of devices and placements, and say
    why others do not fit. Starts nothing."""
    await accepted_spec(question.spec, service.settings)
    if problems := list(_device_problems(question.devices)):
        raise refused("the devices", problems)
    answer = await service.runner.run("compare", await plan_question(service, question), COMPARE_S)
    return ComparisonObject.model_validate(answer)


def _device_problems(devices: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each string that does not name devices.

    The job would refuse it only after its turn, and after planning the run's own devices.
    """
    for index, text in enumerate(devices):
        try:
            parsed_sides(text)
        except InputError as error:
            yield from (replace(problem, where=f"devices.{index}") for problem in error.problems)


async def plan_question(service: Service, question: PlanQuestion) -> dict[str, Any]:
    """Return the job's question. Raises ApiError (404)."""
    asked = question.model_dump(exclude={"lengths_of"})
    trace = None if question.lengths_of is None else await trace_folder(service, question.lengths_of)
    return asked | {"present": service.device_counts() or {"cpu-core": 1}, "trace": trace}


class RewardsQuestion(_Question):
    """Rewards, as in a spec, and samples to try them on."""

    rewards: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=64)]
    samples: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1000)]
    """Samples with `response`, `prompt`, and the columns that the rewards read."""


REWARDS_EXAMPLE = {
    "rewards": [{"type": "exact_match"}],
    "samples": [{"prompt": "2+2=", "response": "4", "answer": "4"}],
}


@router.post("/rewards:test", summary="Try rewards on samples")
async def try_rewards(
    service: OfService,
    _: Runs,
    question: Annotated[RewardsQuestion, Body(openapi_examples={"small": {"value": REWARDS_EXAMPLE}})],
) -> RewardTrialObject:
    """Score every sample, by part of the reward, with the causes of failures."""
    spec = {"model": {"path": "none"}, "prompts": {"path": "none"}, "rewards": question.rewards}
    await accepted_spec(spec, service.settings)
    asked = question.model_dump() | {"http_hosts": list(service.settings.http_hosts)}
    return RewardTrialObject.model_validate(await service.runner.run("rewards", asked, REWARDS_S))


class SimulationQuestion(_Question):
    """A scenario (docs/simulate.md), or a run whose steps are simulated again."""

    scenario: dict[str, Any] | None = None
    run: str | None = None
    """Id of a run."""
    policies: list[Annotated[str, Field(max_length=64)]] = Field(default_factory=list, max_length=32)
    """For a scenario, only these labels; for a run, other policies, by name."""


@router.post("/simulations", status_code=202, summary="Compare policies")
async def create_simulation(service: OfService, caller: Runs, question: SimulationQuestion) -> SimulationObject:
    """Queue a simulation. Poll it until it has ended."""
    if (question.scenario is None) == (question.run is None):
        raise ApiError(422, "invalid_request", "give `scenario` or `run`, one of the two", "scenario")
    asked = question.model_dump()
    named = question.scenario if question.run is None else {"policies": question.policies}
    if problems := [*unstorable(asked), *simulation_problems(named or {}, service.settings)]:
        raise refused("the simulation", problems)
    if question.run is not None:
        await trace_folder(service, question.run)
    await service.runner.run("check_simulation", asked, CHECK_S)
    now = time.time()
    simulation_id = f"sim-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"
    row = SimulationRow(id=simulation_id, owner=caller.owner, created_at=now, status="queued", request=asked)

    def add(session: Session) -> SimulationObject:
        session.add(row)
        return object_of(SimulationObject, row)

    created = await service.database.write(add)
    service.simulations.wake()
    return created


@router.get("/simulations", summary="List simulations")
async def list_simulations(
    service: OfService, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> ListObject[SimulationObject]:
    """List simulations, newest first."""
    query = select(SimulationRow).order_by(SimulationRow.created_at.desc()).limit(limit + 1)
    rows = await service.database.read(lambda session: list(session.scalars(query)))
    return ListObject(data=[object_of(SimulationObject, row) for row in rows[:limit]], has_more=len(rows) > limit)


@router.get("/simulations/{simulation_id}", summary="One simulation")
async def get_simulation(service: OfService, simulation_id: str) -> SimulationObject:
    """Return the status of a simulation, and its result once it has ended."""
    row = await service.database.read(lambda session: session.get(SimulationRow, simulation_id))
    if row is None:
        raise not_found("simulation", simulation_id)
    return object_of(SimulationObject, row)
