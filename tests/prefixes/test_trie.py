"""Shared prefixes: by hand, and against a naive search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.prefixes.trie import NONE, PrefixForest, lineage, shared_prefixes

SYSTEM, SHOTS = [1, 2, 3, 4], [5, 6]
PROMPTS = [[*SYSTEM, *SHOTS, 7, 8, 9], [*SYSTEM, *SHOTS, 7, 9, 9], [*SYSTEM, 20, 21], [30, 31]]


def shared(forest: PrefixForest) -> dict[tuple[int, ...], int]:
    """Tokens of each shared prefix by its users."""
    return {tuple(forest.users(prefix).tolist()): int(forest.tokens[prefix]) for prefix in range(len(forest))}


def naive(sequences: list[list[int]], counts: list[int], block: int, last_alone: bool) -> dict[tuple[int, ...], int]:
    """Every whole-block prefix of every sequence; of those with the same samples the longest."""
    users: dict[tuple[int, ...], list[int]] = {}
    for number, sequence in enumerate(sequences):
        for end in range(block, max(len(sequence) - last_alone, 0) + 1, block):
            users.setdefault(tuple(sequence[:end]), []).append(number)
    longest: dict[tuple[int, ...], int] = {}
    for prefix, of in users.items():
        if sum(counts[number] for number in of) > 1:
            longest[tuple(of)] = max(len(prefix), longest.get(tuple(of), 0))
    return longest


def naive_unique(sequences: list[list[int]], counts: list[int], block: int, last_alone: bool) -> int:
    """Blocks that differ from all others, and the rest of each sample."""
    seen, rest = set(), 0
    for sequence, count in zip(sequences, counts, strict=True):
        whole = max(len(sequence) - last_alone, 0) // block * block
        seen |= {tuple(sequence[:end]) for end in range(block, whole + 1, block)}
        rest += count * (len(sequence) - whole)
    return block * len(seen) + rest


def test_by_hand() -> None:
    forest = shared_prefixes(PROMPTS)
    assert shared(forest) == {(0, 1, 2): 4, (0, 1): 7}
    assert forest.parent.tolist() == [NONE, 0]
    assert forest.own_tokens.tolist() == [4, 3]
    assert forest.leaf.tolist() == [1, 1, 0, NONE]
    assert lineage(forest.parent, 1) == [0, 1]
    # Of 9 + 9 + 6 + 2 tokens the first 4 once instead of 3 times, the next 3 once instead of twice.
    assert forest.unique_tokens == 15


def test_blocks_of_four() -> None:
    forest = shared_prefixes(PROMPTS, block_tokens=4)
    assert shared(forest) == {(0, 1, 2): 4}
    assert forest.unique_tokens == 4 + 5 + 5 + 2 + 2


def test_the_samples_of_a_group_share_its_prompt_but_its_last_token() -> None:
    forest = shared_prefixes([[1, 2, 3, 4]], 8)
    assert (shared(forest), forest.samples.tolist(), forest.unique_tokens) == ({(0,): 3}, [8], 3 + 8)
    assert shared_prefixes([[1, 2, 3, 4]], 8, last_alone=False).unique_tokens == 4


def test_nothing_is_shared_by_a_token_that_comes_later() -> None:
    assert len(shared_prefixes([[1, 2, 3], [2, 2, 3]])) == 0


def test_no_sequences() -> None:
    forest = shared_prefixes([])
    assert (len(forest), forest.unique_tokens) == (0, 0)


@pytest.mark.parametrize(("arguments", "message"), [((1, 0), "block_tokens is 0"), ((0, 1), "a count is 0")])
def test_what_cannot_be(arguments: tuple[int, int], message: str) -> None:
    counts, block = arguments
    with pytest.raises(ValueError, match=message):
        shared_prefixes([[1, 2]], counts, block_tokens=block)


@given(
    sequences=st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12),
    counts=st.lists(st.integers(1, 3), min_size=12, max_size=12),
    block=st.integers(1, 4),
    last_alone=st.booleans(),
    as_arrays=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_as_a_naive_search(
    sequences: list[list[int]], counts: list[int], block: int, last_alone: bool, as_arrays: bool
) -> None:
    counts = counts[: len(sequences)]
    given_ = [np.array(sequence, np.int64) for sequence in sequences] if as_arrays else sequences
    forest = shared_prefixes(given_, counts, block_tokens=block, last_alone=last_alone)
    expected = naive(sequences, counts, block, last_alone)
    assert shared(forest) == expected
    assert len(forest) == len(expected)
    assert forest.unique_tokens == naive_unique(sequences, counts, block, last_alone)
    for prefix in range(len(forest)):
        assert forest.samples[prefix] == sum(counts[user] for user in forest.users(prefix))
        parent = int(forest.parent[prefix])
        assert parent < prefix
        assert parent == NONE or set(forest.users(prefix)) < set(forest.users(parent))
    for number, leaf in enumerate(forest.leaf.tolist()):
        mine = [tokens for users, tokens in expected.items() if number in users]
        assert forest.shared_tokens[number] == max(mine, default=0)
        assert [int(forest.tokens[prefix]) for prefix in lineage(forest.parent, leaf)] == sorted(mine)
