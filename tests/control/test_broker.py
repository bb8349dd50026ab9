"""Which run may hold how many devices: by hand, and over many rounds of random runs."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.control.broker import DevicesRequest, decide, wanted_devices
from rlhfless.scaling.sizes import SpeedCurve
from rlhfless.scaling.sizing import Team
from rlhfless.scaling.turn_scheduler import AGING_S

KIND = "h100"


def asking(
    name: str,
    minimum: int,
    maximum: int | None = None,
    *,
    granted: int = 0,
    held: int | None = None,
    priority: int = 0,
    at: float = 0.0,
    owner: str = "a",
    unit: int = 1,
) -> DevicesRequest:
    most = minimum if maximum is None else maximum
    held = granted if held is None else held
    return DevicesRequest(owner, priority, name, KIND, minimum, most, unit, granted, held, at)


def test_first_come_first_served() -> None:
    decisions = decide([asking("late", 1, at=1), asking("early", 2)], {KIND: 2}, 10.0)
    assert decisions.granted == {"early": 2}
    assert decisions.reasons == {"late": "waiting for 1 x h100 for 9 s; 0 of 2 free"}


def test_a_small_run_does_not_overtake_for_ever() -> None:
    requests = [asking("holds", 2, granted=2), asking("large", 4, at=1), asking("small", 1, at=2)]
    assert decide(requests, {KIND: 4}, 10.0).granted == {}


def test_one_that_can_never_be_served_blocks_no_other() -> None:
    decisions = decide([asking("huge", 16), asking("small", 1, at=1)], {KIND: 8}, 10.0)
    assert decisions.granted == {"small": 1}
    assert "there are 8 in all" in decisions.reasons["huge"]


def test_priority_and_age() -> None:
    urgent, old = asking("urgent", 2, priority=1, at=AGING_S), asking("old", 2, at=0.0)
    assert decide([urgent, old], {KIND: 2}, AGING_S + 1).granted == {"old": 2}, (
        "it has waited longer, at the same level"
    )
    assert decide([urgent, old], {KIND: 2}, AGING_S - 1).granted == {"urgent": 2}


def test_the_owner_with_less_comes_first() -> None:
    requests = [asking("a1", 2, granted=2), asking("a2", 2, at=1), asking("b1", 2, at=2, owner="b")]
    assert decide(requests, {KIND: 4}, 10.0).granted == {"b1": 2}


def test_what_nothing_waits_for_is_shared_out_in_units() -> None:
    decisions = decide([asking("x", 2, 10, unit=2), asking("y", 2, 4, unit=2, at=1)], {KIND: 11}, 1.0)
    assert decisions.granted == {"x": 6, "y": 4}


def test_elastic_runs_give_back_first_and_it_is_given_when_it_is_free() -> None:
    elastic, waits = asking("elastic", 2, 8, granted=8), asking("waits", 4, at=1)
    asked_back = decide([elastic, waits], {KIND: 8}, 10.0)
    assert asked_back.granted == {"elastic": 4}
    assert not asked_back.yields
    still_held = dataclasses.replace(elastic, granted=4, held=8)
    assert decide([still_held, waits], {KIND: 8}, 11.0).granted == {}
    given_back = dataclasses.replace(elastic, granted=4, held=4)
    assert decide([given_back, waits], {KIND: 8}, 12.0).granted == {"waits": 4}


def test_a_run_of_lower_priority_gives_way_only_if_that_helps() -> None:
    low, high = asking("low", 2, granted=2), asking("high", 2, priority=1, at=1)
    assert decide([low, high], {KIND: 2}, 10.0).yields == ("low",)
    equal = dataclasses.replace(high, priority=0)
    assert decide([low, equal], {KIND: 2}, 10.0).yields == ()
    fixed = asking("fixed", 2, granted=2, priority=2)
    too_much = asking("much", 4, priority=1, at=1)
    assert decide([low, fixed, too_much], {KIND: 4}, 10.0).yields == ()


def test_a_run_that_came_alone_shares_later() -> None:
    first, second = asking("first", 1, 8, granted=7), asking("second", 1, 8, granted=1, at=1)
    assert decide([first, second], {KIND: 8}, 1.0).granted == {"first": 4}
    back = dataclasses.replace(first, granted=4, held=4)
    decisions = decide([back, second], {KIND: 8}, 1.0)
    assert decisions.granted == {"second": 4}
    assert decisions.changes == {"second": "1 -> 4 devices: they gain most here"}
    assert decide([back, dataclasses.replace(second, granted=4, held=4)], {KIND: 8}, 1.0).granted == {}


def elastic(name: str, granted: int = 0, *, sizes: tuple[int, ...] = (1, 2, 4, 8), at: float = 0.0) -> DevicesRequest:
    curve = SpeedCurve({size: 80.0 / size**0.5 for size in sizes})
    request = asking(name, sizes[0], sizes[-1], granted=granted, at=at)
    return dataclasses.replace(request, sizes=sizes, curve=curve, steps_left=100.0, change_s=60.0)


def test_an_elastic_run_shrinks_for_one_that_comes_and_grows_when_it_ends() -> None:
    """At the power 0.5, two runs of four devices do 1.41 times the work of one of eight."""
    alone = decide([elastic("a")], {KIND: 8}, 0.0)
    assert alone.granted == {"a": 8}
    comes = decide([elastic("a", 8), elastic("b", at=1)], {KIND: 8}, 2.0)
    assert comes.granted == {"a": 4}, "b starts when they are free"
    assert comes.changes == {"a": "8 -> 4 devices: b can start, 28.3 -> 40 s a step"}
    waits = decide([dataclasses.replace(elastic("a", 4), held=8), elastic("b", at=1)], {KIND: 8}, 3.0)
    assert waits.granted == {}
    starts = decide([elastic("a", 4), elastic("b", at=1)], {KIND: 8}, 4.0)
    assert starts.granted == {"b": 4}
    assert decide([elastic("a", 4), elastic("b", 4, at=1)], {KIND: 8}, 5.0).granted == {}
    assert decide([elastic("a", 4)], {KIND: 8}, 6.0).granted == {"a": 8}


def test_a_run_waits_at_its_min_until_another_ends() -> None:
    full = [elastic("a", 4, sizes=(4, 8)), elastic("b", 4, sizes=(4, 8), at=1)]
    decisions = decide([*full, elastic("c", sizes=(2, 4), at=2)], {KIND: 8}, 10.0)
    assert decisions.granted == {}
    assert decisions.reasons == {"c": "waiting for 2 x h100 for 8 s; 0 of 8 free"}


def test_lost_devices_shrink_runs_and_the_last_yields_where_minimums_do_not_fit() -> None:
    runs = [elastic("a", 4), elastic("b", 4, at=1)]
    shrunk = decide(runs, {KIND: 4}, 10.0)
    assert sum(shrunk.granted.values()) == 4
    assert not shrunk.yields
    large = [elastic("a", 4, sizes=(4, 8)), elastic("b", 4, sizes=(4, 8), at=1)]
    assert decide(large, {KIND: 4}, 10.0).yields == ("b",)


def test_where_nodes_can_be_added_an_elastic_run_has_those_that_are_there() -> None:
    """Four of at most eight are there: it has these, and eight are requested. A node that leaves shrinks it."""
    capacity = {KIND: 8}
    assert decide([elastic("a")], {KIND: 4}, 0.0, most=capacity).granted == {"a": 4}
    assert wanted_devices([elastic("a", 4)], capacity, {}, 0.0) == {KIND: 8}
    assert decide([elastic("a", 8)], {KIND: 4}, 0.0, {KIND: (4,)}, most=capacity).granted == {"a": 4}
    assert decide([elastic("a", 8)], {KIND: 0}, 0.0, most=capacity).granted == {"a": 1}, "its min, to be replaced"
    unplanned = dataclasses.replace(elastic("a", 4), curve=SpeedCurve({}))
    assert wanted_devices([unplanned], capacity, {}, 0.0) == {KIND: 4}
    assert wanted_devices([], capacity, {}, 0.0) == {}


def test_where_nodes_can_be_added_a_run_of_one_size_keeps_its_devices() -> None:
    """Alone it is granted what is yet to come. Beside an elastic run it waits until that is there, and once it works,
    a lost node does not end it."""
    capacity, fixed = {KIND: 12}, asking("fixed", 6, at=1)
    assert decide([fixed], {KIND: 0}, 2.0, most=capacity).granted == {"fixed": 6}
    assert wanted_devices([fixed], capacity, {}, 2.0) == {}
    both = [elastic("a", 4, sizes=(2, 4)), fixed]
    waits = decide(both, {KIND: 4}, 2.0, most=capacity)
    assert waits.granted == {}
    assert waits.reasons == {
        "fixed": "waiting for 6 x h100 for 1 s; 4 of 12 are there, and the autoscaler is asked for more"
    }
    assert wanted_devices(both, capacity, {}, 2.0) == {KIND: 10}
    lost = decide([elastic("a", 4, sizes=(2, 4)), asking("fixed", 6, granted=6, at=1)], {KIND: 6}, 2.0, most=capacity)
    assert (lost.granted, lost.yields) == ({"a": 2}, ())


def test_no_run_overtakes_one_whose_nodes_are_yet_to_come() -> None:
    runs = [elastic("works", 2, sizes=(2,)), asking("large", 8, at=1), asking("small", 1, at=2)]
    assert decide(runs, {KIND: 4}, 3.0, most={KIND: 10}).granted == {}
    assert decide(runs, {KIND: 4}, 3.0).granted == {"small": 1}, "where no node comes, it can"


def test_the_devices_of_a_node_stay_together() -> None:
    runs = [elastic("a", 4), elastic("b", 4, at=1), elastic("c", at=2)]
    assert decide(runs, {KIND: 16}, 10.0, {KIND: (8, 8)}).granted["c"] in (4, 8)
    three = [elastic(name, sizes=(3, 5)) for name in "abc"]
    granted = decide(three, {KIND: 16}, 10.0, {KIND: (8, 8)}).granted
    assert sorted(granted.values()) == [3, 5, 5], "three of 5 do not fit on two nodes"


def test_quotas_of_owners() -> None:
    runs = [elastic("a"), elastic("b", at=1)]
    assert decide(runs, {KIND: 8}, 10.0, None, {"a": Team(max_devices=4)}).granted == {"a": 2, "b": 2}


def test_a_run_that_waits_for_its_quota_holds_up_no_other_key() -> None:
    """`a` may have 4 devices and has them. Its second run, of the highest priority, neither blocks `b`'s, which came
    later, nor makes `b`'s first run yield."""
    quotas = {"a": Team(max_devices=4)}
    first, others = elastic("a1", 4, sizes=(4,)), elastic("b1", 2, sizes=(2,), at=1)
    runs = [dataclasses.replace(first, owner="a"), dataclasses.replace(others, owner="b")]
    waits = dataclasses.replace(elastic("a2", sizes=(2,), at=2), owner="a", priority=5)
    late = dataclasses.replace(elastic("b2", sizes=(2,), at=3), owner="b")
    decisions = decide([*runs, waits, late], {KIND: 8}, 10.0, None, quotas)
    assert (decisions.granted, decisions.yields) == ({"b2": 2}, ())
    assert decisions.reasons == {"a2": "waiting for 2 x h100: its API key may have 4 (--quota), and has 4"}
    full = [*runs, dataclasses.replace(late, granted=2, held=2), waits]
    assert decide(full, {KIND: 8}, 10.0, None, quotas).yields == ()
    assert decide(full, {KIND: 8}, 10.0).yields == ("b2",), "without a quota"


