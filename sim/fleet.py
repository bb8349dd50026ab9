"""All replicas of a run: life cycle, cold starts, nodes, devices taken in turns, sleep, weights, interruptions.

    start   once its devices are free: node provisioned (not billed), then STARTING for `start_s`
    wake    once its devices are free: STARTING for the wake time of its tier
    load    a generation actor, while a step is drawn: STALE for `Transport.load_s`. Others start with weights
    spot    each life of an actor has an exponential length, from a generator of its own

A `Fleet` does what it is told, and the agenda says when it is done; it decides nothing.
"""

from __future__ import annotations

import math

import numpy as np

from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.sim.clock import Agenda
from rlhfless.sim.devices import Devices
from rlhfless.sim.events import Due, Happening, Interrupted, Loaded, Up
from rlhfless.sim.ledger import Ledger, version_of
from rlhfless.sim.replica import Replica
from rlhfless.sim.setup import Setup


class SimulationError(RuntimeError):
    """A fault of the policy: it leaves samples unassigned, asks for what cannot be done, or waits for ever."""


class Fleet:
    """All places, and the replica at each."""

    def __init__(self, setup: Setup, ledger: Ledger) -> None:
        self.setup = setup
        self.sites = setup.sites
        self.replicas: dict[int, Replica] = {}
        """By place. A replica that waits for its devices is not among them, unless it sleeps."""
        self.agenda: Agenda[Happening] = Agenda()
        self.drawing = False
        """Whether actors load weights as soon as they are up."""
        self._states: list[ReplicaState | None] = [None] * len(self.sites)
        self._tiers: list[str | None] = [None] * len(self.sites)
        self._touched: set[int] = set()
        """Places that may stand otherwise than `_states` and `_tiers` say."""
        self._functions = setup.functions
        self._ledger = ledger
        self._devices = Devices(self.sites)
        self._waiting: dict[int, float] = {}
        self._nodes: dict[str, float] = {}
        self._gone_s = [0.0] * len(self.sites)
        self._turns = [0] * len(self.sites)
        self._lives = [0] * len(self.sites)
        seeds = np.random.SeedSequence(setup.seed).spawn(len(setup.actors))
        self._random = [np.random.default_rng(seed) for seed in seeds]
        self._step = 0

    def name(self, place: int) -> str:
        """What a message calls a place."""
        return f"place {place} ({self._functions[place]})"

    def beside(self) -> list[str]:
        """Names of the replicas that hold a share of their own."""
        return [self._label(place) for place, site in enumerate(self.sites) if site.beside]

    def state(self, place: int) -> ReplicaState | None:
        """Of the replica at a place; STARTING from when it was asked for."""
        if place in self._waiting:
            return ReplicaState.STARTING
        replica = self.replicas.get(place)
        return None if replica is None else replica.life.state

    def standing(self) -> tuple[list[ReplicaState | None], list[str | None]]:
        """`[places]`: the state of each, and the tier of each that sleeps. The fleet's own lists: read only."""
        for place in self._touched:
            state = self._states[place] = self.state(place)
            self._tiers[place] = self.replicas[place].asleep if state is ReplicaState.SLEEPING else None
        self._touched.clear()
        return self._states, self._tiers

    def there(self, place: int) -> bool:
        """Whether a replica is awake there, or asked for."""
        return self.state(place) not in (None, ReplicaState.SLEEPING)

    def start(self, place: int, at_s: float) -> None:
        """Asks for a replica: starts it, or wakes the one that sleeps there. Raises SimulationError if one is there."""
        self._check(place)
        if self.there(place):
            raise SimulationError(f"{self.name(place)} is {self.state(place)} already; Release it before a Start")
        self._touched.add(place)
        self._turns[place] += 1
        self._waiting[place] = at_s
        self._seat()

    def start_later(self, place: int, at_s: float) -> None:
        """Asks for a replica at a time to come; void if one is asked for before."""
        self._check(place)
        self.agenda.add(at_s, Due(place, self._turns[place]))

    def release(self, place: int, at_s: float, tier: str | None) -> None:
        """Drains a replica that has nothing to do, to sleep in a tier or to give its devices back.

        Raises SimulationError for a place without replica, a tier that it does not have, or one that cannot sleep now.
        """
        self._check(place)
        self._touched.add(place)
        replica = self.replicas.get(place)
        waited = self._waiting.pop(place, None) is not None
        if replica is None and not waited:
            raise SimulationError(f"{self.name(place)} has no replica to Release")
        if tier is not None:
            self._sleep(place, at_s, tier)
        elif replica is not None:
            self._end(place, max(at_s, replica.busy_s))
        self._seat()

    def ask(self, step: int, at_s: float) -> None:
        """From now on, actors need the weights after `step` training steps: actors with others are STALE."""
        self._step = step
        self._touched.update(range(len(self.setup.actors)))
        for replica in self._actors():
            if replica.state in (ReplicaState.STALE, ReplicaState.SERVING):
                replica.note(replica.life.ask(version_of(step), at_s))

    def sync(self, at_s: float) -> None:
        """All STALE actors begin to load the weights together."""
        stale = [place for place, replica in self.replicas.items() if replica.state is ReplicaState.STALE]
        for place in stale:
            self._load(place, at_s, readers=len(stale))

    def happen(self, at_s: float, event: Due | Up | Loaded | Interrupted) -> bool:
        """Carries out what is due. Returns whether it still meant anything: events of an old turn or life do not."""
        self._touched.add(event.place)
        if isinstance(event, Due):
            void = event.turn != self._turns[event.place] or self.there(event.place)
            if not void:
                self.start(event.place, at_s)
            return not void
        replica = self.replicas.get(event.place)
        if replica is None:
            return False
        if isinstance(event, Interrupted):
            if event.life != replica.number:
                return False
            self._interrupt(event.place, at_s)
            return True
        if event.turn != self._turns[event.place]:
            return False
        return self._up(event.place, at_s) if isinstance(event, Up) else self._loaded(replica, at_s, event)

    def stuck(self) -> str:
        """Which replica waits for a device, and which one holds it; empty if none waits."""
        for place in self._waiting:
            held = self._devices.held(place)
            if held is not None:
                device, holder = held
                return (
                    f"{self.name(place)} waits for device {device!r}, which {self.name(holder)} holds; Release that one"
                )
        return ""

    def close(self, at_s: float) -> None:
        """All replicas give their devices back."""
        for replica in self.replicas.values():
            replica.end(max(at_s, replica.busy_s, replica.life.since_s))
        self.replicas.clear()
        self._waiting.clear()

    def _check(self, place: int) -> None:
        if not 0 <= place < len(self.sites):
            raise SimulationError(f"there is no place {place}; the fleet has the places 0 to {len(self.sites) - 1}")

    def _actors(self) -> list[Replica]:
        generation = len(self.setup.actors)
        return [replica for place, replica in self.replicas.items() if place < generation]

    def _label(self, place: int) -> str:
        return f"{self._functions[place]}-{place}"

    def _seat(self) -> None:
        """Replicas that wait, and whose devices are free, begin; in the order in which they were asked for."""
        for place, asked_s in list(self._waiting.items()):
            if self._devices.held(place) is None:
                del self._waiting[place]
                self._begin(place, max(asked_s, self._devices.free_s(place), self._gone_s[place]))

    def _begin(self, place: int, at_s: float) -> None:
        replica, site = self.replicas.get(place), self.sites[place]
        self._touched.add(place)
        self._devices.take(place)
        if replica is not None and replica.asleep is not None:
            replica.note(replica.life.wake(at_s))
            self.agenda.add(at_s + site.wake_s[replica.asleep], Up(place, self._turns[place]))
            replica.asleep, replica.busy_s = None, at_s
            return
        begin_s = max(at_s, self._nodes.setdefault(site.node, at_s + self.setup.node_s))
        self._lives[place] += 1
        life = self._lives[place]
        self.replicas[place] = Replica(
            self._ledger, self._functions[place], self._label(place), site.seat, begin_s, life
        )
        self.agenda.add(begin_s + site.start_s, Up(place, self._turns[place]))
        mean_s = self.setup.actors[place].spot_mean_s if place < len(self.setup.actors) else math.inf
        if math.isfinite(mean_s):
            self.agenda.add(begin_s + float(self._random[place].exponential(mean_s)), Interrupted(place, life))

    def _sleep(self, place: int, at_s: float, tier: str) -> None:
        replica = self.replicas.get(place)
        if tier not in self.sites[place].wake_s:
            tiers = sorted(self.sites[place].wake_s)
            raise SimulationError(f"{self.name(place)} has no sleep tier {tier!r}; it has {tiers}")
        if replica is None or replica.state not in (ReplicaState.STALE, ReplicaState.SERVING):
            state = "waits for its devices" if replica is None else f"is {replica.state}"
            raise SimulationError(f"{self.name(place)} {state} and cannot go to sleep in {tier!r}")
        self._gone_s[place] = max(at_s, replica.busy_s)
        replica.sleep(tier, self._gone_s[place])
        self._devices.give(place, self._gone_s[place])

    def _end(self, place: int, at_s: float, free_s: float | None = None) -> None:
        """Its life ends; its devices can be taken from `free_s` on."""
        replica = self.replicas.pop(place)
        replica.end(at_s)
        self._gone_s[place] = at_s if free_s is None else free_s
        if replica.asleep is None:
            self._devices.give(place, self._gone_s[place])

    def _interrupt(self, place: int, at_s: float) -> None:
        replica = self.replicas[place]
        at_s = max(at_s, replica.busy_s)  # a Move may have waited for the end of an iteration
        replica.note(replica.life.died(at_s))
        self._waiting.pop(place, None)
        self._end(place, at_s, free_s=at_s + self.setup.node_s)
        self._seat()

    def _up(self, place: int, at_s: float) -> bool:
        replica = self.replicas[place]
        if self._functions[place] is not FunctionName.GENERATION:
            replica.serve(version_of(self._step), at_s)
            return True
        replica.note(replica.life.started(at_s))
        if self.drawing:
            self._load(place, at_s, readers=1)
        return True

    def _load(self, place: int, at_s: float, readers: int) -> None:
        replica, end_s = self.replicas[place], at_s + self.setup.transport.load_s(readers)
        self._touched.add(place)
        replica.note(replica.life.ask(version_of(self._step), at_s))
        self.agenda.add(end_s, Loaded(place, self._turns[place], self._step, at_s))

    def _loaded(self, replica: Replica, at_s: float, event: Loaded) -> bool:
        if event.step != self._step or replica.state is not ReplicaState.STALE:
            return False
        replica.note(replica.life.loaded(version_of(event.step), at_s))
        size = self.setup.transport.size_bytes
        replica.called(Work.LOAD_WEIGHTS, self._step + 1, event.begun_s, at_s, size_bytes=size)
        return True
