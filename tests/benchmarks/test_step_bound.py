"""The lower bound: no schedule of a tiny step beats it, no policy of a scenario does, and its parts by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from against_bound import RunBounds
from hypothesis import given, settings
from hypothesis import strategies as st
from lower_bound import SLACK, Case, bounds, optimum
from step_bound import ActorKind, BoundWork, TradeOff, least_usd, lines_below

from fakes.tiny_scenario import scenario
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.experiment.run import FleetShape
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec

NAMES = (
    "static_colocated",
    "static_disaggregated",
    "queue_reactive_ray_serve",
    "rlhfuse_tail",
    "rlhfless_published",
    "cost_aware",
    "best_static",
    "clairvoyant",
)


def work_of(prompt_tokens: list[int], response_tokens: list[int], siblings: int = 1) -> BoundWork:
    group = np.repeat(np.arange(len(prompt_tokens)), siblings)
    batch = RolloutBatch(
        1, tuple(map(str, range(len(prompt_tokens)))), np.array(prompt_tokens), group, np.array(response_tokens)
    )
    return BoundWork.of(batch, block_tokens=4)


def kind(**changes: Any) -> ActorKind:
    figures: dict[str, Any] = {
        "actors": 1,
        "usd_per_s": 2.0,
        "lines": ((1.0, 0.0), (0.5, 0.5)),
        "one_s": 1.0,
        "context_s": 0.0,
        "prefill_token_s": 0.1,
        "prefill_pair_s": 0.0,
        "max_sequences": 2,
        "kv_tokens": 1000,
        "up_s": 3.0,
    }
    return ActorKind(**(figures | changes))


@pytest.mark.parametrize("seed", range(30))
def test_no_schedule_of_a_tiny_step_beats_it(seed: int) -> None:
    case = Case.random(np.random.default_rng(seed))
    best = optimum(case)
    below = bounds(case, best[0])
    assert SLACK > 1
    for least, bound in zip(best, below, strict=True):
        assert 0 < bound <= least * (1 + 1e-9)
        assert least <= 3 * bound  # a bound near zero would bound nothing


def test_iterations_and_prefill_by_hand() -> None:
    # Siblings of 6 prompt tokens share the block of 4: 4 once and 2 each; the first token comes with the prefill.
    work = work_of([6], [5, 3], siblings=2)
    assert work.iterations.tolist() == [4, 2]
    assert work.prefill_tokens == 4 + 2 + 2
    assert work.context.tolist() == [6 * 4 + 1 + 2 + 3 + 4, 6 * 2 + 1 + 2]
    # 4 iterations with 2 at once: 6 tokens at 0.5 s each and 4 times 0.5 s; prefill 0.8 s; up 3 s; 2 $ a second.
    assert least_usd(kind(), work, np.array([math.inf]))[0] == pytest.approx(2 * (3 + 2 + 0.8 + 3))
    # The longest response alone takes 4 s and the 0.6 s of its prompt.
    assert math.isinf(least_usd(kind(), work, np.array([4.59]))[0])


def test_a_limit_forbids_large_batches() -> None:
    # Two responses of 101 tokens, alpha = 0.5, beta = 0.5: together 150 s, 100 iterations of 1.5 s; apart 100 s each.
    work = work_of([1, 1], [101, 101])
    free, tight = kind(prefill_token_s=0.0).seconds(work, np.array([math.inf, 100.0]))
    assert free == pytest.approx(150)
    # (100 sqrt(0.5))^2 / (100 - 50) = 100 iterations of each.
    assert tight == pytest.approx(200)


def test_lines_are_below_a_curve_and_touch_it() -> None:
    table = np.maximum(3.0, 0.5 * np.arange(1, 13)) + 0.01 * np.arange(1, 13)
    lines = lines_below(table)
    below = np.max([alpha + beta * np.arange(1, 13) for alpha, beta in lines], axis=0)
    assert (below <= table + 1e-12).all()
    assert below == pytest.approx(table)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reference": {}},
        {"contract": {"type": "fastest", "budget_usd": 0.001}},
        {"cluster": {"machines": [{"kind": "l40s", "devices_per_node": 4, "tenure": "owned", "released_value": 0.5}]}},
        {"cluster": {"machines": [{"kind": k, "devices_per_node": 2} for k in ("h100", "l40s")]}},
        {"engine": {"max_sequences": 3}},
    ],
    ids=["rented", "reference", "budget", "owned", "mixed", "waiting"],
)
def test_no_policy_beats_it(changes: dict[str, Any]) -> None:
    one = scenario(**(changes | {"policies": [{"name": name} for name in NAMES]}))
    found = compare(one)
    bounds = RunBounds(one)
    assert [text for runs in found.results.values() for text in bounds.beaten(runs)] == []


def test_a_run_below_it_is_said() -> None:
    one = scenario(policies=[{"name": "static_colocated"}])
    (run, *_) = compare(one).results["static_colocated"]
    quicker = type(run)(run.label, run.fleet, run.seed, tuple(_with(step, time_s=1e-3) for step in run.steps))
    cheaper = type(run)(run.label, run.fleet, run.seed, tuple(_with(step, usd=1e-9) for step in run.steps))
    told = RunBounds(one).beaten([run, quicker, cheaper])
    assert len(told) == 2 * len(run.steps)
    assert told[0].startswith("static_colocated, seed 0, step 0: 0.001 s < ")


def _with(step: Any, **changes: float) -> Any:
    return type(step)(**{name: changes.get(name, getattr(step, name)) for name in step.__slots__})


@given(st.integers(0, 20), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
@settings(max_examples=20, deadline=None)
def test_more_time_never_costs_more_and_steps_together_are_no_dearer(seed: int, first: float, second: float) -> None:
    # Of devices that are paid for only while they are held: of others each second costs.
    devices = {"machines": [{"kind": "l40s", "devices_per_node": 4, "rented_by": "device"}]}
    bounds = RunBounds(scenario(cluster=devices)).steps(FleetShape(ScenarioPlacementSpec(mode="colocated")), seed)[:2]
    times = [bounds[0].least_s * first, bounds[1].least_s * second]
    apart = sum(float(bound.least_usd(np.array([time_s]))[0]) for bound, time_s in zip(bounds, times, strict=True))
    together = TradeOff.of(bounds)
    assert together.least_usd(sum(times)) <= apart * (1 + 1e-6)
    assert together.least_usd(2 * sum(times)) <= together.least_usd(sum(times)) * (1 + 1e-9)
    assert together.least_s(apart) <= sum(times) * (1 + 1e-6)
    assert together.least_s(0.0) == math.inf


def test_the_line_through_an_engine_prices_its_prefill() -> None:
    line = LinearEngine(0.01, 0.001, 1e-6, 1e-5, 1e-9)
    assert LinearEngine.of(line).prefill_token_s == pytest.approx(1e-5)


@pytest.mark.parametrize("sharing", ["engine", "plan", "plan_and_learner"])
def test_no_policy_beats_it_behind_shared_prefixes(sharing: str) -> None:
    levels = [{"tokens": 600}, {"tokens": 300, "kinds": 4}]
    policies = [{"name": "static_colocated"}, {"name": "cost_aware"}]
    behind = scenario(prefixes={"levels": levels, "sharing": sharing}, seeds=1, policies=policies)
    comparison = compare(behind)
    assert RunBounds(behind).beaten(run for runs in comparison.results.values() for run in runs) == []
