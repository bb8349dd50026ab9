"""Counts the prompt tokens that an engine computes again because its cache has evicted their blocks."""

from __future__ import annotations

from collections.abc import Sequence


class CachedBlocks:
    """The blocks that an engine has computed since its cache was last emptied, by the tokens up to their end.

    An engine admits requests in their order, and a block can be found from its allocation on. So the blocks of all
    earlier requests are there, unless they were evicted.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[tuple[int, tuple[int, ...]]] = set()
        """(hash of the block before it, tokens)."""

    def add(self, token_ids: Sequence[int]) -> int:
        """Add the prompt of a request. Returns the number of its tokens that earlier requests have computed, in whole
        blocks; the last token of a prompt is never found in a cache."""
        size, parent, shared = self._block_tokens, 0, True
        cached_tokens = 0
        for start in range(0, len(token_ids) - size + 1, size):
            block = (parent, tuple(token_ids[start : start + size]))
            shared = shared and block in self._known
            cached_tokens += size if shared and start + size < len(token_ids) else 0
            self._known.add(block)
            parent = hash(block)
        return cached_tokens

    def clear(self) -> None:
        """Forget all blocks: the engine's cache was emptied."""
        self._known.clear()