def test_kinds_do_not_mix() -> None:
    other = dataclasses.replace(asking("other", 4), kind="a100")
    assert decide([other, asking("mine", 2)], {KIND: 2, "a100": 0}, 0.0).granted == {"mine": 2}


class World:
    """Runs that come, work for some rounds and go, with what they hold lagging behind what they were promised."""

    def __init__(self, seed: int, devices: int) -> None:
        self.random = random.Random(seed)
        self.devices = devices
        self.runs: dict[str, DevicesRequest] = {}
        self.left: dict[str, int] = {}
        self.done: set[str] = set()
        self.now_s = 0.0

    def come(self, number: int) -> None:
        minimum = self.random.randint(1, self.devices)
        unit = self.random.choice([1, 1, 2])
        extra = unit * self.random.randint(0, 3)
        name = f"run-{number}"
        self.runs[name] = asking(
            name,
            minimum,
            minimum + extra,
            unit=unit,
            priority=self.random.choice([-1, 0, 0, 1]),
            at=self.now_s,
            owner=self.random.choice("ab"),
        )
        self.left[name] = self.random.randint(1, 6)

    def round(self) -> None:
        self.now_s += 30.0
        decisions = decide(self.runs.values(), {KIND: self.devices}, self.now_s)
        for name, granted in decisions.granted.items():
            before = self.runs[name]
            assert granted == 0 or before.minimum <= granted <= before.maximum
            assert (granted - before.minimum) % before.unit == 0
            self.runs[name] = dataclasses.replace(before, granted=granted)
        for name in decisions.yields:
            self.runs[name] = dataclasses.replace(self.runs[name], granted=0, held=0)
        taken = sum(run.taken for run in self.runs.values())
        assert taken <= self.devices, "promised or held twice"
        for name, run in list(self.runs.items()):
            if run.granted and self.random.random() < 0.7:  # its step has ended
                self.runs[name] = dataclasses.replace(run, held=run.granted)
                self.left[name] -= 1
                if self.left[name] <= 0:
                    self.done.add(name)
                    del self.runs[name]


