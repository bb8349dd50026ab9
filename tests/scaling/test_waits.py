"""The expected rest of a wait, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fakes.views import fleet_of, replica_slot, view_of
from rlhfless.scaling.policy import SlotView
from rlhfless.scaling.waits import Waits


def test_waits_by_hand() -> None:
    waits, view = Waits(), view_of(fleet_of(replica_slot(0)), [SlotView(None)], prompts=4, siblings=1)
    assert (waits.soonest_s(0.0), waits.last_s(0.0)) == (math.inf, 0.0)
    waits.note(10.0, replace(view, parked=np.array([True, True, True, False])))
    assert waits.soonest_s(14.0) == 4.0  # before the first answer: as long again
    waits.answered(20.0, view.step, np.array([0]))  # after 10 s
    waits.answered(40.0, view.step, np.array([1]))  # after 30 s
    waits.answered(40.0, view.step, np.array([3]))  # was not parked
    waits.note(40.0, replace(view, parked=np.array([False, False, True, True])))
    assert waits.remaining_s(0.0) == pytest.approx((10 + 30) / 2)
    assert waits.remaining_s(12.0) == pytest.approx(30 - 12)
    assert waits.remaining_s(30.0) == pytest.approx(30 / 4)  # longer than any wait so far
    assert (waits.soonest_s(40.0), waits.last_s(40.0)) == (pytest.approx(7.5), pytest.approx(20.0))
    waits.note(41.0, replace(view, step=view.step + 1, parked=np.array([False] * 4)))
    assert waits.last_s(41.0) == pytest.approx((10 + 30) / 2 - 1)  # another step's samples still wait
    waits.note(42.0, replace(view, parked=None))
    assert waits.soonest_s(42.0) == math.inf
