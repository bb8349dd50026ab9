"""What an engine's cache should have, by hand and by a naive search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlhfless.prefixes.evicted import CachedBlocks


def test_by_hand() -> None:
    blocks = CachedBlocks(4)
    assert blocks.add((1, 2, 3, 4, 5, 6, 7, 8)) == 0
    assert blocks.add((1, 2, 3, 4, 5, 6, 7, 8)) == 4  # the block with the last token is computed again
    assert blocks.add((1, 2, 3, 4, 5, 6, 7, 8, 9)) == 8
    assert blocks.add((1, 2, 3, 9, 5, 6, 7, 8, 9)) == 0  # the same second block behind another first one
    blocks.clear()
    assert blocks.add((1, 2, 3, 4, 5)) == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8), st.integers(1, 4))
def test_the_longest_common_blocks_with_an_earlier_prompt(prompts: list[list[int]], size: int) -> None:
    blocks = CachedBlocks(size)
    for number, prompt in enumerate(prompts):
        whole = [
            k
            for k in range(0, max(len(prompt), 1), size)
            if any(prompt[:k] == earlier[:k] for earlier in prompts[:number] if len(earlier) >= k)
        ]
        assert blocks.add(prompt) == max(whole, default=0)