@given(seed=st.integers(0, 10**6), devices=st.integers(1, 12), count=st.integers(1, 12))
def test_nothing_is_promised_twice_and_nothing_starves(seed: int, devices: int, count: int) -> None:
    world = World(seed, devices)
    for number in range(count):
        world.come(number)
        world.round()
    for _ in range(60 * count):
        if not world.runs:
            break
        world.round()
    assert len(world.done) == count, f"still waiting: {world.runs}"


@pytest.mark.parametrize("rounds", [2_000])
def test_a_low_priority_is_served_in_a_stream_of_high_ones(rounds: int) -> None:
    world = World(3, 2)
    world.runs["low"] = asking("low", 2, priority=-1)
    world.left["low"] = 1
    for number in range(rounds):
        if sum(1 for name in world.runs if name != "low") < 3:
            world.runs[f"high-{number}"] = asking(f"high-{number}", 2, priority=1, at=world.now_s, owner="b")
            world.left[f"high-{number}"] = 2
        world.round()
        if "low" in world.done:
            return
    raise AssertionError("it starves")


def sharing(name: str, minimum: int, *, granted: int = 0, tenants: int = 2, at: float = 0.0) -> DevicesRequest:
    return dataclasses.replace(asking(name, minimum, granted=granted, at=at), tenants=tenants)


