"""Passes over a batch: each learns from every group once, in an order of its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.algorithms.batch import PackedBatch, mini_batches, pack
from rlhfless.algorithms.passes import Passes


@pytest.fixture(scope="module")
def batch_of_six(make_group) -> PackedBatch:
    """Group i has one response of i + 1 tokens, all of them i."""
    return pack([make_group(name, (50,), [[number] * (number + 1)]) for number, name in enumerate("abcdef")])


def groups(part: PackedBatch) -> list[int]:
    return sorted(set(part.tokens[part.response_mask].tolist()))


def test_mini_batches_follow_the_order(batch_of_six):
    parts = mini_batches(batch_of_six, 3, np.array([4, 0, 5, 1, 2, 3]))
    assert [groups(part) for part in parts] == [[0, 4], [1, 5], [2, 3]]
    assert [part.denominators.tokens for part in parts] == [5 + 1, 6 + 2, 3 + 4]


@given(count=st.integers(1, 6), epochs=st.integers(1, 4), seed=st.tuples(st.integers(), st.integers(0, 10**6)))
def test_each_pass_has_all_groups_once(batch_of_six, count, epochs, seed):
    passes = Passes(count, epochs, seed)
    parts = [groups(part) for part in passes.over(batch_of_six)]
    assert len(parts) == count * epochs
    for epoch in range(epochs):
        met = [group for part in parts[count * epoch : count * (epoch + 1)] for group in part]
        assert sorted(met) == list(range(6))
    again = [groups(part) for part in Passes(count, epochs, seed).over(batch_of_six)]
    assert parts == again, "a step that is done again has the same updates"


def test_passes_and_steps_differ_in_their_order(batch_of_six):
    def order(seed: tuple[int, int]) -> list[list[int]]:
        return [groups(part) for part in Passes(6, 2, seed).over(batch_of_six)]

    first = order((0, 1))
    assert first[:6] != first[6:]
    assert first != order((0, 2))
    assert first != order((1, 1))
