"""Shared prefixes of prompts of which lengths alone are known: as those of their tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.prefixes.packing import Packing, SharingSequences
from rlhfless.prefixes.shared_forward import SharedForward, saved_tokens
from rlhfless.prefixes.tree import BLOCK_TOKENS, LEAST_TOKENS, PrefixTree, to_precompute
from rlhfless.prefixes.trie import NONE, shared_prefixes

WHOLE = 10**6
"""Tokens of a micro-batch that holds all."""

NESTED = PrefixTree(np.array([300, 900]), np.array([NONE, 0]), np.array([1, 1, 0, NONE]))
"""Two prompts behind examples of 600 tokens behind a system prompt of 300, one behind that alone, one apart."""


def test_by_hand() -> None:
    prompts = np.array([1000, 950, 400, 70])
    assert NESTED.own_tokens.tolist() == [300, 600]
    assert NESTED.shared_tokens.tolist() == [900, 900, 300, 0]
    assert NESTED.unique_tokens(prompts) == 900 + 100 + 50 + 100 + 70
    assert NESTED.ranks.tolist() == [2, 2, 1, 0]
    assert NESTED.to_precompute(np.array([0, 1, 2])) == [0, 1]
    assert NESTED.to_precompute(np.array([0, 2, 3])) == [0]
    assert NESTED.to_precompute(np.array([1, 3])) == []
    assert PrefixTree.nothing(2).unique_tokens(np.array([3, 4])) == 7


def test_long_prefixes_by_hand() -> None:
    long = NESTED.long(400)
    assert (long.tokens.tolist(), long.parent.tolist(), long.leaf.tolist()) == ([900], [NONE], [0, 0, NONE, NONE])
    assert NESTED.long(300).text(0) == NESTED.text(0)
    assert len(NESTED.long(1000)) == 0


def test_the_levels_of_each_prompt_begin_with_its_shortest_prefix() -> None:
    assert NESTED.levels.tolist() == [[0, 0, 0, NONE], [1, 1, NONE, NONE]]
    assert PrefixTree.nothing(3).levels.shape == (0, 3)


def test_a_wrong_tree_is_named() -> None:
    with pytest.raises(ValueError, match="prefix 1 of 200 tokens has the parent 0"):
        PrefixTree(np.array([300, 200]), np.array([NONE, 0]), np.array([0]))
    with pytest.raises(ValueError, match="leaf names the prefix 4; there are 1"):
        PrefixTree(np.array([300]), np.array([NONE]), np.array([4]))


@st.composite
def prompts_of_tokens(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Different prompts, each with a last token of its own, behind blocks that repeat."""
    pieces = [tuple(range(100 * kind, 100 * kind + draw(st.integers(1, 90)))) for kind in range(4)]
    chains = draw(st.lists(st.lists(st.sampled_from(pieces), max_size=3), min_size=1, max_size=6))
    return [(*(token for piece in chain for token in piece), 10_000 + i) for i, chain in enumerate(chains)]


@given(prompts_of_tokens())
@settings(max_examples=100)
def test_what_is_precomputed_is_what_the_tokens_give(prompts: list[tuple[int, ...]]) -> None:
    forest = shared_prefixes(prompts, block_tokens=16)
    tree = PrefixTree.of(forest, len(prompts))
    found = tree.to_precompute(np.arange(len(prompts)), 40)
    assert sorted(int(tree.tokens[k]) for k in found) == sorted(len(p) for p in to_precompute(prompts, 40))
    assert tree.unique_tokens(np.array([len(prompt) for prompt in prompts])) == forest.unique_tokens


@given(prompts_of_tokens(), st.data())
@settings(max_examples=100)
def test_the_saved_tokens_are_those_of_the_packed_rows(prompts: list[tuple[int, ...]], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(prompts), max_size=len(prompts)))
    group = np.repeat(np.arange(len(prompts)), sizes)
    drawn = st.lists(st.integers(1, 30), min_size=len(group), max_size=len(group))
    responses = np.array(data.draw(drawn))
    tree = PrefixTree.of(shared_prefixes(prompts), len(prompts))
    size = np.array([len(prompt) for prompt in prompts])
    fed = [
        (*prompts[g], *range(20_000 + 50 * i, 20_000 + 50 * i + n - 1))
        for i, (g, n) in enumerate(zip(group, responses, strict=True))
    ]
    lengths = np.array([len(row) for row in fed])
    packing = Packing(math.inf, data.draw(st.sampled_from([None, 50.0, 1000.0, 1e6])))
    packed = SharingSequences(np.concatenate([np.array(row) for row in fed]), lengths, packing, WHOLE)
    computed = len(packed.pack(np.arange(len(group))).source)
    assert saved_tokens(tree, size, group, responses, SharedForward(WHOLE, packing)) == int(lengths.sum()) - computed


