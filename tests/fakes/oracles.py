"""Slow and exact counterparts of the planner: a loop over iterations, dynamic programs, and brute force."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.engine_model import EngineModel, decode_s
from rlhfless.scaling.policies.cost_aware.group_times import ActorType, GroupTimes, Responses
from rlhfless.scaling.policies.cost_aware.plan import FleetOptions, Standby


@dataclass(frozen=True)
class Roofline:
    """Engine with a(B) = base + max(memory, per_sequence B). Defaults: an 8B model on an H100."""

    base_s: float = 3e-4
    memory_s: float = 5.9e-3
    per_sequence_s: float = 2e-5
    context_s: float = 4.8e-8
    per_prompt_token_s: float = 2e-5

    def iteration_s(self, sequences: int) -> float:
        return self.base_s + max(self.memory_s, self.per_sequence_s * sequences)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.per_prompt_token_s * tokens


@dataclass(frozen=True)
class Straight:
    """Engine with a(B) = fixed + per_sequence B."""

    fixed_s: float = 1.0
    per_sequence_s: float = 0.5
    context_s: float = 0.0
    per_prompt_token_s: float = 0.0

    def iteration_s(self, sequences: int) -> float:
        return self.fixed_s + self.per_sequence_s * sequences

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.per_prompt_token_s * tokens


@dataclass(frozen=True)
class Offer:
    """Actors of a type, in tiers."""

    actor: ActorType
    standby: tuple[Standby, ...]
    between_usd: float


def device(engine: EngineModel, *standby: Standby, between_usd: float = 0.0, **changes: float) -> Offer:
    """Return actors with ample memory that cost 1 USD per second, unless changed."""
    values = {"kv_capacity_tokens": 10**9, "max_sequences": 256, "usd_per_s": 1.0} | changes
    return Offer(ActorType("gpu", engine, **values), standby, between_usd)  # type: ignore[arg-type]


def fleet(offer: Offer, weight_sync_s: float = 0.0, max_actors: int = 1024) -> FleetOptions:
    return FleetOptions(offer.actor, offer.standby, max_actors, weight_sync_s, offer.between_usd)


def drained_s(engine: EngineModel, tokens: list[int], prompt: list[int], prompt_tokens: list[int]) -> float:
    """Return one actor's time for samples that all fit: prefill of each prompt, then decoding between ends, in
    sequence."""
    seconds = sum(engine.prefill_s(prompt_tokens[p]) for p in set(prompt))
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    done = 0
    for position, index in enumerate(order):
        running = order[position:]
        context = sum(prompt_tokens[prompt[i]] + done for i in running)
        seconds += decode_s(engine, len(running), context, tokens[index] - done)
        done = tokens[index]
    return seconds


def group_times(step: Responses, offer: Offer) -> np.ndarray:
    """Return the seconds of each group [i, j) of the step's list, `[samples + 1, samples + 1]`; infinite where i >=
    j."""
    times, n = GroupTimes(offer.actor, step, step.list_order), step.tokens.size
    begin, end = np.triu_indices(n + 1, 1)
    table = np.full((n + 1, n + 1), np.inf)
    table[begin, end] = times.time_s(begin, end)
    return table


def least_usd(times_s: np.ndarray, ready_s: list[float], usd_per_s: float, limit_s: float) -> float:
    """Return the exact least cost of contiguous groups on equal devices: one layer per actor, the earliest at the long
    end."""
    least = np.full(times_s.shape[0], np.inf)
    least[-1] = 0.0
    for ready in sorted(ready_s):
        cost = np.where(times_s + ready <= limit_s, (times_s + ready) * usd_per_s, np.inf)
        least = np.minimum(least, (cost + least[None, :]).min(axis=1))
    return float(least[0])


def least_time_s(times_s: np.ndarray, ready_s: list[float]) -> float:
    """Return the exact earliest finish time, by a dynamic program over actors."""
    least = np.full(times_s.shape[0], np.inf)
    least[-1] = 0.0
    for ready in sorted(ready_s):
        least = np.minimum(least, np.maximum(times_s + ready, least[None, :]).min(axis=1))
    return float(least[0])


def brute_force(times_s: np.ndarray, ready_s: list[float]) -> list[tuple[float, float]]:
    """Return (time, device-seconds) of every way to cut the list and assign its parts to actors; later actors get
    shorter parts."""
    n, found = times_s.shape[0] - 1, []
    for parts in range(1, min(n, len(ready_s)) + 1):
        for inner in itertools.combinations(range(1, n), parts - 1):
            cuts = (0, *inner, n)
            work = [float(times_s[i, j]) for i, j in itertools.pairwise(cuts)]
            for allocations in set(itertools.combinations(sorted(ready_s, reverse=True), parts)):
                ends = [a + b for a, b in zip(work, allocations, strict=True)]
                found.append((max(ends), sum(ends)))
    return found
