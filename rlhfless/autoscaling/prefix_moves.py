"""When an actor gets the KV of a prefix from another actor, and does not compute it: the price of a move, learned."""

from __future__ import annotations

import math

from rlhfless.autoscaling.engine_speeds import EngineSpeeds
from rlhfless.prefixes.cost import move_pays

CALLS_S = 0.05
"""Time of the two calls of a move, to the actor that has the KV and to the one that gets it; as that of a moved sample
(live_fleet.MOVE_S)."""

BYTES_PER_S = {"folder": 0.5e9, "nixl": 10e9}
"""By connector, until a move was measured. Files are written and read once each, at some 1 GB/s (torch tensors, one
core, shared memory); NIXL at half of a network card of 200 Gbit/s."""


class PrefixMoves:
    """Of one run."""

    def __init__(self, connector: str | None, kv_token_bytes: int, speeds: EngineSpeeds) -> None:
        """`kv_token_bytes`: bytes of a token's KV. `connector`: as `generation.engine.kv_connector`."""
        self._speeds = speeds
        self._prior_s = math.inf if connector is None else kv_token_bytes / BYTES_PER_S[connector]
        self._tokens, self._seconds = 0, 0.0

    @property
    def token_s(self) -> float:
        """Seconds per token; infinite without a connector."""
        return self._seconds / self._tokens if self._tokens else self._prior_s

    def pay(self, kind: str, tokens: int, context_tokens: int) -> bool:
        """Whether an actor on a kind of device should get `tokens`, after `context_tokens` that it has."""
        if math.isinf(self.token_s):
            return False
        compute_s = self._speeds.model(kind).prefill_s(tokens, context_tokens) - CALLS_S
        return move_pays(tokens, compute_s, self.token_s)

    def learn(self, tokens: int, seconds: float) -> None:
        """A move of so many tokens took `seconds`."""
        self._tokens += tokens
        self._seconds += max(seconds - CALLS_S, 0.0)