def test_each_micro_batch_computes_the_prefix_by_hand() -> None:
    """Four samples of 100 + 10 tokens and 5 drawn, of which 4 are fed. All: 100 + 4 x 14; in rows of at most 130
    tokens two samples each: 2 x 128; in rows of one: nothing is saved."""
    tree = PrefixTree(np.array([100]), np.array([NONE]), np.zeros(4, np.int64))
    batch = np.full(4, 110), np.arange(4), np.full(4, 5)
    fed = 4 * 114
    assert saved_tokens(tree, *batch, SharedForward(WHOLE)) == fed - (100 + 4 * 14)
    assert saved_tokens(tree, *batch, SharedForward(130)) == fed - 2 * 128
    assert saved_tokens(tree, *batch, SharedForward(110)) == 0
    assert saved_tokens(tree, *batch, SharedForward(130, Packing(0.5))) == 0


# -- ranks: prompts with a long common prefix are neighbours


def prefix_ranks(prompts):
    return PrefixTree.of_prompts(prompts).long().ranks


SYSTEM = tuple(range(LEAST_TOKENS))
FIRST, SECOND = tuple(range(5000, 5000 + LEAST_TOKENS)), tuple(range(6000, 6000 + LEAST_TOKENS))


def test_prompts_behind_one_prefix_have_equal_ranks() -> None:
    prompts = [
        (*SYSTEM, *SECOND, 1, 1),
        (9, 9),
        (*SYSTEM, *FIRST, 2, 2),
        (*SYSTEM, *SECOND, 3, 3),
        (*SYSTEM, *FIRST, 4, 4),
        (*SYSTEM, 5, 5),
    ]
    ranks = prefix_ranks(prompts)
    assert ranks[1] == 0
    assert ranks[0] == ranks[3] != ranks[2] == ranks[4]
    assert 0 < ranks[5] < min(ranks[0], ranks[2])
    assert sorted(set(ranks.tolist())) == [0, 1, 2, 3]


def test_short_prefixes_make_no_difference() -> None:
    assert not prefix_ranks([(*SYSTEM[:-1], 7, 7), (*SYSTEM[:-1], 8, 8)]).any()
    assert prefix_ranks([]).shape == (0,)
    assert np.array_equal(prefix_ranks([(1,), (2,)]), [0, 0])


def test_a_trace_keeps_the_tree() -> None:
    tree = PrefixTree.of_prompts([(*SYSTEM, *FIRST, 1), (*SYSTEM, *FIRST, 2), (*SYSTEM, 3), (4,)])
    texts = [tree.text(prompt) for prompt in range(4)]
    assert texts == ["0:256 1:512", "0:256 1:512", "0:256", ""]
    again = PrefixTree.parse(texts[::-1])
    assert [again.text(prompt) for prompt in range(4)][::-1] == texts
    assert again.unique_tokens(np.array([1, 257, 513, 513])) == tree.unique_tokens(np.array([513, 513, 257, 1]))


# -- which prefixes an actor computes first


OPENING = tuple(range(LEAST_TOKENS + BLOCK_TOKENS + 3))
"""A block and three tokens more than the shortest that is computed first."""
SHOTS = tuple(range(5000, 5000 + LEAST_TOKENS + 2 * BLOCK_TOKENS))


def test_the_prefix_of_several_prompts_in_whole_blocks() -> None:
    prompts = [(*OPENING, 7001), (*OPENING, 7002), (*OPENING[:10], 7003)]
    assert to_precompute(prompts) == [OPENING[: LEAST_TOKENS + BLOCK_TOKENS]]


def test_a_longer_prefix_comes_after_the_shorter() -> None:
    few = (*OPENING[: LEAST_TOKENS + BLOCK_TOKENS], *SHOTS)
    prompts = [(*few, 7001), (*few, 7002), (*OPENING, 7003)]
    first, second = to_precompute(prompts)
    assert first == OPENING[: LEAST_TOKENS + BLOCK_TOKENS]
    assert second == few


def test_little_more_than_the_shorter_is_left_to_the_engine() -> None:
    few = (*OPENING[: LEAST_TOKENS + BLOCK_TOKENS], *SHOTS[: LEAST_TOKENS - 1])
    prompts = [(*few, 7001), (*few, 7002), (*OPENING, 7003)]
    assert to_precompute(prompts) == [OPENING[: LEAST_TOKENS + BLOCK_TOKENS]]


def test_one_group_and_short_prefixes_are_left_to_the_engine() -> None:
    assert to_precompute([OPENING]) == []
    assert to_precompute([(*OPENING[:100], 7001), (*OPENING[:100], 7002)]) == []
    assert to_precompute([]) == []