def test_runs_that_share_are_put_on_the_same_devices() -> None:
    decisions = decide([sharing("first", 2), sharing("second", 2, at=1), sharing("third", 2, at=2)], {KIND: 2}, 10.0)
    assert decisions.granted == {"first": 2, "second": 2}, "two runs on a device at most"
    assert set(decisions.reasons) == {"third"}


def test_runs_that_share_count_for_the_quota_of_their_owner() -> None:
    """`a` may have 4 devices: its third run waits, and blocks nothing of `b`."""
    runs = [sharing("a1", 2, granted=2), sharing("a2", 2, granted=2, at=1), sharing("a3", 2, at=2)]
    theirs = dataclasses.replace(sharing("b1", 2, at=3), owner="b")
    decisions = decide([*runs, theirs], {KIND: 8}, 4.0, None, {"a": Team(max_devices=4)})
    assert decisions.granted == {"b1": 2}
    assert decisions.reasons == {"a3": "waiting for 2 x h100: its API key may have 4 (--quota), and has 4"}
    growing = asking("a4", 2, 6, granted=2, owner="b")
    decisions = decide([sharing("s", 2, granted=2), growing], {KIND: 8}, 4.0, None, {"b": Team(max_devices=3)})
    assert decisions.granted == {"a4": 3}


def test_the_run_that_allows_the_fewest_decides() -> None:
    requests = [sharing("first", 2, granted=2, tenants=8), sharing("second", 2, tenants=1, at=1)]
    assert decide(requests, {KIND: 2}, 10.0).granted == {}, "it does not share at all"
    requests = [sharing("first", 2, granted=2, tenants=8), sharing("second", 2, granted=2, tenants=2, at=1)]
    assert decide([*requests, sharing("third", 2, tenants=8, at=2)], {KIND: 2}, 10.0).granted == {}


def test_a_run_that_shares_nothing_gets_what_the_others_cannot_use() -> None:
    shared = [sharing("first", 2, granted=2), sharing("second", 2, granted=2)]
    assert decide([*shared, asking("alone", 2, at=1)], {KIND: 4}, 10.0).granted == {}, "they may be on four devices"
    assert decide([*shared, asking("alone", 2, at=1)], {KIND: 6}, 10.0).granted == {"alone": 2}
    assert decide([asking("alone", 2, granted=2), *shared], {KIND: 4}, 10.0).granted == {}
    alone = asking("alone", 2, granted=2)
    assert decide([alone, sharing("first", 2), sharing("second", 2, at=1)], {KIND: 4}, 10.0).granted == {
        "first": 2,
        "second": 2,
    }


def test_devices_that_nothing_waits_for_are_not_shared() -> None:
    growing = [dataclasses.replace(sharing(name, 2, granted=2), maximum=4) for name in ("first", "second")]
    assert decide(growing, {KIND: 4}, 10.0).granted == {}
    assert decide(growing, {KIND: 5}, 10.0).granted == {"first": 3}
