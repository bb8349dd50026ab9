"""An engine that speculates: one that does not, its passes over drafts, and what these yield.

A pass over B sequences, each with drafts at d places, computes B (1 + drafted) tokens and yields B (1 + accepted),
where drafted and accepted are the drafts of a sequence and pass at places 1 to d, and those of them that are accepted.
So a token of each takes

    a'(B) + g' C,  a'(B) = (a(B (1 + drafted)) + draft_s d + standing_s) / (1 + accepted),  g' = g / (1 + accepted)

where a(n) is the time of the engine's iteration of n sequences, and g that of a token of the context C: a draft is
computed as another sequence, but for its context, which is read once for all tokens of a pass. So a draft costs little
while few sequences run or their contexts are long, and as much as a token where the engine is busy.

With `depth` None each d is a way to decode (`engine_model`), and the best one is taken pass by pass. Who asks for a(B)
and g alone, as a plan does, gets the g' of the deepest drafts, and an a(B) with which sequences of `context_tokens`
each take what they take by the best depth: exact at that context, and too little by the difference of the two g' for
each token beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhfless.scaling.engine_model import EngineModel


@dataclass(frozen=True)
class Speculating:
    """An `EngineModel`: of another one, with drafts."""

    model: EngineModel
    drafted: tuple[float, ...]
    """[places]: drafts of a sequence and pass at each place; 1 where there always is one."""
    accepted: tuple[float, ...]
    """[places]: those of them that are accepted, as are all drafts before them."""
    depth: int | None = None
    """Places that are drafted; None: those that save time."""
    context_tokens: float = 0.0
    """Context of each sequence at which `depth_at` and `iteration_s` choose where `depth` is None."""
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

    @cached_property
    def ways(self) -> tuple[Speculating, ...]:
        """This engine at each depth that it may choose, the least first."""
        if self.depth is not None:
            return (self,)
        return tuple(replace(self, depth=depth) for depth in range(len(self.drafted) + 1))

    def depth_at(self, sequences: int) -> int:
        """How many places are drafted where so many sequences run."""
        ways = self.ways
        depths = range(len(self.drafted) + 1) if self.depth is None else (self.depth,)
        return min(zip(depths, ways, strict=True), key=lambda each: self._reckoned_s(each[1], sequences))[0]

    def iteration_s(self, sequences: int) -> float:
        if self.depth is None:
            return min(self._reckoned_s(way, sequences) for way in self.ways)
        computed = round(sequences * (1 + sum(self.drafted[: self.depth])))
        pass_s = self.model.iteration_s(computed) + self.draft_s * self.depth + self.standing_s
        return pass_s / self._kept

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.model.prefill_s(tokens, context_tokens)

    @property
    def context_s(self) -> float:
        return self.model.context_s / self._kept

    @property
    def _kept(self) -> float:
        """Tokens of a sequence and pass, at the deepest drafts that it may have."""
        return 1 + sum(self.accepted[: self.depth])

    def _reckoned_s(self, way: Speculating, sequences: int) -> float:
        """A way's seconds where each sequence has `context_tokens`, but for the reading that `context_s` counts."""
        return way.iteration_s(sequences) + (way.context_s - self.context_s) * sequences * self.context_tokens


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
