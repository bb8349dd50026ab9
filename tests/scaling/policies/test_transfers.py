"""The time to have a slot's samples at another actor, where they share a prefix."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fakes.views import UP, fleet_of, replica_slot, view_of
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.scaling.policies.cost_aware.completion import Unfinished
from rlhfless.scaling.policies.cost_aware.replan import Transfers
from rlhfless.scaling.policies.fleet_layout import Layout, PolicyContext

TREE = PrefixTree(np.array([8]), np.array([NONE]), np.array([0, 0]))
"""Two prompts of 10 tokens that share their first 8."""


def seconds(tree: PrefixTree | None, prefix_token_s: float = math.inf) -> float:
    """Of slot 0, whose two samples have prompts of their own and 5 tokens each. Prefilling a token takes 1e-5 s."""
    fleet = fleet_of(replica_slot(0), replica_slot(1), move_s=0.0, prefix_token_s=prefix_token_s)
    plain = view_of(fleet, [UP, UP], prompts=2, siblings=1, tokens=[5, 5], home=[0, 0])
    view = dataclasses.replace(plain, prefixes=tree)
    rows = Unfinished(
        SimpleNamespace(samples=np.arange(2)),  # type: ignore[arg-type]  # all that is read of it
        np.zeros(2, np.int64),
        np.array([15, 15]),
        np.ones(2, bool),
    )
    return float(Transfers(PolicyContext(0.0, view, Layout.of(fleet.replica_slots)), rows).seconds[0])


@pytest.mark.parametrize(
    ("tree", "prefix_token_s", "tokens"),
    [
        (None, math.inf, 2 * 15),
        (PrefixTree.nothing(2), math.inf, 2 * 15),
        (TREE, math.inf, 8 + 2 * 7),
        (TREE, 0.5e-5, 8 / 2 + 2 * 7),
        (TREE, 2e-5, 8 + 2 * 7),
    ],
)
def test_a_shared_prefix_is_computed_or_got_once(tree: PrefixTree | None, prefix_token_s: float, tokens: float) -> None:
    assert seconds(tree, prefix_token_s) == pytest.approx(tokens * 1e-5)
