"""Sequences in one row in which each shared prefix lies once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.prefixes.packing import (
    LEAST_SAVED_TOKENS,
    PAYS_BELOW,
    PAYS_BELOW_ON_GPUS,
    SharingSequences,
    expected_to_pay_below,
    packs_below,
    pruned,
)
from rlhfless.prefixes.trie import NONE, shared_prefixes

STEM = np.arange(40)


def sharing(rows: list[np.ndarray]) -> SharingSequences:
    return SharingSequences(np.concatenate([*rows, np.zeros(0, np.int64)]), np.array([len(row) for row in rows], int))


def test_by_hand() -> None:
    # Forty tokens in common; then two sequences of one more token each, and one that ends there.
    packed = sharing([np.r_[STEM, 50], np.r_[STEM, 60], STEM]).pack(np.arange(3))
    assert packed.segments == ((0, 40), (40, 1), (41, 1))
    assert packed.shared == ((0, 40, 42),)
    assert packed.positions.tolist() == [*range(40), 40, 40]
    assert packed.index.tolist() == [*range(40), 40, *range(40), 41, *range(40)]


def test_a_prefix_that_saves_little_is_computed_for_each() -> None:
    rows = [np.r_[STEM[:5], 50], np.r_[STEM[:5], 60]]
    assert len(sharing(rows).pack(np.arange(2)).source) == 12
    forest = shared_prefixes(rows)
    parent, kept = pruned(forest.tokens, forest.parent, forest.samples, least_saved_tokens=5)
    assert (parent.tolist(), kept.tolist()) == ([NONE], [0, NONE])
    _, kept = pruned(forest.tokens, forest.parent, forest.samples, least_saved_tokens=6)
    assert kept.tolist() == [NONE, NONE]


def test_a_prefix_of_one_user_in_the_row_is_part_of_its_sequence() -> None:
    rows = [np.r_[STEM, 50], np.r_[STEM, 60], np.r_[STEM, 70]]
    packed = sharing(rows).pack(np.array([2]))
    assert (packed.segments, packed.shared) == (((0, 41),), ())


drawn_rows = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(100, 103), max_size=20)).map(
        lambda drawn: np.r_[STEM[: drawn[0]], np.array(drawn[1], int)]
    ),
    max_size=10,
)


@given(rows=drawn_rows, budget=st.integers(1, 200), ranks=st.integers(1, 4))
@settings(deadline=None)
def test_rows_hold_every_token_and_keep_to_the_budget(rows: list[np.ndarray], budget: int, ranks: int) -> None:
    sequences = sharing(rows)
    parts = sequences.cut(budget, np.array([len(row) // 2 for row in rows], int))
    assert sorted(number for part in parts for number in part.tolist()) == list(range(len(rows)))
    for part in parts:
        packed = sequences.pack(part)
        tokens = np.concatenate([rows[number] for number in part])
        assert np.array_equal(tokens[packed.source][packed.index], tokens)
        expected = np.concatenate([np.arange(len(rows[number])) for number in part])
        assert np.array_equal(packed.positions[packed.index], expected)
        assert len(packed.source) <= budget or len(part) == 1
        assert sum(tokens for _, tokens in packed.segments) == len(packed.source)
    assert sorted(np.concatenate(sequences.deal(ranks)).tolist()) == list(range(len(rows)))


@given(rows=drawn_rows)
@settings(deadline=None)
def test_no_more_tokens_than_sharing_that_pays_leaves(rows: list[np.ndarray]) -> None:
    forest = shared_prefixes(rows, last_alone=False)
    packed = sharing(rows).pack(np.arange(len(rows)))
    assert forest.unique_tokens <= len(packed.source) <= forest.unique_tokens + LEAST_SAVED_TOKENS * len(forest)


# -- where packing pays


@pytest.mark.parametrize(
    ("expected", "padded_token_s", "packed_token_s", "below"),
    [
        (0.7, 3e-6, 4e-6, 0.7),  # breaks even at 0.75: as expected
        (0.7, 3e-6, 5.1e-6, 0.7),  # at 0.588, within a factor of 1.2
        (0.7, 3e-6, 5.2e-6, 0.5),  # at 0.577: far from it
        (0.7, 3e-6, 3e-6, 1.0),  # a packed token costs no more than a padded one
        (1.0, 3e-6, 3.5e-6, 1.0),
        (1.0, 3e-6, 4e-6, 0.7),
        (1.0, 3e-6, 7e-6, 0.4),  # at 0.43
        (1.0, 6e-6, 3e-6, 1.0),  # never where it computes more
        (1.0, 1e-6, 1e-4, 0.0),  # it pays nowhere
    ],
)
def test_measured_rates_count_where_they_are_far_from_expected(expected, padded_token_s, packed_token_s, below):
    assert packs_below(expected, padded_token_s, packed_token_s) == below


def test_what_is_expected():
    assert (expected_to_pay_below(on_cpu=False), expected_to_pay_below(on_cpu=True)) == (PAYS_BELOW_ON_GPUS, PAYS_BELOW)
