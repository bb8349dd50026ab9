"""Engine times: the protocol of every latency model, and the closed form for many iterations.

Between two changes of its batch, an engine decodes with a constant number of sequences B, and its total context C grows
by B tokens per iteration. A model that is linear in the context can therefore be summed: k iterations take

    k a(B) + g (k C + B k (k - 1) / 2)

(for the derivation see docs/design.md, "Time in closed form"). Planner and simulator both use it.

An engine may have several *ways* to decode, each with its own model, and use the fastest one for the current batch and
context: an engine with speculative decoding has one for each depth (`latency.speculating`).
"""

from __future__ import annotations

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
