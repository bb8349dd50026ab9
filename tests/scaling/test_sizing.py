"""How many devices each run of a cluster has: cases worked by hand, and what holds for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.sizes import SpeedCurve, sizes_up_to
from rlhfless.scaling.sizing import Division, SizedRun, Team, divide, packs, weights


def run(
    name: str,
    least: int = 1,
    most: int = 8,
    *,
    step_s: float = 80.0,
    exponent: float = 0.75,
    steps: float = 100,
    size: int = 0,
    change_s: float = 60.0,
    needed: int = 0,
    priority: float = 0.0,
    team: str = "",
) -> SizedRun:
    """A run of `step_s` on one device, whose speed grows with a power of its devices."""
    sizes = tuple(each for each in sizes_up_to(most, 8) if each >= least)
    curve = SpeedCurve({each: step_s / each**exponent for each in sizes})
    return SizedRun(name, sizes, curve, steps, size, change_s, needed, priority, team)


def sizes(runs: Sequence[SizedRun], devices: int = 8, **teams: Team) -> dict[str, int]:
    return dict(divide(runs, [devices], teams).sizes)


def applied(runs: Sequence[SizedRun], division: Division) -> list[SizedRun]:
    return [dataclasses.replace(each, size=division.sizes[each.run_id]) for each in runs]


def test_a_run_alone_has_all_that_it_can_use() -> None:
    assert sizes([run("a")]) == {"a": 8}
    assert sizes([run("a", most=4)]) == {"a": 4}


def test_one_that_comes_gets_its_part_and_the_other_shrinks() -> None:
    """Exponent 0.75 gives q = 1 / (1 - 0.1875) = 1.231. The work left is the same, so the weights are 1 and, for the
    first in order, (2^1.231 - 1)^(1/1.231) = 1.265. Sizes 6 and 2 do 0.806 of the work of 8 devices with weight 1.265,
    and 0.354: 1.373; 4 and 4 do 0.595 x 2.265 = 1.347; 8 and 0 do 1.265."""
    division = divide([run("a", size=8), run("b")], [8])
    assert division.sizes == {"a": 6, "b": 2}
    assert division.reasons == {
        "a": "8 -> 6 devices: b can start, 16.8 -> 20.9 s a step",
        "b": "starts on 2 device(s), 47.6 s a step",
    }


def test_the_only_one_that_waits_waits_on_where_starting_it_would_do_less() -> None:
    """Speed grows with the power 0.95 of the devices. With q = 1 / (1 - 0.2375) = 1.311 and 1,000 s against 7,600 s of
    work left, weights are (2^1.311 - 1)^(1/1.311) = 1.348 and 1. Sizes 7 and 1 would do 0.881 x 1.348 + 0.139 = 1.326;
    8 and 0 do 1.348."""
    linear = [run("a", exponent=0.95, steps=90, size=8), run("b", exponent=0.95, steps=500)]
    assert sizes(linear) == {"a": 8, "b": 0}
    assert min(sizes([*linear, run("c", exponent=0.95)]).values()) >= 1, "more wait: all start"
    assert sizes([run("a", steps=90, size=8), run("b", steps=500)])["b"] >= 1, "two do 12 % more there"


def test_a_short_run_gets_more_than_a_long_one() -> None:
    long, short = run("long", steps=1000, size=4, change_s=5), run("short", steps=100, size=4, change_s=5)
    assert sizes([long, short]) == {"long": 2, "short": 6}
    slow = [dataclasses.replace(each, change_s=60.0) for each in (long, short)]
    assert sizes(slow) == {"long": 4, "short": 4}, "2 % of 2,828 s are less than a change of both"


def test_a_run_that_waits_starts_as_soon_as_mins_fit_and_nothing_overtakes_it() -> None:
    full = [run("a", 4, size=4), run("b", 4, size=4)]
    assert sizes([*full, run("c", 4), run("d", 1)]) == {"a": 4, "b": 4, "c": 0, "d": 0}
    assert sizes([run("a", 4, size=8), run("c", 4), run("d", 1)]) == {"a": 4, "c": 4, "d": 0}
    assert sizes([run("a", 4, size=4), run("huge", 16, 16), run("d", 1, 1)])["d"] == 1, "it can never start"


def test_nothing_changes_for_less_than_it_costs() -> None:
    """Four devices are free. Growing from 4 to 8 devices, 28.3 -> 16.8 s a step, saves 1,140 s of 100 steps."""
    assert sizes([run("a", size=4)]) == {"a": 8}
    assert sizes([run("a", size=4, change_s=1200.0)]) == {"a": 4}
    nearly_done = run("a", size=4, steps=2)
    assert sizes([nearly_done]) == {"a": 4}, "57 s are left, and a change costs 60 s"


def test_a_run_that_is_as_fast_on_fewer_devices_keeps_those_that_no_other_run_wants() -> None:
    assert sizes([run("a", exponent=0.0)]) == {"a": 1}, "it starts with the fewest"
    assert sizes([run("a", exponent=0.0, size=8)]) == {"a": 8}, "a change would cost 60 s"
    assert sizes([run("a", exponent=0.0, size=8), run("b", 4)]) == {"a": 1, "b": 6}


def test_a_run_does_not_shrink_for_one_that_can_start_sooner_without() -> None:
    ends = run("ends", 1, 1, steps=0.5, size=1)
    assert ends.left_s(1) == 40.0
    assert sizes([ends, run("a", 1, size=7 - 1), run("c", 2)]) == {"ends": 1, "a": 6, "c": 0}
    later = dataclasses.replace(ends, steps_left=5)
    assert sizes([later, run("a", 1, size=6), run("c", 2)])["c"] >= 2


def test_a_deadline_comes_before_gains() -> None:
    late = run("late", needed=6, steps=1000, size=1)
    assert sizes([late, run("a", size=7, steps=10)])["late"] >= 6


def test_priority_weighs() -> None:
    low, high = run("low", size=4), run("high", size=4, priority=3)
    found = sizes([low, high])
    assert found["high"] > found["low"] >= 1


def test_teams_get_their_shares_and_borrow_what_is_left() -> None:
    mine, theirs = run("mine", size=8, team="x"), run("theirs", team="y")
    assert sizes([mine], x=Team(1), y=Team(1)) == {"mine": 8}, "nobody else needs it"
    assert sizes([mine, theirs], x=Team(3), y=Team(1)) == {"mine": 6, "theirs": 2}
    assert sizes([mine, dataclasses.replace(theirs, sizes=(1,))], x=Team(1), y=Team(1)) == {"mine": 6, "theirs": 1}
    assert sizes([dataclasses.replace(mine, size=2)], x=Team(1, max_devices=3)) == {"mine": 3}
    assert sizes([dataclasses.replace(mine, size=2), run("more", 2, team="x")], x=Team(1, max_devices=3)) == {
        "mine": 1,
        "more": 2,
    }


def test_the_devices_of_a_node_stay_together() -> None:
    assert packs([5, 3, 8], [8, 8])
    assert packs([16], [8, 8])
    assert not packs([5, 5, 5], [8, 8])
    assert packs([16, 4, 4], [8, 8, 8])
    assert not packs([16, 4, 5], [8, 8, 8])
    assert packs([12, 4], [8, 8]), "12 are on a node and a part of one more"
    assert not packs([12, 5], [8, 8])
    assert packs([0, 3], [4])
    found = divide([run("a", 3, 16, size=3), run("b", 3, 16), run("c", 3, 16)], [8, 8]).sizes
    assert packs(found.values(), [8, 8])
    assert min(found.values()) >= 3


def test_runs_of_unknown_speed_share_evenly() -> None:
    unknown = [SizedRun(name, tuple(range(1, 9)), SpeedCurve({}), 100, size) for name, size in (("a", 7), ("b", 1))]
    assert divide(unknown, [8]).sizes == {"a": 4, "b": 4}


RUNS = st.lists(
    st.builds(
        lambda least, factor, exponent, steps, size, change_s, step_s, priority: {
            "least": least,
            "most": least * factor,
            "exponent": exponent,
            "steps": steps,
            "size": size,
            "change_s": change_s,
            "step_s": step_s,
            "priority": priority,
        },
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2, 4]),
        st.floats(0.1, 1.0),
        st.integers(1, 200),
        st.integers(0, 5),
        st.sampled_from([0.0, 5.0, 60.0]),
        st.floats(1.0, 500.0),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=6,
)


def cluster(drawn: Sequence[dict[str, float]], devices: int) -> list[SizedRun]:
    """Return runs whose present sizes fit on the devices; those that do not fit wait."""
    runs, left = [], devices
    for number, each in enumerate(drawn):
        made = run(f"run-{number}", **{**each, "size": 0})  # type: ignore[arg-type]
        size = made.sizes[min(int(each["size"]) - 1, len(made.sizes) - 1)] if each["size"] else 0
        size = size if size <= left else 0
        left -= size
        runs.append(dataclasses.replace(made, size=size))
    return runs


@given(drawn=RUNS, devices=st.integers(1, 24))
def test_what_holds_for_every_division(drawn: list[dict[str, float]], devices: int) -> None:
    runs = cluster(drawn, devices)
    division = divide(runs, [devices])
    assert sum(division.sizes.values()) <= devices
    for each in runs:
        size = division.sizes[each.run_id]
        assert size in (0, *each.sizes), "no other size"
        assert size or not each.size, "no run that works loses its min"
    starts = [bool(division.sizes[each.run_id]) for each in runs if not each.size and each.sizes[0] <= devices]
    assert starts == sorted(starts, reverse=True), "none overtakes"
    again = divide(applied(runs, division), [devices])
    assert again.sizes == division.sizes, "nothing changes twice"
    assert not again.reasons


@given(drawn=RUNS, devices=st.integers(1, 16), more=st.integers(1, 8))
def test_more_devices_do_more_work(drawn: list[dict[str, float]], devices: int, more: int) -> None:
    """Of runs that work, change for free, and may have any size: weighted, as no run is worth the same to all."""
    runs = [
        dataclasses.replace(each, sizes=tuple(range(1, 9)), size=1, change_s=0.0) for each in cluster(drawn, devices)
    ][:devices]
    weighs = weights(runs)

    def work(count: int) -> float:
        found = divide(runs, [count]).sizes
        return math.fsum(weighs[each.run_id] * each.speed(found[each.run_id]) for each in runs)

    assert work(devices + more) >= work(devices) - 1e-9


@pytest.mark.parametrize("change_s", [0.0, 60.0])
def test_sizes_do_not_flap_while_runs_work(change_s: float) -> None:
    """Three runs of equal speed, watched at every step until the first has ended: after the first division, no size
    changes, although the weights follow the work left."""
    runs = [run(name, steps=steps, change_s=change_s) for name, steps in (("a", 100), ("b", 110), ("c", 120))]
    runs = applied(runs, divide(runs, [8]))
    first = {each.run_id: each.size for each in runs}
    while len(runs) == 3:
        runs = [dataclasses.replace(each, steps_left=each.steps_left - 100 / each.curve.at(each.size)) for each in runs]
        runs = [each for each in runs if each.steps_left > 0]
        if len(runs) == 3:
            assert dict(divide(runs, [8]).sizes) == first
