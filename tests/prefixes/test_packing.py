"""Sequences in one row in which each shared prefix lies once."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.prefixes.packing import JOIN_KEYS, LEAST_SAVED_TOKENS, Packing, SharingSequences, pruned
from rlhfless.prefixes.trie import NONE, shared_prefixes
from rlhfless.scaling.latency.shape import ModelShape

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
    total = np.array([12])
    for least, expected in ((5, [0, NONE]), (6, [NONE, NONE])):
        packing = Packing(math.inf, least_saved_tokens=least)
        parent, kept = pruned(forest.tokens, forest.parent, forest.samples, total, packing, 100)
        assert (parent.tolist(), kept.tolist()) == ([NONE], expected)


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


# -- which prefixes pay on GPUs

TOKEN_KEYS = {"0.6b": 3840.0, "7b": 32_512.0}
"""Of Qwen3-0.6B and Qwen2.5-7B."""


@pytest.mark.parametrize(
    ("model", "prompt", "responses", "budget", "shared"),
    [
        ("7b", 256, (400, 1024), 8192, True),  # a fifth of the tokens
        ("7b", 100, (400, 1024), 8192, True),  # a ninth
        ("7b", 100, (6_000, 16_000), 32_768, False),  # 0.4 %
        ("7b", 2_000, (6_000, 16_000), 65_536, True),
        ("0.6b", 256, (400, 1024), 8192, True),
        ("0.6b", 100, (400, 1024), 8192, False),  # joining weighs more beside smaller products
    ],
)
def test_a_prefix_is_shared_on_gpus_where_that_saves_more_than_joining_costs(model, prompt, responses, budget, shared):
    """Eight samples of a prompt, in units of attention to one key: saved are the products and the attention of a
    prompt's tokens, lost is what joining takes of each token behind it."""
    random = np.random.default_rng(0)
    rows = [
        np.r_[10_000 * group + np.arange(prompt), random.integers(10**6, 10**9, size)]
        for group in range(4)
        for size in random.integers(*responses, 8)
    ]
    lengths, packing = np.array([len(row) for row in rows]), Packing(math.inf, TOKEN_KEYS[model])
    sequences = SharingSequences(np.concatenate(rows), lengths, packing, budget)
    parts = [sequences.pack(part) for part in sequences.cut(budget, lengths - prompt)]
    assert any(part.shared for part in parts) is shared
    tokens = sum(len(part.source) for part in parts)
    saved = (lengths.sum() - tokens) * (packing.token_keys + prompt / 2)
    joined = JOIN_KEYS * sum(end - stop for part in parts for _, stop, end in part.shared)
    assert saved >= joined, "packing never costs more than it saves"


def test_by_the_sizes_of_a_model():
    """A layer of Qwen2.5-7B has 3584 (2 x 3584 + 2 x 512) parameters of attention and 3 x 3584 x 18944 of the MLP, and
    queries of 3584 numbers: 2 FLOPs each beside 4 for each number and key."""
    config = {
        "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152_064, "intermediate_size": 18_944,
    }  # fmt: skip
    assert ModelShape.of_config(config).token_keys == (3584 * 8192 + 3 * 3584 * 18_944) / (2 * 3584) == 32_512
