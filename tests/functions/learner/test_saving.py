"""Whether copies of the learner's state fit into the memory of its nodes."""

from __future__ import annotations

import pytest

from rlhfless.functions.training.saving import enough
from rlhfless.util.free_memory import free_bytes


@pytest.mark.parametrize(
    ("ranks", "fits"),
    [
        ([("a", 10, 20)], True),
        ([("a", 11, 20)], False),
        ([("a", 5, 20), ("a", 5, 21)], True),
        ([("a", 6, 20), ("a", 5, 21)], False),
        ([("a", 6, 20), ("b", 5, 10)], True),
        ([("a", 6, 20), ("b", 5, 9)], False),
    ],
    ids=["half of one", "more than half", "two ranks", "two ranks, too much", "two nodes", "a small node"],
)
def test_copies_take_half_of_what_is_free_on_each_node(ranks: list[tuple[str, int, int]], fits: bool) -> None:
    assert enough(ranks) is fits


def test_some_memory_is_free() -> None:
    assert free_bytes() > 0
