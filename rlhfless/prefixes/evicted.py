"""Counts the prompt tokens that an engine computes again because its cache has evicted their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class CachedBlocks:
    """The blocks that an engine has computed since its cache was last emptied, by the tokens up to their end.

    An engine admits requests in their order, and a block can be found from its allocation on. So the blocks of all
    earlier requests are there, unless they were evicted.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[tuple[int, tuple[int, ...]]] = set()
        """(hash of the block before it, tokens)."""

    def held(self, token_ids: Sequence[int]) -> int:
        """The number of a prompt's tokens that earlier requests have computed, in whole blocks; the last token of a
        prompt is never found in a cache."""
        cached_tokens = 0
        for block, end in self._blocks(token_ids):
            if block not in self._known or end == len(token_ids):
                break
            cached_tokens = end
        return cached_tokens

    def add(self, token_ids: Sequence[int]) -> int:
        """Add the prompt of a request. Returns what of it was `held` before."""
        cached_tokens = self.held(token_ids)
        self._known.update(block for block, _ in self._blocks(token_ids))
        return cached_tokens

    def _blocks(self, token_ids: Sequence[int]) -> Iterator[tuple[tuple[int, tuple[int, ...]], int]]:
        """The whole blocks of a prompt, each with the number of tokens up to its end."""
        size, parent = self._block_tokens, 0
        for end in range(size, len(token_ids) + 1, size):
            block = (parent, tuple(token_ids[end - size : end]))
            yield block, end
            parent = hash(block)

    def clear(self) -> None:
        """Forget all blocks: the engine's cache was emptied."""
        self._known.clear()
