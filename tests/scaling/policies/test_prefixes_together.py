"""Among prompts with similar forecasts the plan puts those with a common prefix side by side."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fakes.views import UP, fleet_of, replica_slot, view_of
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.policies.cost_aware.planner import SIMILAR_MEAN, _by_mean
from rlhfless.scaling.policy import StepView


def view(leaf: list[int] | None) -> StepView:
    """Four prompts behind the prefixes 0 and 1, or NONE."""
    plain = view_of(fleet_of(replica_slot(0)), [UP], prompts=4, siblings=1)
    none = np.full(2, NONE)
    tree = None if leaf is None else PrefixTree(np.array([5, 6]), none, np.array(leaf))
    return dataclasses.replace(plain, prefixes=tree)


def test_side_by_side() -> None:
    assert _by_mean(view([1, 0, 1, 0]), np.array([50.0, 51.0, 52.0, 53.0])).tolist() == [1, 3, 0, 2]


def test_a_longer_forecast_comes_later_whatever_its_prefix() -> None:
    longer = 50 * SIMILAR_MEAN**2
    assert _by_mean(view([1, 0, 1, 0]), np.array([50.0, longer, 51.0, longer + 1])).tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("leaf", [None, [NONE] * 4, [0, 0, 0, 0]])
def test_without_prefixes_the_order_is_that_of_the_forecasts(leaf: list[int] | None) -> None:
    assert _by_mean(view(leaf), np.array([53.0, 50.0, 50.0, 9.0])).tolist() == [3, 1, 2, 0]
