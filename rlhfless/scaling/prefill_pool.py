"""The price of prompts that are computed apart (docs/prefill.md), declared once: for the break-even of a plan
(`planning.prefill_break_even`), for a policy's plan of a step (`group_times`), and for simulated fleets. Pure.

An actor's prompts are handed over in PIECES pieces, those with the longest responses first. A piece is computed by one
of the prefill actors, first come, first served; then the actor reads its KV, and draws nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rlhfless.scaling.engine_model import EngineModel

PIECES = 8
"""Parts in which prompts are handed over: the engine that draws begins with the first. Each is a call of two actors."""


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """The actors that compute prompts for those that draw. All serve the same prompts, so together they take a prompt's
    time divided by their number."""

    actors: int
    model: EngineModel
    """Of one of them."""
    kv_token_s: float
    """Seconds in which an actor reads the KV of one token; infinite without a connector."""
    move_s: float
    """Seconds of the calls of a piece."""

    def computed_s(self, tokens: int) -> float:
        """Seconds of the pool for a prompt."""
        return self.model.prefill_s(tokens) / self.actors

    def moved_s(self, tokens: float) -> float:
        """Seconds of the actor that reads the KV of `tokens` tokens."""
        return tokens * self.kv_token_s


def pieces(prompts: Sequence[Hashable], tokens: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Numbers of samples whose prompts are handed over together, from each sample's prompt [samples] and its tokens
    [samples]: at least PIECES parts of all prompts if there are so many, none of more than `most_tokens` unless it is
    one prompt. The samples of a prompt stay together."""
    by_prompt: dict[Hashable, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(number)
    sizes = {prompt: tokens[numbers[0]] for prompt, numbers in by_prompt.items()}
    limit = min(most_tokens, -(-sum(sizes.values()) // PIECES))
    parts: list[list[int]] = []
    left = 0
    for prompt, numbers in by_prompt.items():
        if not parts or sizes[prompt] > left:
            parts.append([])
            left = limit
        parts[-1] += numbers
        left -= sizes[prompt]
    return parts
