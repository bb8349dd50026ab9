"""The samples of one step while they are drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths.hazard import Array, BoolArray
from rlhfless.scaling.lengths.levels import Levels, Samples

Ints = npt.NDArray[np.intp]


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

    def samples(self) -> Samples:
        """All, as evidence. One without a token says nothing; one that goes on will have at least one more."""
        return Samples(
            log_tokens=np.log(np.maximum(self.tokens + ~self.ended, 1.0)),
            finished=(self.ended & ~self._truncated).astype(np.float64),
            present=(self.ended | (self.tokens > 0)).astype(np.float64),
        )

    def evidence(self, rows: Ints, row: Ints, drawn: Array, counts: Ints) -> tuple[Samples, Ints]:
        """The same of the prompts `rows` in fewer columns, for `counts` running samples alike of each kind [kinds], that
        have drawn so much; `row` [kinds] says of which of the rows, ascending. Also the column of each kind.

        All samples of a prompt that have ended are one column, and those that were cut off another: they were so at
        the same length.
        """
        column = np.arange(row.size) - np.searchsorted(row, row) + 2
        shape = rows.size, int(column.max()) + 1
        log_tokens, finished, present = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        log_tokens[row, column], present[row, column] = np.log(drawn + 1.0), counts * (drawn > 0)
        logs, ended, cut_off = np.log(np.maximum(self.tokens[rows], 1.0)), self.ended[rows], self._truncated[rows]
        for at, which in enumerate((ended & ~cut_off, ended & cut_off)):
            present[:, at] = which.sum(axis=1)
            log_tokens[:, at] = (logs * which).sum(axis=1) / np.maximum(present[:, at], 1.0)
        finished[:, 0] = 1.0
        return Samples(log_tokens, finished, present), column
