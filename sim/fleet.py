"""The generation actors: life cycle, cold starts, nodes, sleep, weights on their way, interruptions.

    start   node provisioned (not billed), then STARTING for `start_s`, then the weights are loaded
    wake    STARTING for the wake time of its tier, then the weights are loaded
    load    STALE for `Transport.load_s`
    spot    each incarnation has an exponential time to live, from a generator of its own

A `Fleet` does what it is told and says when it is done, through the agenda; it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.placement import Seat
from rlhfless.sim.clock import Agenda
from rlhfless.sim.engine import Engine, EngineShape, PricedModel
from rlhfless.sim.ledger import Ledger, Replica, version_of
from rlhfless.sim.samples import Progress


class TransportKind(StrEnum):
    """How weights reach an actor."""

    FOLDER = "folder"
    HTTP = "http"
    NCCL = "nccl"
    P2P = "p2p"


@dataclass(frozen=True, slots=True)
class Transport:
    """Weights on their way to the actors. Raises ValueError for a bandwidth that moves nothing."""

    kind: TransportKind
    bandwidth_bytes_per_s: float
    """Of one actor's link; over HTTP, of the one server that all pull from at once."""
    fixed_s: float
    size_bytes: int

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; it must be above 0")

    def load_s(self, readers: int) -> float:
        """Until `readers` actors that begin together have the weights: a broadcast and a chain of peers take as long
        as one, and only a server's link is divided."""
        copies = readers if self.kind is TransportKind.HTTP else 1
        return self.fixed_s + copies * self.size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one actor, and what one there is like."""

    seat: Seat
    node: str
    shape: EngineShape
    prices: PricedModel
    start_s: float
    """A cold start, from the process's begin until it is up, without the weights."""
    wake_s: Mapping[str, float]
    """By sleep tier."""
    slowdown: float = 1.0
    """Above 1: a straggler."""
    spot_mean_s: float = math.inf
    """Mean time until it is interrupted."""


@dataclass(frozen=True, slots=True)
class Up:
    """A start or wake-up is through."""

    place: int
    life: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load of the weights of `step` is through."""

    place: int
    life: int
    step: int
    begun_s: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The machine is taken away."""

    place: int
    life: int


Happening = Up | Loaded | Interrupted


class Actor(Replica):
    """One incarnation at a place, with its engine while a step is drawn."""

    engine: Engine | None = None
    asleep: str | None = None


class Fleet:
    """All places, and who is there."""

    def __init__(
        self,
        places: tuple[Place, ...],
        transport: Transport,
        node_s: float,
        ledger: Ledger,
        seed: np.random.SeedSequence,
    ) -> None:
        self.places = places
        self.actors: dict[int, Actor] = {}
        self.agenda: Agenda[Happening] = Agenda()
        self._transport = transport
        self._node_s = node_s
        self._nodes: dict[str, float] = {}
        self._lives = dict.fromkeys(range(len(places)), 0)
        self._random = [np.random.default_rng(child) for child in seed.spawn(len(places))]
        self._ledger = ledger
        self._step = 0

    def start(self, place: int, at_s: float) -> None:
        """Starts an actor, or wakes it. Raises ValueError if one is up there."""
        actor, there = self.actors.get(place), self.places[place]
        if actor is not None and actor.asleep is not None:
            actor.note(actor.life.wake(at_s))
            self.agenda.add(at_s + there.wake_s[actor.asleep], Up(place, self._lives[place]))
            actor.asleep = None
            return
        if actor is not None:
            raise ValueError(f"place {place} has an actor already ({actor.life.state}); release it first")
        begin_s = max(at_s, self._nodes.setdefault(there.node, at_s + self._node_s))
        self._lives[place] += 1
        life = self._lives[place]
        self.actors[place] = Actor(
            self._ledger, FunctionName.GENERATION, f"generation-{place}", there.seat, begin_s, life
        )
        self.agenda.add(begin_s + there.start_s, Up(place, life))
        if math.isfinite(there.spot_mean_s):
            lives_s = float(self._random[place].exponential(there.spot_mean_s))
            self.agenda.add(begin_s + lives_s, Interrupted(place, life))

    def sync(self, step: int, at_s: float) -> None:
        """Asks all actors for the weights after `step` training steps; those that are up load them at once, unless
        they have them."""
        self._step = step
        wanted = version_of(step)
        ready = [
            place
            for place, actor in self.actors.items()
            if actor.life.state is ReplicaState.STALE
            or (actor.life.state is ReplicaState.SERVING and actor.life.asked != wanted)
        ]
        for place in ready:
            self._load(place, at_s, readers=len(ready))

    def release(self, place: int, at_s: float, tier: str | None) -> None:
        """Drains an actor. Raises KeyError for a tier that the place does not have, or a place without actor."""
        actor = self.actors[place]
        if tier is None:
            actor.end(at_s)
            del self.actors[place]
            return
        if tier not in self.places[place].wake_s:
            raise KeyError(f"place {place} has no sleep tier {tier!r}; it has {sorted(self.places[place].wake_s)}")
        actor.note(actor.life.drain(at_s))
        actor.note(actor.life.sleep(at_s))
        actor.asleep, actor.engine = tier, None

    def happen(self, at_s: float, event: Happening) -> bool:
        """Carries out what is due. Returns whether it still meant anything: an old life's events do not."""
        actor = self.actors.get(event.place)
        if actor is None or event.life != self._lives[event.place]:
            return False
        if isinstance(event, Up):
            actor.note(actor.life.started(at_s))
            self._load(event.place, at_s, readers=1)
        elif isinstance(event, Loaded):
            if event.step != self._step or actor.life.state is not ReplicaState.STALE:
                return False
            actor.note(actor.life.loaded(version_of(event.step), at_s))
            size = self._transport.size_bytes
            actor.called(Work.LOAD_WEIGHTS, self._step + 1, event.begun_s, at_s, size_bytes=size)
        else:
            actor.note(actor.life.died(at_s))
            del self.actors[event.place]
        return True

    def settle(self, until_s: float) -> list[int]:
        """Lets happen what is due by then, while nothing is drawn. Returns the places that were interrupted."""
        interrupted = []
        while self.agenda.next_s <= until_s:
            at_s, event = self.agenda.pop()
            if self.happen(at_s, event) and isinstance(event, Interrupted):
                interrupted.append(event.place)
        return interrupted

    def engine(self, place: int, progress: Progress, at_s: float) -> Engine:
        """The engine of an actor for a step's samples; a new one if it had none for them."""
        actor, there = self.actors[place], self.places[place]
        if actor.engine is None or actor.engine.progress is not progress:
            actor.engine = Engine(there.shape, there.prices, progress, at_s, there.slowdown)
        return actor.engine

    def close(self, at_s: float) -> None:
        """Everyone gives the device back."""
        for actor in self.actors.values():
            actor.end(max(at_s, actor.life.since_s))
        self.actors.clear()

    def _load(self, place: int, at_s: float, readers: int) -> None:
        actor, end_s = self.actors[place], at_s + self._transport.load_s(readers)
        actor.note(actor.life.ask(version_of(self._step), at_s))
        self.agenda.add(end_s, Loaded(place, self._lives[place], self._step, at_s))
