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
    """The position in each sequence of the first token that is learned."""
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    """The positions [start, end) in each sequence that are learned; all from `learned_from` on if this is empty."""

    def learned(self, index: int) -> list[bool]:
        """Which tokens of a sequence are learned."""
        length = len(self.sequences[index])
        spans = self.spans[index] if self.spans else ((self.learned_from[index], length),)
        return [any(start <= position < end for start, end in spans) for position in range(length)]
