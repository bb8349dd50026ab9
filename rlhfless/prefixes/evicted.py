"""Count the prompt tokens that an engine recomputes because its cache evicted their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class CachedBlocks:
    """The blocks that an engine has computed since its cache was last emptied, keyed by the tokens up to their end.

    An engine admits requests in order, and a block can be found as soon as it is allocated. The blocks of all
    earlier requests are therefore present, unless they were evicted.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[tuple[int, tuple[int, ...]]] = set()
        """(hash of the preceding block, tokens)."""

    def held(self, token_ids: Sequence[int]) -> int:
        """Return how many prompt tokens earlier requests have computed, in whole blocks, excluding the last token."""
        cached_tokens = 0
        for block, end in self._blocks(token_ids):
            if block not in self._known or end == len(token_ids):
                break
            cached_tokens = end
        return cached_tokens

    def add(self, token_ids: Sequence[int]) -> int:
        """Add a request's prompt and return the number of its tokens that were `held` before."""
        cached_tokens = self.held(token_ids)
        self._known.update(block for block, _ in self._blocks(token_ids))
        return cached_tokens

    def _blocks(self, token_ids: Sequence[int]) -> Iterator[tuple[tuple[int, tuple[int, ...]], int]]:
        """Yield the whole blocks of a prompt, each with the number of tokens up to its end."""
        size, parent = self._block_tokens, 0
        for end in range(size, len(token_ids) + 1, size):
            block = (parent, tuple(token_ids[end - size : end]))
            yield block, end
            parent = hash(block)

    def clear(self) -> None:
        """Forget all blocks, because the engine's cache was emptied."""
        self._known.clear()
