"""Among prompts with similar forecasts the plan puts those with a common prefix side by side."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from views import UP, fleet_of, replica_slot, view_of

from rlhfless.scaling.policies.cost_aware.planner import SIMILAR_MEAN, _by_mean
from rlhfless.scaling.policy import StepView


def view(prefix: list[int] | None) -> StepView:
    plain = view_of(fleet_of(replica_slot(0)), [UP], prompts=4, siblings=1)
    return dataclasses.replace(plain, prefix=None if prefix is None else np.array(prefix))


def test_side_by_side() -> None:
    assert _by_mean(view([2, 1, 2, 1]), np.array([50.0, 51.0, 52.0, 53.0])).tolist() == [1, 3, 0, 2]


def test_a_longer_forecast_comes_later_whatever_its_prefix() -> None:
    longer = 50 * SIMILAR_MEAN**2
    assert _by_mean(view([2, 1, 2, 1]), np.array([50.0, longer, 51.0, longer + 1])).tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("prefix", [None, [0, 0, 0, 0]])
def test_without_prefixes_the_order_is_that_of_the_forecasts(prefix: list[int] | None) -> None:
    assert _by_mean(view(prefix), np.array([53.0, 50.0, 50.0, 9.0])).tolist() == [3, 1, 2, 0]
