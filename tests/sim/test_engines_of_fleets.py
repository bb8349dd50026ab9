"""Runs that share engines: by hand, and what holds for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.tiny_scenario import scenario
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.sim.experiment.fleets import FleetEngine, FleetStep, share_engines
from rlhfless.sim.experiment.shared import arrangements
from rlhfless.sim.samples import RolloutBatch

FLAT = LinearEngine(1.0, 0.0, 0.0, 0.0, 0.0)
"""An iteration takes a second, whatever its batch, and prompts take nothing."""


def step(*lengths: int, learn_s: float = 0.0, before_s: float = 0.0, prompt: int = 1) -> FleetStep:
    groups = np.arange(len(lengths))
    names = tuple(f"p{n}" for n in groups)
    batch = RolloutBatch(1, names, np.full(len(lengths), prompt), groups, np.array(lengths))
    return FleetStep(batch, learn_s, before_s)


def engine(model: LinearEngine = FLAT, sequences: int = 99, kv_tokens: int = 10**9) -> FleetEngine:
    return FleetEngine(model, sequences, kv_tokens)


def test_two_runs_in_one_engine_take_no_longer_than_the_longer_one() -> None:
    timeline = share_engines([[step(10, 4)], [step(7)]], [engine()])
    assert timeline.ends_s == pytest.approx((10.0, 7.0))
    assert timeline.engines_busy_s == pytest.approx((10.0,))


def test_iterations_take_longer_with_more_sequences() -> None:
    """1 + B seconds: three rows for 4 iterations, two until 7, one until 10."""
    slower = LinearEngine(1.0, 1.0, 0.0, 0.0, 0.0)
    timeline = share_engines([[step(10, 4)], [step(7)]], [engine(slower)])
    assert timeline.ends_s == pytest.approx((4 * 4 + 3 * 3 + 3 * 2, 4 * 4 + 3 * 3))


def test_the_context_grows_with_each_token() -> None:
    """1 + C / 100 seconds, from a prompt of 100 tokens: 2.00, 2.01, 2.02."""
    reads = LinearEngine(1.0, 0.0, 0.01, 0.0, 0.0)
    assert share_engines([[step(3, prompt=100)]], [engine(reads)]).ends_s == pytest.approx((6.03,))


def test_a_prompt_is_prefilled_once_and_the_others_wait() -> None:
    prefills = LinearEngine(1.0, 0.0, 0.0, 5.0, 0.0)
    batch = RolloutBatch(1, ("p",), np.array([3]), np.array([0, 0]), np.array([4, 2]))
    assert share_engines([[FleetStep(batch, 0.0)]], [engine(prefills)]).ends_s == pytest.approx((3 * 5.0 + 4.0,))


def test_rows_that_wait_for_room_are_admitted_by_run_in_turn() -> None:
    """Two of the first run, then one of each, then the rest."""
    runs = [[step(3, 3, 3, 3, 3)], [step(3)]]
    timeline = share_engines(runs, [engine(sequences=2)])
    assert timeline.ends_s == pytest.approx((9.0, 6.0))
    by_kv = share_engines(runs, [engine(kv_tokens=8)])
    assert by_kv.ends_s == timeline.ends_s


def test_learners_take_turns_first_come_first_served() -> None:
    """Run 0 generates until 4 and is scored until 5, run 1 until 6: it learns after run 0, with a change of turn."""
    runs = [[step(4, learn_s=3.0, before_s=1.0)], [step(6, learn_s=2.0)]]
    timeline = share_engines(runs, [engine()], sleep_s=0.25, wake_s=0.5)
    assert timeline.ends_s == pytest.approx((8.0, 10.75))
    assert timeline.learning_s == 5.0


def test_one_run_generates_while_another_learns() -> None:
    """Run 0 generates 0 to 4 and 8 to 12, run 1 from 0 to 8; they learn at 4, 8 and 12."""
    runs = [[step(4, learn_s=4.0)] * 2, [step(8, learn_s=4.0)]]
    assert share_engines(runs, [engine()]).ends_s == pytest.approx((16.0, 12.0))


@given(
    lengths=st.lists(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3),
                     min_size=1, max_size=4),
    engines=st.integers(1, 3),
    sequences=st.integers(1, 6),
    learn_s=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_and_sharing_never_loses_to_one_after_the_other(
    lengths: list[list[list[int]]], engines: int, sequences: int, learn_s: float
) -> None:
    fleet = [engine(LinearEngine(1.0, 0.05, 0.001, 0.0, 0.0), sequences)] * engines
    runs = [[step(*of_step, learn_s=learn_s) for of_step in of_run] for of_run in lengths]
    timeline = share_engines(runs, fleet)
    alone_s = [share_engines([run], fleet).makespan_s for run in runs]
    assert timeline.learning_s == pytest.approx(learn_s * sum(map(len, runs)))
    assert all(end_s >= alone - 1e-6 for end_s, alone in zip(timeline.ends_s, alone_s, strict=True)) or engines > 1
    assert timeline.makespan_s <= sum(alone_s) * 1.02 + 1e-6
    assert all(busy_s <= timeline.makespan_s + 1e-6 for busy_s in timeline.engines_busy_s)


def test_arrangements_of_runs_that_train_adapters() -> None:
    cluster = {"machines": [{"kind": "l40s", "devices_per_node": 4}]}
    found = arrangements(scenario(cluster=cluster, steps=3, learner={"adapters": True}), [4])[4]
    assert "for engines shared by adapters" in found[-1].name
    assert 0 < found[-1].used <= 1
    assert found[-1].makespan_s < found[0].makespan_s, "many small runs"
    without = arrangements(scenario(cluster=cluster, steps=3), [4])[4]
    assert not any("adapters" in each.name for each in without)
