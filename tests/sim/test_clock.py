"""The agenda: order, and which events are taken together."""

from __future__ import annotations

import math

from rlhfless.sim.events import Agenda, Up, WeightsLoaded


def loaded(slot: int) -> WeightsLoaded:
    return WeightsLoaded(slot, turn=1, step=0, begun_s=0.0)


def test_what_is_due_at_one_instant_keeps_its_order() -> None:
    agenda: Agenda[int] = Agenda()
    for at_s, event in ((2.0, 1), (1.0, 2), (2.0, 3)):
        agenda.add(at_s, event)
    assert agenda.next_s == 1.0
    assert [agenda.pop() for _ in range(3)] == [(1.0, 2), (2.0, 1), (2.0, 3)]
    assert math.isinf(agenda.next_s)


def test_those_of_a_kind_at_one_instant_are_taken_together_up_to_another() -> None:
    agenda: Agenda[WeightsLoaded | Up] = Agenda()
    for at_s, event in ((1.0, loaded(0)), (1.0, loaded(1)), (1.0, Up(2, 1)), (1.0, loaded(3)), (2.0, loaded(4))):
        agenda.add(at_s, event)
    assert agenda.pop_like(0.5, WeightsLoaded) == []
    assert agenda.pop_like(1.0, WeightsLoaded) == [loaded(0), loaded(1)]
    assert agenda.pop() == (1.0, Up(2, 1))
    assert agenda.pop_like(1.0, WeightsLoaded) == [loaded(3)]
    assert agenda.next_s == 2.0
