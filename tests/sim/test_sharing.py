"""Runs in turns of whole phases: by hand, and what holds for all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.tiny_scenario import scenario
from rlhfless.records import Invocation, Work
from rlhfless.sim.experiment.shared import ONE_BY_ONE, PhaseWork, _spent_s, arrangements, share
from rlhfless.spec.errors import InputError


def phase(function: str, work_s: float, *groups: str, **changes: float) -> PhaseWork:
    return PhaseWork(function, frozenset(groups), work_s, **changes)


def test_one_run_alone_changes_functions_and_nothing_else() -> None:
    """2 s of generation, 0.5 s of scoring, the actor asleep in 0.1 s, the learner awake in 0.3 s, and 3 s of its work;
    then back: 0.4 s and 0.2 s."""
    drawn = phase("generation", 2.0, "gpu", sleep_s=0.1, wake_s=0.2)
    learned = phase("learner", 3.0, "gpu", before_s=0.5, sleep_s=0.4, wake_s=0.3)
    timeline = share([[drawn, learned, drawn]])
    assert timeline.makespan_s == pytest.approx(0.2 + 2.0 + 0.5 + 0.1 + 0.3 + 3.0 + 0.4 + 0.2 + 2.0)
    assert timeline.busy_s == {"gpu": 7.0}


def test_two_runs_with_a_device_for_each_function_take_turns() -> None:
    """While one learns for 3 s the other one draws for 2 s; each change of run costs 0.1 s of sleep and 0.2 s of wake.
    A: actors 0.2 to 2.2, learner 2.4 to 5.4. B waits for the actors until A's are asleep: 2.3, draws 2.5 to 4.5, and
    waits for the learner until 5.5: 5.7 to 8.7."""
    costs = {"sleep_s": 0.1, "wake_s": 0.2}
    step = [phase("generation", 2.0, "actors", **costs), phase("learner", 3.0, "learner", **costs)]
    timeline = share([step, step])
    assert timeline.ends_s == pytest.approx((5.4, 8.7))


def test_a_run_keeps_its_turn_while_no_other_waits() -> None:
    drawn = phase("generation", 1.0, "gpu", sleep_s=0.5, wake_s=0.5)
    assert share([[drawn, drawn, drawn]]).makespan_s == pytest.approx(0.5 + 3.0)
    late = phase("generation", 1.0, "gpu", before_s=2.0, sleep_s=0.5, wake_s=0.5)
    # The second run asks at 2 s: the first one has drawn its second response by 2.5 s, and sleeps at 3.0 s.
    assert share([[drawn, drawn], [late]]).ends_s == pytest.approx((2.5, 4.5))


def phases(*where: tuple[str, ...]) -> st.SearchStrategy[list[PhaseWork]]:
    one = st.builds(
        lambda function, groups, work_s, before_s, cost_s: phase(
            function, work_s, *groups, before_s=before_s, sleep_s=cost_s, wake_s=cost_s
        ),
        st.sampled_from(["generation", "learner"]),
        st.sampled_from(where),
        st.floats(0.1, 5.0),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([0.0, 0.3]),
    )
    return st.lists(one, min_size=1, max_size=6)


@given(st.lists(phases(("a",), ("b",)) | phases(("a", "b")), min_size=1, max_size=5))
@settings(max_examples=200)
def test_no_group_works_twice_and_no_run_is_lost(runs: list[list[PhaseWork]]) -> None:
    timeline = share(runs)
    asked = {group: sum(p.work_s for run in runs for p in run if group in p.groups) for group in ("a", "b")}
    for group, work_s in asked.items():
        assert timeline.busy_s.get(group, 0.0) == pytest.approx(work_s)
        assert timeline.makespan_s >= work_s - 1e-9
    for run, end_s in zip(runs, timeline.ends_s, strict=True):
        assert end_s >= sum(p.before_s + p.work_s for p in run) - 1e-9
    one_by_one_s = sum(share([run]).makespan_s for run in runs)
    changes_s = sum(2 * p.sleep_s + 2 * p.wake_s for run in runs for p in run)
    assert timeline.makespan_s <= one_by_one_s + changes_s + 1e-6  # each change of run costs at most this


def test_groups_that_overlap_within_a_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one phase needs \['a'\], and another \['a', 'b'\]; give both the same"):
        share([[phase("generation", 1.0, "a"), phase("learner", 1.0, "a", "b")]])


def test_arrangements_of_a_scenario() -> None:
    one = scenario(cluster={"machines": [{"kind": "l40s", "devices_per_node": 4}]}, steps=3)
    found = arrangements(one, [2])[2]
    assert [each.name for each in found] == [
        ONE_BY_ONE,
        "all devices, in turns",
        "2 parts of 2 devices",
        "2 devices for actors, 2 for learners, in turns",
    ]
    assert all(0 < each.used <= 1 + 1e-9 for each in found)
    assert all(each.mean_end_s <= each.makespan_s for each in found)
    assert {each.kept for each in found} == {None}
    # Alone a run takes about half of the makespan of two; a run that waits for the other does not keep this deadline.
    limit_s = found[0].makespan_s / 2 * 1.2
    deadline = {"type": "cheapest", "deadline_s": limit_s, "per": "run"}
    limited = arrangements(scenario(cluster=one.cluster.model_dump(mode="json"), steps=3, contract=deadline), [2])[2]
    assert limited[0].kept == 1.0
    for each in limited[1:]:
        ends_s = each.makespan_s, 2 * each.mean_end_s - each.makespan_s
        assert each.kept == sum(end_s <= limit_s for end_s in ends_s) / 2
    mixed = {"machines": [{"kind": kind, "devices_per_node": 4} for kind in ("l40s", "h100")]}
    with pytest.raises(InputError, match="runs share devices of one kind, and there are l40s, h100"):
        arrangements(scenario(cluster=mixed), [2])


def test_a_step_whose_actors_all_start_in_it_loads_no_weights_in_a_call() -> None:
    def call(work: Work, start_s: float, end_s: float) -> Invocation:
        return Invocation("f", "r", "i", work, 8, start_s, end_s)

    record = SimpleNamespace(start_s=100.0, metrics={"generation_s": 30.0})
    calls = [call(Work.GENERATE, 110.0, 130.0), call(Work.SCORE, 128.0, 133.0), call(Work.LEARN, 133.0, 140.0)]
    assert _spent_s(calls, record) == (20.0, 3.0, 7.0)
    loading = [call(Work.LOAD_WEIGHTS, 104.0, 110.0), *calls]
    assert _spent_s(loading, record) == (26.0, 3.0, 7.0)
