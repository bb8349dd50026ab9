"""A judge with a model of its own: it holds its device while it judges, and an engine that is killed as it judges loses
nothing."""

from __future__ import annotations

import asyncio
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from fakes import saboteur
from fakes.live_runs import check_one_awake, fault_opening
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.records import ReplicaState, Work
from rlhfless.records.traces import compare_samples, read_trace
from rlhfless.scaling.accounting import check_holdings, summarise
from rlhfless.scaling.prices import PriceBook

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(900)]

STEPS = 2
JUDGE = "judge_grader"


async def sabotage(run: RLRun) -> None:
    """Kill the judge's engine while it judges the last step."""
    pool = run.pools[JUDGE]
    await saboteur.until(lambda: STEPS in run.under_way and any(each.working for each in pool.serving()))
    (replica,) = pool.serving()
    saboteur.engine(replica).kill()
    await saboteur.until(lambda: replica.lost)


def test_a_judge_that_dies_as_it_judges_loses_nothing(
    assets: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    examples = runpy.run_path(str(pytestconfig.rootpath / "examples/judges/tiny_judge.py"))
    examples["write"](str(tmp_path / "judge"))
    judge = {
        "type": "judge", "name": "grader", "path": str(tmp_path / "judge"), "dtype": "float32", "kv_cache_gib": 0.25,
        "template": "Is it short?\n{response}", "verdict": "yes_no", "weight": 0.0,
    }  # fmt: skip
    length = {"type": "length_penalty", "free_tokens": 0, "max_tokens": 400}
    values: dict[str, Any] = {
        "rewards": [length, judge],
        "steps": STEPS,
        "prompts": {"path": str(assets / "train.jsonl")},
        "generation": {"max_tokens": 100, "progress_interval_s": 0.1},
    }
    values["scaling"] = {"generation": {"min_actors": 1, "max_actors": 1}, "hold_scoring": "never"}
    plain = fault_opening(assets, tmp_path / "plain", actors=1, **values)
    plain.folder.mkdir()
    asyncio.run(execute(plain))
    newest = plain.checkpoints.newest()
    assert newest is not None
    expected = read_trace(plain.folder / "trace")
    check_holdings(expected.holdings)

    # Released after each step.
    calls = [call for call in expected.invocations if call.function == JUDGE]
    assert {call.step for call in calls} == {1, 2}
    assert len({call.incarnation for call in calls}) == STEPS
    bill = summarise(expected, PriceBook.model_validate(expected.meta.prices))
    (cost_usd,) = (usage.cost_usd for usage in bill.functions if usage.name == JUDGE)
    assert 0 < cost_usd < bill.pools_usd[JUDGE]
    assert all(call.work is Work.SCORE and call.input_tokens and call.output_tokens for call in calls)
    judged = [row.reward_parts["grader"] for row in expected.rollouts]
    assert len({*judged}) > 1
    assert all(0 < value < 1 for value in judged)

    del values["scaling"]
    turns = fault_opening(assets, tmp_path / "turns", actors=1, placement={"turns": True, "devices": 1}, **values)
    turns.folder.mkdir()
    recovered, digest = asyncio.run(saboteur.drive(turns, sabotage))
    assert digest == newest.notes.digest
    assert recovered.replicas_lost >= 1
    trace = read_trace(turns.folder / "trace")
    same = compare_samples(trace, expected)
    assert (same.fraction, same.only_in_first) == (1.0, 0)
    check_one_awake(trace)
    check_holdings(trace.holdings)
    assert any(row.function == JUDGE and row.state is ReplicaState.SLEEPING for row in trace.holdings)
    before = {(row.step, row.prompt_id, row.sample_index): row.reward_parts["grader"] for row in expected.rollouts}
    for row in trace.rollouts:
        assert math.isclose(row.reward_parts["grader"], before[row.step, row.prompt_id, row.sample_index], abs_tol=1e-5)
