"""The times of an engine: the protocol of every latency model, and the closed form for many iterations.

Between two changes of its batch an engine decodes with a constant number of sequences B, and its total context C grows
by B tokens an iteration. A model that is linear in the context can therefore be summed: k iterations take

    k a(B) + g (k C + B k (k - 1) / 2)

(the shared derivation is in docs/design.md, "Time in closed form"). Planner and simulator both rest on it.

An engine may have several *ways* to decode, each such a model, and take the fastest one for the batch and context of
the moment: an engine that speculates has one for each depth (`latency.speculating`).
"""

from __future__ import annotations

from typing import Protocol


class EngineModel(Protocol):
    """Seconds of one engine on one actor's devices."""

    @property
    def context_s(self) -> float:
        """g: seconds per token of context that a decode iteration reads."""
        ...

    def iteration_s(self, sequences: int) -> float:
        """a(B): seconds of one decode iteration of B sequences, without the part that `context_s` counts."""
        ...

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to prefill `tokens` new tokens after `context_tokens` that are cached already."""
        ...


def ways_of(model: EngineModel) -> tuple[EngineModel, ...]:
    """The ways in which an engine may decode: its `ways`, or the one that it is."""
    ways: tuple[EngineModel, ...] = getattr(model, "ways", (model,))
    return ways


def decode_s(model: EngineModel, sequences: int, context_tokens: float, iterations: float) -> float:
    """Seconds of `iterations` decode iterations of a constant batch, from a total context of `context_tokens`, in the
    way that is the fastest for the first of them."""
    if sequences == 0:
        return 0.0
    way = min(ways_of(model), key=lambda way: way.iteration_s(sequences) + way.context_s * context_tokens)
    grown = iterations * context_tokens + sequences * iterations * (iterations - 1) / 2
    return iterations * way.iteration_s(sequences) + way.context_s * grown
