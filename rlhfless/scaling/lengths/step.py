"""The samples of one step while they are drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlhfless.scaling.lengths import kernel
from rlhfless.scaling.lengths.levels import Levels
from rlhfless.scaling.lengths.samples import Array, BoolArray, Ints, Samples


class Running(NamedTuple):
    """Unfinished samples of a step. Siblings that follow each other and have drawn as many tokens are of one kind."""

    sample: Ints  # [samples]: sample index
    kind: Ints  # [samples]
    prompt: Ints  # [kinds]
    tokens: Array  # [kinds]: drawn so far
    evidence: Samples
    """For their prompts: first the kinds themselves, then what has ended."""


class OpenStep:
    """The state of each sample [prompts, samples], and the prior of its prompt when the step began."""

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
        """Tokens drawn so far."""
        self.ended = np.zeros(self.there.shape, dtype=bool)
        self._truncated = np.zeros(self.there.shape, dtype=bool)
        self._room = _room_for(self.there.size, len(prompt_ids))

    def progress(self, prompt_id: str, sample: int, tokens: int) -> None:
        """Raises the tokens of a sample, never lowers them: beats may come late, and a moved sample keeps its
        tokens."""
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
        """All samples as evidence. A sample without a token gives none; a running sample will have at least one more
        token."""
        prompt, sample = (index.copy() for index in np.nonzero(self.there))  # each in one piece
        tokens, ended = self.tokens[prompt, sample], self.ended[prompt, sample]
        known = ended & ~self._truncated[prompt, sample]
        return Samples(prompt, np.log(np.maximum(tokens + ~ended, 1.0)), known, (ended | (tokens > 0)).astype(float))

    def running(self) -> Running:
        """The unfinished samples, and the evidence for their prompts."""
        room, most = self._room, self.there.size
        samples, kinds = kernel.gather(
            self.there, self.tokens, self.ended, self._truncated, room.sample, room.kind, room.evidence, room.tokens
        )
        evidence = Samples(*(np.concatenate([column[:kinds], column[most:]]) for column in room.evidence))
        return Running(
            room.sample[:samples].copy(),
            room.kind[:samples].copy(),
            evidence.prompt[:kinds],
            room.tokens[:kinds].copy(),
            evidence,
        )


def _room_for(samples: int, prompts: int) -> Running:
    """Room to gather what is unfinished: a kind for each sample, and two more entries for each prompt."""
    # What was cut off was so at the same length; of what has ended by itself only the mean log counts.
    prompt = np.concatenate([np.zeros(samples, np.intp), np.repeat(np.arange(prompts), 2)])
    finished = np.concatenate([np.zeros(samples, np.bool_), np.tile([True, False], prompts)])
    entries = Samples(prompt, np.zeros(prompt.size), finished, np.zeros(prompt.size))
    return Running(np.empty(samples, np.intp), np.empty(samples, np.intp), prompt, np.empty(samples), entries)
