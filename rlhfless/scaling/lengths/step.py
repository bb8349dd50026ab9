"""The samples of one step while they are drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths.hazard import Array, BoolArray
from rlhfless.scaling.lengths.levels import Levels, Samples

ALL = slice(None)


class OpenStep:
    """What is known of each sample [prompts, samples], and what was believed of its prompt when the step began."""

    def __init__(
        self,
        prompt_ids: tuple[str, ...],
        samples: int | npt.NDArray[np.int64],
        prior: Levels,
        spread: Array,
        seen: BoolArray,
        between: float,
    ) -> None:
        """`samples` of each prompt, or [prompts]; `prior`, `spread` and `seen` [prompts] are History.recall's.

        Raises ValueError if a prompt comes twice.
        """
        self.prompt_ids = prompt_ids
        self.prior = prior
        self.spread = spread
        self.seen = seen
        self.between = between
        """Variance of levels between prompts."""
        self._rows = {prompt_id: row for row, prompt_id in enumerate(prompt_ids)}
        if len(self._rows) < len(prompt_ids):
            twice = next(prompt_id for row, prompt_id in enumerate(prompt_ids) if self._rows[prompt_id] != row)
            raise ValueError(f"prompt {twice!r} comes twice in one step; its samples could not be told apart")
        counts = np.broadcast_to(samples, len(prompt_ids))
        self.there: BoolArray = np.arange(counts.max()) < counts[:, None]
        """Whether there is such a sample: prompts may have unequal numbers of them."""
        self.tokens = np.zeros(self.there.shape)
        """Drawn so far."""
        self.ended = np.zeros(self.there.shape, dtype=bool)
        self._truncated = np.zeros(self.there.shape, dtype=bool)

    @property
    def running(self) -> BoolArray:
        """[prompts, samples]."""
        running: BoolArray = self.there & ~self.ended
        return running

    def progress(self, prompt_id: str, sample: int, tokens: int) -> None:
        """Never steps back: beats may come late, and a sample that moved keeps its tokens."""
        row = self._rows[prompt_id]
        if not self.ended[row, sample]:
            self.tokens[row, sample] = max(self.tokens[row, sample], tokens)

    def finish(self, prompt_id: str, sample: int, tokens: int, truncated: bool) -> None:
        row = self._rows[prompt_id]
        self.tokens[row, sample] = tokens
        self.ended[row, sample] = True
        self._truncated[row, sample] = truncated

    def look(self, tokens: npt.ArrayLike, ended: npt.ArrayLike, truncated: npt.ArrayLike) -> None:
        """All samples at once: each [samples], by prompt and then by sample index."""
        self.tokens[self.there] = tokens
        self.ended[self.there] = ended
        self._truncated[self.there] = truncated

    def samples(self, rows: npt.NDArray[np.intp] | slice = ALL) -> Samples:
        """Of some prompts, as evidence. A sample without a token says nothing; one that goes on will have at least one
        more."""
        tokens, ended = self.tokens[rows], self.ended[rows]
        return Samples(
            log_tokens=np.log(np.maximum(tokens + ~ended, 1.0)),
            finished=(ended & ~self._truncated[rows]).astype(np.float64),
            present=(ended | (tokens > 0)).astype(np.float64),
        )
