"""What prompts share counts in a plan's order, and in the time to have a slot's samples at another actor."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fakes.views import UP, fleet_of, replica_slot, view_of
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.policies.cost_aware.estimates import StartTimes
from rlhfless.scaling.policies.cost_aware.forecasts import SIMILAR_MEAN, RemainingLengths, _by_mean
from rlhfless.scaling.policies.cost_aware.rebalance import Actors, kv_again_s
from rlhfless.scaling.policies.fleet import Layout, PolicyContext
from rlhfless.scaling.policy import StepView

TREE = PrefixTree(np.array([8]), np.array([NONE]), np.array([0, 0]))
"""Two prompts of 10 tokens that share their first 8."""


def seconds(tree: PrefixTree | None) -> float:
    """Of slot 0, whose two samples have prompts of their own and 5 tokens each. Prefilling a token takes 1e-5 s."""
    fleet = fleet_of(replica_slot(0), replica_slot(1), move_s=0.0)
    plain = view_of(fleet, [UP, UP], prompts=2, siblings=1, tokens=[5, 5], home=[0, 0])
    now = PolicyContext(0.0, dataclasses.replace(plain, prefixes=tree), Layout.of(fleet.replica_slots))
    both = np.arange(2)
    lengths = RemainingLengths(both, np.array([0.5]), both, np.array([[1.0], [1.0]]))
    return kv_again_s(now, Actors(now, lengths, {}, StartTimes()), 0, both)


@pytest.mark.parametrize(
    ("tree", "tokens"),
    [(None, 2 * 15), (PrefixTree.nothing(2), 2 * 15), (TREE, 8 + 2 * 7)],
)
def test_a_shared_prefix_is_computed_once(tree: PrefixTree | None, tokens: float) -> None:
    assert seconds(tree) == pytest.approx(tokens * 1e-5)


# -- prompts with similar forecasts lie side by side if they share a prefix


def view_of_four(leaf: list[int] | None) -> StepView:
    """Four prompts behind the prefixes 0 and 1, or NONE."""
    plain = view_of(fleet_of(replica_slot(0)), [UP], prompts=4, siblings=1)
    none = np.full(2, NONE)
    tree = None if leaf is None else PrefixTree(np.array([5, 6]), none, np.array(leaf))
    return dataclasses.replace(plain, prefixes=tree)


def test_side_by_side() -> None:
    assert _by_mean(view_of_four([1, 0, 1, 0]), np.array([50.0, 51.0, 52.0, 53.0])).tolist() == [1, 3, 0, 2]


def test_a_longer_forecast_comes_later_whatever_its_prefix() -> None:
    longer = 50 * SIMILAR_MEAN**2
    assert _by_mean(view_of_four([1, 0, 1, 0]), np.array([50.0, longer, 51.0, longer + 1])).tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("leaf", [None, [NONE] * 4, [0, 0, 0, 0]])
def test_without_prefixes_the_order_is_that_of_the_forecasts(leaf: list[int] | None) -> None:
    assert _by_mean(view_of_four(leaf), np.array([53.0, 50.0, 50.0, 9.0])).tolist() == [3, 1, 2, 0]
