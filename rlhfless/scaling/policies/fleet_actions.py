"""Actions that all policies take alike: starting, making way, releasing, and assigning samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rlhfless.records import Decision, ReplicaState
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policy import Action, Assign, Event, Generated, Idle, Ints, Lost, Note, Release, Room, Start

Inputs = dict[str, float | int | str | bool]
"""What a decision was made from, as the ledger keeps it."""


def note(now: PolicyContext, kind: str, choice: str, inputs: Inputs) -> Note:
    """A decision for the ledger."""
    return Note(Decision(now.view.step, now.at_s, kind, choice, inputs))


def start(now: PolicyContext, places: Iterable[int]) -> list[Action]:
    """Starts or wakes the replicas of these places that are not there."""
    return [Start(place) for place in places if now.absent(place)]


def make_way(now: PolicyContext, places: Iterable[int]) -> list[Action]:
    """Puts replicas to sleep that are awake and idle on the devices of these places."""
    blocking = sorted({other for place in places for other in now.layout.neighbours[place]} - set(places))
    return [put_to_sleep(now, other) for other in blocking if now.awake(other) and not now.view.places[other].working]


def put_to_sleep(now: PolicyContext, place: int) -> Release:
    """Into the tier that wakes soonest. A replica that has not come up yet, or has no tier, gives its devices back."""
    starting = now.view.places[place].state is ReplicaState.STARTING
    return Release(place, None if starting else quickest_tier(now.layout.rooms[place]))


def quickest_tier(room: Room) -> str | None:
    """The tier that wakes soonest; None for a room without tiers."""
    return min(room.wake_s, key=lambda tier: (room.wake_s[tier], tier), default=None)


def take_turns(now: PolicyContext, event: Event, actors: Sequence[int]) -> list[Action]:
    """What policies do that weigh no costs: a replica on devices that other functions want sleeps when its work of the
    step is done, and a lost actor is started again."""
    match event:
        case Lost(place, samples):
            return rescue(now, place, samples)
        case Generated():
            return [put_to_sleep(now, place) for place in actors if now.layout.shared(place) and now.awake(place)]
        case Idle(place) if now.layout.shared(place) and now.awake(place):  # it may have made way already
            return [put_to_sleep(now, place)]
    return []


def rescue(now: PolicyContext, place: int, samples: Ints) -> list[Action]:
    """After a loss: the place gets a new actor, and its samples go to the actors that are awake, or wait for the new
    one.

    An actor that had nothing to do, on devices that others take turns on, is started again when its turn comes.
    """
    if not samples.size and now.layout.shared(place):
        return []
    again = [*make_way(now, [place]), *start(now, [place])]
    return [*again, *assign_to_least(samples, awake_beside(now, place) or [place], now.loads)]


def awake_beside(now: PolicyContext, place: int) -> list[int]:
    """Places of the other generation actors that hold their devices."""
    return [other for other in now.layout.generation if other != place and now.awake(other)]


def assign_groups(now: PolicyContext, places: Sequence[int]) -> list[Action]:
    """Equal shares of the step's prompts, in their order; siblings stay together."""
    groups = len(now.view.prompt_ids)
    cuts = np.searchsorted(now.view.group, np.arange(len(places) + 1) * groups // len(places))
    blocks = ((place, np.arange(begin, end)) for place, begin, end in zip(places, cuts, cuts[1:], strict=False))
    return [Assign(place, block) for place, block in blocks if block.size]


def assign_to_least(samples: Ints, places: Sequence[int], loads: Ints) -> list[Action]:
    """Gives samples to the places with the least, in blocks, so that siblings stay together. `loads` is by place."""
    if not samples.size:
        return []
    shares = shares_to_least(samples.size, loads[list(places)])
    blocks = np.split(samples, np.cumsum(shares)[:-1])
    return [Assign(place, block) for place, block in zip(places, blocks, strict=True) if block.size]


def shares_to_least(samples: int, loads: Ints) -> Ints:
    """How many of so many samples each place [places] gets, for loads that come as close as they can."""
    order = np.argsort(loads, kind="stable")
    filled = loads[order]
    # The lowest places rise together: with k of them the common level is (their sum + samples) / k.
    level = (np.cumsum(filled) + samples) / np.arange(1, filled.size + 1)
    rising = int(np.argmax(np.append(filled[1:], np.inf) >= level)) + 1
    shares: Ints = np.zeros(loads.size, np.int64)
    shares[order[:rising]] = int(level[rising - 1]) - filled[:rising]
    shares[order[: samples - int(shares.sum())]] += 1
    return shares
