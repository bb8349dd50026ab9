"""An engine that speculates: one that does not, its passes over drafts, and what these yield.

A pass over B sequences, each with drafts at d places, computes B (1 + drafted) tokens and yields B (1 + accepted),
where drafted and accepted are the drafts of a sequence and pass at places 1 to d, and those of them that are accepted.
So a token of each takes

    a'(B) = (a(B (1 + drafted)) + draft_s d + standing_s) / (1 + accepted)

where a(n) is the time of the engine's iteration of n sequences: a draft is computed as another sequence, but for its
context, which is read once for all tokens of a pass. So a draft costs little while few sequences run, and as much as a
token where the engine is busy. With `depth` None it is the best one for each B, and for B sequences too many 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.scaling.engine_model import EngineModel


@dataclass(frozen=True, slots=True)
class Speculating:
    """An `EngineModel`: of another one, with drafts."""

    model: EngineModel
    drafted: tuple[float, ...]
    """[places]: drafts of a sequence and pass at each place; 1 where there always is one."""
    accepted: tuple[float, ...]
    """[places]: those of them that are accepted, as are all drafts before them."""
    depth: int | None = None
    """Places that are drafted; None: those that save time."""
    most_sequences: int = 256
    """The largest batch, whose depth is the smallest one."""
    draft_s: float = 0.0
    """Seconds in which the drafts of one place are found, for all sequences."""
    standing_s: float = 0.0
    """Seconds of each pass that the engine loses because it could speculate."""

    def __post_init__(self) -> None:
        places = len(self.drafted)
        if not places or len(self.accepted) != places or (self.depth is not None and not 0 <= self.depth <= places):
            raise ValueError(
                f"drafted has {places} places, accepted {len(self.accepted)}, and depth is {self.depth}; give as many "
                "of both, and a depth of at most as many"
            )

    def depth_at(self, sequences: int) -> int:
        """How many places are drafted where so many sequences run."""
        if self.depth is not None:
            return self.depth
        return min(range(len(self.drafted) + 1), key=lambda depth: self._token_s(sequences, depth))

    def iteration_s(self, sequences: int) -> float:
        return self._token_s(sequences, self.depth_at(sequences))

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.model.prefill_s(tokens, context_tokens)

    @property
    def context_s(self) -> float:
        """Where the depth depends on the batch, that of the largest: an upper bound."""
        return self.model.context_s / (1 + sum(self.accepted[: self.depth_at(self.most_sequences)]))

    def _token_s(self, sequences: int, depth: int) -> float:
        computed = round(sequences * (1 + sum(self.drafted[:depth])))
        pass_s = self.model.iteration_s(computed) + self.draft_s * depth + self.standing_s
        return pass_s / (1 + sum(self.accepted[:depth]))


def per_pass(
    output_tokens: int, drafted: Sequence[int], accepted: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Drafts at each place, and accepted ones, of a sequence and pass, [places]: each pass of it drew one token of
    `output_tokens` beside the drafts that it accepted.

    `drafted`, `accepted` [places]: of all passes, as the ledger counts them.
    """
    passes = max(output_tokens - sum(accepted), 1)
    first, second = (tuple(count / passes for count in counts) for counts in (drafted, accepted))
    return first, second
