"""The samples of one step while they are drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths.hazard import Array, BoolArray, Ints
from rlhfless.scaling.lengths.levels import Levels, Samples


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
        prompt, sample = np.nonzero(self.there)
        tokens, ended = self.tokens[prompt, sample], self.ended[prompt, sample]
        known = ended & ~self._truncated[prompt, sample]
        return Samples(prompt, np.log(np.maximum(tokens + ~ended, 1.0)), known, (ended | (tokens > 0)).astype(float))

    def evidence(self, rows: Ints, row: Ints, drawn: Array, counts: Ints) -> Samples:
        """The same of the prompts `rows` alone, with few entries. First come running samples: `counts` of each kind
        [kinds] that have drawn so much, `row` [kinds] says of which of the rows. Then for each prompt those that have
        ended, and those that were cut off: they were so at the same length.
        """
        prompt, sample = np.nonzero(self.ended[rows])
        logs = np.log(np.maximum(self.tokens[rows[prompt], sample], 1.0))
        index = prompt + self._truncated[rows[prompt], sample] * rows.size
        ended = np.bincount(index, minlength=2 * rows.size)
        mean = np.bincount(index, logs, minlength=2 * rows.size) / np.maximum(ended, 1)
        return Samples(
            prompt=np.concatenate([row, np.tile(np.arange(rows.size), 2)]),
            log_tokens=np.concatenate([np.log(drawn + 1.0), mean]),
            finished=np.repeat([False, True, False], [row.size, rows.size, rows.size]),
            count=np.concatenate([counts * (drawn > 0), ended]).astype(float),
        )
