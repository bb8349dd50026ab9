"""What the waits of a run's episodes for their environment cost, from its trace alone. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlhfless.records import FunctionName, ReplicaState
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.accounting import Interval, clip, length, union
from rlhfless.scaling.prices import PriceBook


@dataclass(frozen=True, slots=True)
class EpisodeWaits:
    """Waits for the environment between the turns of all episodes, and what they cost."""

    episodes_s: float
    """Sum over the episodes."""
    actors_device_s: float
    """Device-seconds in which actors were up and generated nothing, while an episode of theirs waited. An episode
    counts for the actor at which it ended."""
    actors_usd: float
    recomputed_tokens: int
    """Tokens that were computed again after a wait, because the prefix cache no longer had them. Of each context, those
    that do not fill a block of the cache are among them."""
    environment_s: float
    """Seconds for which the environment's replicas were held."""
    environment_usd: float


def episode_waits(trace: Trace, prices: PriceBook) -> EpisodeWaits | None:
    """Return the waits of a run; None without an environment."""
    episodes = [rollout for rollout in trace.rollouts if rollout.turn_spans]
    if not episodes:
        return None
    by_actor: dict[str, list[TracedRollout]] = defaultdict(list)
    for episode in episodes:
        by_actor[episode.actor].append(episode)
    idle_s = {actor: _only_waits(of_actor) for actor, of_actor in by_actor.items()}
    device_s, usd = [], []
    for holding in trace.holdings:
        is_up = holding.state is not ReplicaState.STARTING and prices.occupies(holding)
        if is_up and (waits := idle_s.get(holding.replica)):
            share = length(clip(waits, holding.start_s, holding.end_s)) / (holding.duration_s or 1.0)
            device_s.append(share * holding.device_s)
            usd.append(share * prices.cost_usd([holding]))
    environments = [holding for holding in trace.holdings if holding.function == FunctionName.ENVIRONMENT]
    held: dict[str, list[Interval]] = defaultdict(list)
    for holding in environments:
        held[holding.replica].append((holding.start_s, holding.end_s))
    return EpisodeWaits(
        episodes_s=math.fsum(episode.environment_s for episode in episodes),
        actors_device_s=math.fsum(device_s),
        actors_usd=math.fsum(usd),
        recomputed_tokens=sum(map(_recomputed, episodes)),
        environment_s=math.fsum(length(union(spans)) for spans in held.values()),
        environment_usd=prices.cost_usd(environments),
    )


def _only_waits(episodes: Sequence[TracedRollout]) -> list[Interval]:
    """Return when some of these episodes waited between two turns, and none was generated."""
    generates = union((turn.started_s, turn.ended_s) for episode in episodes for turn in episode.turn_spans)
    waits = union(
        (before.ended_s, after.started_s) for episode in episodes for before, after in pairwise(episode.turn_spans)
    )
    return [idle for start_s, end_s in waits for idle in _without(generates, start_s, end_s)]


def _without(disjoint: list[Interval], start_s: float, end_s: float) -> Iterable[Interval]:
    """Yield the part of [start_s, end_s) that is in none of these sorted, disjoint intervals."""
    for busy_s, free_s in clip(disjoint, start_s, end_s):
        if busy_s > start_s:
            yield start_s, busy_s
        start_s = free_s
    if end_s > start_s:
        yield start_s, end_s


def _recomputed(episode: TracedRollout) -> int:
    """Return the tokens of an episode that an engine had computed before the environment answered, and again after."""
    return sum(
        max(before.context_tokens + before.end - before.start - after.cached_tokens, 0)
        for before, after in pairwise(episode.turn_spans)
    )
