"""Engine times: the protocol of every latency model, and the closed form for many iterations.

Between two changes of its batch, an engine decodes with a constant number of sequences B, and its total context C grows
by B tokens per iteration. A model that is linear in the context can therefore be summed: k iterations take

    k a(B) + g (k C + B k (k - 1) / 2)

(for the derivation see docs/design.md, "Time in closed form"). Planner and simulator both use it.

An engine may have several *ways* to decode, each with its own model, and use the fastest one for the current batch and
context: an engine with speculative decoding has one for each depth (`Speculating`).

**Speculative decoding.** A pass over B sequences with drafts at d places computes B (1 + drafted) tokens and yields
B (1 + accepted), where drafted and accepted are the drafted and accepted tokens per sequence and pass at places 1 to d.
The time for one token of each sequence is

    a'(B) + g' C,  a'(B) = (a(B (1 + drafted)) + draft_s d + standing_s) / (1 + accepted),  g' = g / (1 + accepted)

where a(n) is the time of the engine's iteration of n sequences, and g the time per token of the context C. A draft is
computed like another sequence, except that its context is read once for all tokens of a pass. A draft therefore costs
little while few sequences run or their contexts are long, and as much as a token if the engine is busy.

With `depth` None, each d is a way to decode, and the best one is selected per pass. Callers that use
only a(B) and g, such as plans, get the g' of the deepest drafts, and an a(B) for which sequences of `context_tokens`
each take the time of the best depth. This is exact at that context, and too low by the difference of the two g' per
token beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol


class EngineModel(Protocol):
    """Times in seconds of one engine on one actor's devices."""

    @property
    def context_s(self) -> float:
        """Return g: seconds per token of context that a decode iteration reads."""
        ...

    def iteration_s(self, sequences: int) -> float:
        """Return a(B): seconds of one decode iteration of B sequences, excluding the part counted by `context_s`."""
        ...

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds to prefill `tokens` new tokens after `context_tokens` cached ones."""
        ...


def ways_of(model: EngineModel) -> tuple[EngineModel, ...]:
    """Return the ways in which an engine may decode: its `ways`, or the model itself."""
    ways: tuple[EngineModel, ...] = getattr(model, "ways", (model,))
    return ways


def decode_s(model: EngineModel, sequences: int, context_tokens: float, iterations: float) -> float:
    """Return the seconds of `iterations` decode iterations of a constant batch, from a context of `context_tokens`.

    The engine decodes in the way that is fastest for the first iteration.
    """
    if sequences == 0:
        return 0.0
    way = min(ways_of(model), key=lambda way: way.iteration_s(sequences) + way.context_s * context_tokens)
    grown = iterations * context_tokens + sequences * iterations * (iterations - 1) / 2
    return iterations * way.iteration_s(sequences) + way.context_s * grown


@dataclass(frozen=True)
class Speculating:
    """An `EngineModel` that adds drafts to another one."""

    model: EngineModel
    drafted: tuple[float, ...]
    """[places]: drafts per sequence and pass at each place; 1 if there always is one."""
    accepted: tuple[float, ...]
    """[places]: drafts accepted at each place, which requires all earlier ones to be accepted."""
    depth: int | None = None
    """Number of drafted places; None to draft as many as save time."""
    context_tokens: float = 0.0
    """Context of each sequence for which `depth_at` and `iteration_s` choose if `depth` is None."""
    draft_s: float = 0.0
    """Seconds to find the drafts of one place, for all sequences."""
    standing_s: float = 0.0
    """Overhead per pass, in seconds, of an engine that is able to speculate."""

    def __post_init__(self) -> None:
        places = len(self.drafted)
        if not places or len(self.accepted) != places or (self.depth is not None and not 0 <= self.depth <= places):
            raise ValueError(
                f"drafted has {places} places, accepted {len(self.accepted)}, and depth is {self.depth}; give as many "
                "of both, and a depth of at most as many"
            )

    @cached_property
    def ways(self) -> tuple[Speculating, ...]:
        """Return this engine at each depth that it may choose, smallest first."""
        if self.depth is not None:
            return (self,)
        return tuple(replace(self, depth=depth) for depth in range(len(self.drafted) + 1))

    def depth_at(self, sequences: int) -> int:
        """Return the number of drafted places for `sequences` running sequences."""
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
        """Return the tokens per sequence and pass at the maximum depth."""
        return 1 + sum(self.accepted[: self.depth])

    def _reckoned_s(self, way: Speculating, sequences: int) -> float:
        """Return a way's seconds if each sequence has `context_tokens`, without the reading counted by `context_s`."""
        return way.iteration_s(sequences) + (way.context_s - self.context_s) * sequences * self.context_tokens


def per_pass(
    output_tokens: int, drafted: Sequence[int], accepted: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the drafted and the accepted tokens at each place per sequence and pass, each [places].

    `drafted` and `accepted` [places] are totals over all passes, as in the ledger. Each pass generates one of
    `output_tokens` in addition to its accepted drafts.
    """
    passes = max(output_tokens - sum(accepted), 1)
    first, second = (tuple(count / passes for count in counts) for counts in (drafted, accepted))
    return first, second
