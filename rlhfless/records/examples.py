"""Written responses, from which runs of other types than RLHF learn."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.records.rollouts import Prompt


@dataclass(frozen=True, slots=True)
class Example(Prompt):
    """A prompt with its demonstrated response, or with the chosen and then the rejected one."""

    sequences: tuple[tuple[int, ...], ...] = ()
    """The token ids of prompt and response, for each response."""
    learned_from: tuple[int, ...] = ()
    """The position in each sequence from which on its tokens are learned."""
