"""The run's scaler: every policy of the spec controls a live stage without a fault, and a resumed scaler knows its
trace."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.builders import timed
from fakes.fake_cluster import FakeActor, FakePool
from fakes.fake_run import Fleet, Reader, draw, stage_of, until
from fakes.set_clock import reading
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.orchestrator.run_scaler import policy_of
from rlhfless.orchestrator.scaler import Scaler, StepDue
from rlhfless.records import Score, StepRecord, Work
from rlhfless.records.traces import Trace, TraceMeta, read_trace
from rlhfless.scaling.latency.fitted import EngineSpeeds
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policy import Policy
from rlhfless.spec import CheapestSpec, RunSpec, WeightedSpec
from rlhfless.spec.explain import tag_of
from rlhfless.spec.fleet import POLICY_SEAM
from rlhfless.util.clock import VirtualClock


class Life:
    """A scaler over two serving fake actors."""

    def __init__(self, folder: Path, policy: str, fewest: int = 2, sequences: int = 256) -> None:
        self.sequences = sequences
        self.pool = FakePool(*"ab"[:fewest], allocations=2, fewest=fewest)
        self.scene = Fleet(folder, fewest, sequences, actors=self.pool)
        values = self.scene.spec.model_dump(mode="json")
        values["scaling"]["policy"] = policy
        self.spec = RunSpec.model_validate(values)
        speeds = EngineSpeeds(None, 1, sequences)
        due = StepDue(RunContract())
        made = policy_of(self.spec, LengthPredictor(self.spec.generation.max_tokens), None)
        self.scaler = Scaler(made, self.scene.fleet, speeds, self.scene.ledger, due)

    def stage(self, what: RolloutRequest) -> GenerationStage:
        runner = self.scaler.runner_of(what.call.step, what.work)
        return stage_of(self.pool, what, spec=self.spec, policy=runner)

    async def draw(self, step: int, names: Sequence[str] = "pqrs") -> Reader:
        """Generate a step with two heartbeats in between, and end it."""
        clock = VirtualClock()
        with reading(clock):
            reader = Reader(self.stage(of_step(step, names)))
            await until(lambda: any(actor.running for actor in self.actors))
            for turn in (1, 2):
                clock.now_s += 1.0
                for actor in self.actors:
                    actor.heartbeat(dict.fromkeys(itertools.islice(actor.running, self.sequences), 4 * turn))
                await asyncio.sleep(0)
            while not reader.task.done():
                for actor in self.actors:
                    if actor.running:
                        actor.finish(next(iter(actor.running))[0])
                await asyncio.sleep(0)
            await reader.task
        for group in reader.groups:
            self.scene.ledger.add_rollouts(step, [group.adding(score=[Score(0.0, {}) for _ in group.samples])])
        self.scaler.learn_speeds(step)
        self.scaler.end_step(StepRecord(step, 10.0 * step, 10.0 * step + 8, {}))
        self.scene.ledger.add_step(StepRecord(step, 10.0 * step, 10.0 * step + 8, {}))
        return reader

    @property
    def actors(self) -> list[FakeActor]:
        return list(self.pool.actors.values())


def of_step(step: int, names: Sequence[str], work: Work = Work.GENERATE) -> RolloutRequest:
    known = draw(names)
    call = type(known.call)("run", 1, step)
    return RolloutRequest(call, known.prompts, 2, known.sampling, work, known.seed, step)


OFFERED = [tag_of(settings) for settings in POLICY_SEAM.built_in]
"""Policies that a spec can name."""


@pytest.mark.parametrize("policy", OFFERED)
async def test_every_policy_draws_steps_without_a_fault(tmp_path: Path, policy: str) -> None:
    life = Life(tmp_path, policy)
    for step in (1, 2, 3):
        reader = await life.draw(step)
        assert sorted(reader.names) == ["p", "q", "r", "s"]
        figures = life.scaler.runner.figures(step)
        assert figures["policy_faults"] == 0.0
        assert 1.0 <= figures["actors_wanted"] <= 2.0


async def test_a_step_of_two_thousand_samples_on_sixteen_sequences_is_no_fault(tmp_path: Path) -> None:
    """Runs enough steps that the scaler uses forecasts learned from earlier steps."""
    life = Life(tmp_path, "cost_aware", sequences=8)
    names = [f"p{number}" for number in range(1024)]
    for step in range(1, 8):
        reader = await life.draw(step, names)
        assert sorted(reader.names) == sorted(names)
        figures = life.scaler.runner.figures(step)
        assert figures["policy_faults"] == 0.0
        assert math.isfinite(figures["planned_generation_s"])


async def test_our_policy_plans_each_step_and_the_ledger_has_its_reasons(tmp_path: Path) -> None:
    life = Life(tmp_path, "cost_aware")
    await life.draw(1)
    assert life.scaler.runner.figures(1)["planned_generation_s"] > 0
    life.scene.ledger.write([])
    plans = [decision for decision in read_trace(tmp_path).decisions if decision.kind == "plan"]
    assert [(plan.step, plan.inputs["samples"]) for plan in plans] == [(1, 8)]
    assert plans[0].inputs["contract"] == "time weighted 1, cost 0"  # neither actor can be released


async def test_a_step_that_failed_is_begun_again(tmp_path: Path) -> None:
    life = Life(tmp_path, "cost_aware")
    failed = Reader(life.stage(of_step(1, "pqrs")))
    await until(lambda: bool(life.actors[0].running))
    failed.task.cancel()
    await asyncio.gather(failed.task, return_exceptions=True)
    for actor in life.actors:
        actor.running.clear()
    await life.draw(1)
    assert life.scaler.runner.figures(1)["policy_faults"] == 0.0


async def test_evaluations_and_known_steps_are_dealt_out_evenly(tmp_path: Path) -> None:
    life = Life(tmp_path, "cost_aware")
    await life.draw(1)
    for what in (of_step(2, "pq", Work.HELD_OUT), of_step(1, "pq")):
        reader = Reader(life.stage(what))
        await until(lambda: all(actor.running for actor in life.actors))
        assert [len(actor.running) for actor in life.actors] == [2, 2]
        for actor in life.actors:
            actor.finish()
        await reader.task
    assert life.scaler.runner.figures(2) == {}


# -- resuming

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p"},
    "rewards": [{"type": "exact_match"}],
    "generation": {"max_tokens": 64},
    "steps": 10,
}


def contract_of(scaling: dict[str, Any], earlier: Trace | None = None, spent_usd: float = 0.0) -> Any:
    bounds = {"generation": {"min_actors": 1, "max_actors": 2}}
    spec = RunSpec.model_validate(BASE | {"scaling": bounds | scaling})
    policy = policy_of(spec, LengthPredictor(64), earlier, spent_usd)
    return run_of(policy)


def run_of(policy: Policy) -> Any:
    assert isinstance(policy, CostAware)
    return policy._run


EARLIER = Trace(
    meta=TraceMeta("run", 1, {}, {"generation": {"max_tokens": 64}}, {}),
    rollouts=tuple(timed("a", step, index, 0.01) for step in (1, 2) for index in range(2)),
    steps=(StepRecord(1, 0.0, 30.0, {}), StepRecord(2, 40.0, 60.0, {})),
)


def test_a_contract_for_the_run_is_less_what_earlier_attempts_took() -> None:
    cheapest = {"contract": {"type": "cheapest", "deadline_s": 600, "per": "run"}}
    assert contract_of(cheapest).contract.deadline_s == 600
    resumed = contract_of(cheapest, EARLIER)
    assert (resumed.contract.deadline_s, resumed.steps) == (550, 8)
    fastest = {"contract": {"type": "fastest", "budget_usd": 2.0, "per": "run"}}
    assert contract_of(fastest, EARLIER, 1.5).contract.budget_usd == 0.5
    per_step = {"contract": {"type": "fastest", "budget_usd": 2.0}}
    assert contract_of(per_step, EARLIER, 1.5).contract.budget_usd == 2.0


def test_in_a_fleet_that_never_changes_only_time_counts() -> None:
    fixed = {"contract": {"type": "weighted", "time_weight": 0.2}, "generation": {"min_actors": 2, "max_actors": 2}}
    assert contract_of(fixed).contract.time_weight == 1.0
    assert contract_of({"contract": {"type": "weighted", "time_weight": 0.2}}).contract.time_weight == 0.2


def test_the_policy_forecasts_with_what_the_run_knows_of_its_responses() -> None:
    lengths = LengthPredictor(64)
    policy = policy_of(RunSpec.model_validate(BASE), lengths, EARLIER)
    assert isinstance(policy, CostAware)
    forecaster: Any = policy._forecaster
    assert forecaster._predictor is lengths


def test_a_step_is_due_at_its_share_of_the_contract(clock: VirtualClock) -> None:
    """100 s for four steps. The first takes 40 s, so 20 s remain for each of the others."""
    clock.now_s = 1000.0
    due = StepDue(RunContract(CheapestSpec(deadline_s=100.0, per="run"), steps=4))
    clock.now_s = 1005.0
    assert due.left_s() == 20.0
    due.end_step(1040.0)
    clock.now_s = 1050.0
    assert due.left_s() == 10.0
    clock.now_s = 1070.0
    assert due.left_s() == -10.0
    assert StepDue(RunContract(CheapestSpec(deadline_s=30.0, per="step"), steps=4)).left_s() == 30.0
    assert StepDue(RunContract(WeightedSpec(), steps=4)).left_s() == math.inf
