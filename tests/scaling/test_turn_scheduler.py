"""Whose turn it is on devices that runs share: by hand, and over many random orders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.turn_scheduler import AGING_S, TurnScheduler


def test_a_turn_passes_to_the_run_that_asked_first() -> None:
    turns = TurnScheduler()
    assert turns.ask("a", ["0"], 0, 1.0)
    assert not turns.ask("b", ["0"], 0, 2.0)
    assert not turns.ask("c", ["0"], 0, 3.0)
    assert turns.wanted("a", ["0"])
    turns.pass_on("a", ["0"], 4.0)
    assert turns.owners(["0"]) == ["b"]
    assert turns.ask("b", ["0"], 0, 5.0)
    turns.pass_on("b", ["0"], 6.0)
    assert turns.ask("c", ["0"], 0, 7.0)
    assert not turns.wanted("c", ["0"])


def test_a_run_that_asks_again_keeps_its_place() -> None:
    turns = TurnScheduler()
    assert turns.ask("a", ["0"], 0, 0.0)
    assert not turns.ask("b", ["0"], 0, 1.0)
    assert not turns.ask("c", ["0"], 0, 2.0)
    assert not turns.ask("b", ["0"], 0, 3.0)
    turns.pass_on("a", ["0"], 4.0)
    assert turns.owners(["0"]) == ["b"]


def test_groups_come_together_and_are_kept_from_those_behind() -> None:
    turns = TurnScheduler()
    assert turns.ask("a", ["0"], 0, 0.0)
    assert not turns.ask("b", ["0", "1"], 0, 1.0)
    assert not turns.ask("c", ["1"], 0, 2.0), "b waits for it since before"
    turns.pass_on("a", ["0"], 3.0)
    assert turns.owners(["0", "1"]) == ["b"]


def test_priority_goes_first_and_grows_with_the_wait() -> None:
    turns = TurnScheduler()
    assert turns.ask("a", ["0"], 0, 0.0)
    assert not turns.ask("low", ["0"], 0, 1.0)
    assert not turns.ask("high", ["0"], 1, 2.0)
    turns.pass_on("a", ["0"], 3.0)
    assert turns.owners(["0"]) == ["high"]
    assert not turns.ask("newer", ["0"], 1, 2.5 + AGING_S)
    turns.pass_on("high", ["0"], 2.5 + AGING_S)
    assert turns.owners(["0"]) == ["low"], "it has waited for one level longer"


def test_of_equal_priority_the_step_that_is_due_first_goes_first() -> None:
    turns = TurnScheduler()
    assert turns.ask("a", ["0"], 0, 0.0)
    assert not turns.ask("no deadline", ["0"], 0, 1.0)
    assert not turns.ask("later", ["0"], 0, 2.0, due_s=100.0)
    assert not turns.ask("sooner", ["0"], 0, 3.0, due_s=50.0)
    order = []
    for owner in ("a", "sooner", "later"):
        turns.pass_on(owner, ["0"], 4.0)
        order += turns.owners(["0"])
    assert order == ["sooner", "later", "no deadline"]


def test_a_run_that_has_gone_leaves_nothing() -> None:
    turns = TurnScheduler()
    assert turns.ask("a", ["0"], 0, 0.0)
    assert not turns.ask("b", ["0"], 0, 1.0)
    assert not turns.ask("c", ["0"], 0, 2.0)
    turns.leave("b", 3.0)
    turns.leave("a", 4.0)
    assert turns.owners(["0"]) == ["c"]


RUNS, SEATS = st.sampled_from("abcd"), st.sets(st.sampled_from("0123"), min_size=1)


@given(st.lists(st.tuples(RUNS, SEATS, st.booleans()), max_size=60))
def test_each_group_has_one_owner_and_everyone_comes_to_it(events: list[tuple[str, set[str], bool]]) -> None:
    """A run asks for all groups of a phase while it owns none, as the fleet does."""
    turns, owned, waiting = TurnScheduler(), dict[str, set[str]](), dict[str, set[str]]()
    for now_s, (run, groups, asks) in enumerate(events):
        if asks and run not in waiting and run not in owned:
            waiting[run] = groups
        elif not asks:
            turns.pass_on(run, "0123", now_s)
            waiting.pop(run, None)
            owned.pop(run, None)
        for other, wanted in list(waiting.items()):
            if turns.ask(other, wanted, 0, now_s):
                owned[other] = waiting.pop(other)
        owners = [turns.owners([group]) for group in "0123"]
        assert all(len(each) <= 1 for each in owners)
    for now_s in range(len(events), len(events) + 8):  # whoever has a turn passes it on: nothing waits for ever
        for run in "abcd":
            if run not in waiting:
                turns.pass_on(run, "0123", now_s)
        waiting = {run: wanted for run, wanted in waiting.items() if not turns.ask(run, wanted, 0, now_s)}
    assert not waiting
