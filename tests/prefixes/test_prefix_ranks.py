"""Prompts with a long common prefix are neighbours."""

import numpy as np

from rlhfless.prefixes.precompute import LEAST_TOKENS
from rlhfless.prefixes.tree import PrefixTree


def prefix_ranks(prompts):
    return PrefixTree.of_prompts(prompts).long().ranks


SYSTEM = tuple(range(LEAST_TOKENS))
FIRST, SECOND = tuple(range(5000, 5000 + LEAST_TOKENS)), tuple(range(6000, 6000 + LEAST_TOKENS))


def test_by_hand() -> None:
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
