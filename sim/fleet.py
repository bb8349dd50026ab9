"""All replicas of a run: life cycle, cold starts, nodes, turns on devices, weights, interruptions.

    start   once its devices are free: node provisioned (not billed), then STARTING for `start_s`
    turn    a sleeping function with work waits until the replicas on its devices have none: these fall asleep, and it
            wakes, as in the live fleet (rlhfless.fleet.turns)
    load    a generation actor, while a step is generated: STALE for `Transport.load_s`. Others start with weights
    spot    each life of an actor has an exponential length, from a random generator of its own
    lease   a device that was given back and is no longer paid for is available after `RentalTerms.reacquire_s`

A `SimulatedFleet` carries out requests and decides nothing; the agenda says when they take effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlhfless.records import FunctionRole, ReplicaState, Work
from rlhfless.scaling.prices import RentalTerms
from rlhfless.sim.events import Agenda, Due, SimulatedEvent, SpotInterrupted, Up, WeightsLoaded
from rlhfless.sim.ledger import SimulatedLedger, SimulatedReplica, version_of
from rlhfless.sim.setup import Setup, SlotSetup


class SimulationError(RuntimeError):
    """A policy leaves samples unassigned, requests something impossible, or waits forever."""


class SimulatedFleet:
    """All slots, and the replica at each."""

    def __init__(self, setup: Setup, ledger: SimulatedLedger, idle: Callable[[int], bool]) -> None:
        """Create the fleet; `idle` returns whether a slot's function has no work in its phase, so its turn may end."""
        self.setup = setup
        self._idle = idle
        self.slot_setups = setup.slot_setups
        self._under_way = setup.under_way
        self.replicas: dict[int, SimulatedReplica] = {}
        """By slot. A replica that waits for its devices is not included, unless it sleeps."""
        self.agenda: Agenda[SimulatedEvent] = Agenda()
        self.drawing = False
        """Whether actors load weights as soon as they have started."""
        self._states: list[ReplicaState | None] = [None] * len(self.slot_setups)
        self._touched: set[int] = set()
        """Slots whose `_states` may be out of date."""
        self._functions = setup.functions
        self._roles = setup.roles
        self._ledger = ledger
        self._devices = Devices(self.slot_setups, setup.terms)
        self._waiting: dict[int, float] = {}
        self._nodes: dict[str, float] = {}
        self._gone_s = [0.0] * len(self.slot_setups)
        self._up_s = [0.0] * len(self.slot_setups)
        """By slot: when the last start or wake-up ends."""
        self._turns = [0] * len(self.slot_setups)
        self._lives = [0] * len(self.slot_setups)
        seeds = np.random.SeedSequence(setup.seed).spawn(len(setup.actors))
        self._random = [np.random.default_rng(seed) for seed in seeds]
        self._step = 0
        self._pulled_s: dict[str, float] = {}
        """By node other than the learner's: when it has, or will have, the current weights."""
        self._given_s = 0.0
        """Until when the learner's node sends weights to other nodes."""

    def name(self, slot: int) -> str:
        """Return the name of a slot in messages."""
        return f"slot {slot} ({self._functions[slot]})"

    def beside(self) -> list[str]:
        """Return the names of the replicas that hold a share of their own."""
        return [self._label(slot) for slot, slot_setup in enumerate(self.slot_setups) if slot_setup.beside]

    def state(self, slot: int) -> ReplicaState | None:
        """Return the state of the replica at a slot; STARTING from the request on."""
        if slot in self._waiting:
            return ReplicaState.STARTING
        replica = self.replicas.get(slot)
        return None if replica is None else replica.life.state

    def states(self) -> list[ReplicaState | None]:
        """Return the state of each slot, `[slots]`; STALE for a sleeping or waking replica.

        The list is the fleet's own: read only.
        """
        for slot in self._touched:
            replica = self.replicas.get(slot)
            away = replica is not None and (replica.asleep or replica.waking)
            self._states[slot] = ReplicaState.STALE if away else self.state(slot)
        self._touched.clear()
        return self._states

    def awake_or_asked(self, slot: int) -> bool:
        """Return whether the replica at a slot is awake, or its start was requested."""
        return self.state(slot) not in (None, ReplicaState.SLEEPING)

    def expects(self, slot: int) -> bool:
        """Return whether a policy may assign samples to a slot: its replica is awake, asleep or requested."""
        return self.state(slot) is not None

    def wake_actors(self, at_s: float) -> None:
        """Wake the sleeping actors at the start of a step's generation."""
        for slot in range(len(self.setup.actors)):
            if self.state(slot) is ReplicaState.SLEEPING:
                self.start(slot, at_s)

    def bring_up(self) -> None:
        """Start the replicas of a run that is under way; those that share devices with them start in their turn."""
        for slot in self._under_way:
            if self._devices.held(slot) is None:
                self.start(slot, 0.0)

    def start(self, slot: int, at_s: float) -> None:
        """Request a replica: start it, or wake the one that sleeps there. Raises SimulationError if one is awake."""
        self._check(slot)
        if self.awake_or_asked(slot):
            raise SimulationError(f"{self.name(slot)} is {self.state(slot)} already; Release it before a Start")
        self._touched.add(slot)
        self._turns[slot] += 1
        self._waiting[slot] = at_s
        self.pass_turns(at_s)

    def start_later(self, slot: int, at_s: float) -> None:
        """Request a start at a later time. An earlier start at the same slot voids it."""
        self._check(slot)
        self.agenda.add(at_s, Due(slot, self._turns[slot]))

    def release(self, slot: int, at_s: float) -> None:
        """Drain a replica without work, and give its devices back.

        Raises SimulationError for a slot without replica, and for the learner, which keeps the run's state.
        """
        self._check(slot)
        self._touched.add(slot)
        replica = self.replicas.get(slot)
        waited = self._waiting.pop(slot, None) is not None
        if replica is None and not waited:
            raise SimulationError(f"{self.name(slot)} has no replica to Release")
        if self._roles[slot] is FunctionRole.UPDATES:
            raise SimulationError(f"{self.name(slot)} keeps the run's state, and is never released")
        if replica is not None:
            self._end(slot, max(at_s, replica.busy_s))
        self.pass_turns(at_s)

    def require_weights(self, step: int, at_s: float) -> None:
        """Require the weights after `step` training steps from `at_s` on: actors with other weights become STALE."""
        self._expect(step)
        self._touched.update(actors := range(len(self.setup.actors)))
        for slot, replica in self.replicas.items():
            if slot in actors and replica.state in (ReplicaState.STALE, ReplicaState.SERVING):
                replica.note(replica.life.ask(version_of(step), at_s))

    def sync(self, at_s: float) -> None:
        """Start to load the weights on all STALE actors together."""
        stale = [slot for slot, replica in self.replicas.items() if replica.state is ReplicaState.STALE]
        for slot in stale:
            self._load(slot, at_s)

    def load_in_flight(self, step: int, at_s: float, reload: Callable[[int, float, float], float]) -> None:
        """Load the weights after `step` training steps on all actors while they generate.

        `reload` makes the engine of an actor load them, and returns when the load starts. An actor that is loading
        other weights, as after its start, loads again.
        """
        up = {slot: self.replicas[slot] for slot in range(len(self.setup.actors)) if slot in self.replicas}
        self._expect(step)
        version = version_of(step)
        serving = [slot for slot, replica in up.items() if replica.state is ReplicaState.SERVING]
        for slot in serving:
            up[slot].note(up[slot].life.ask(version, at_s))
            up[slot].note(up[slot].life.loaded(version, at_s))
            load_s = self._loaded_s(slot, at_s) - at_s
            begin_s = reload(slot, at_s, load_s)
            up[slot].busy_s = max(up[slot].busy_s, begin_s + load_s)
            self._called_load(up[slot], begin_s, begin_s + load_s)

    def handle(self, at_s: float, event: Due | Up | WeightsLoaded | SpotInterrupted) -> bool:
        """Carry out an event. Return False for a void event, of an earlier turn or life of its slot."""
        self._touched.add(event.slot)
        if isinstance(event, Due):
            void = event.turn != self._turns[event.slot] or self.awake_or_asked(event.slot)
            if not void:
                self.start(event.slot, at_s)
            return not void
        replica = self.replicas.get(event.slot)
        if replica is None:
            return False
        if isinstance(event, SpotInterrupted):
            if event.life != replica.number:
                return False
            self._interrupt(event.slot, at_s)
            return True
        if event.turn != self._turns[event.slot]:
            return False
        return self._up(event.slot, at_s) if isinstance(event, Up) else self._loaded(replica, at_s, event)

    def reacquire_s(self, slot: int, at_s: float) -> float:
        """Return the seconds until a slot's node is provisioned, if requested at `at_s` or before."""
        there_s = self._nodes.get(self.slot_setups[slot].node, at_s + self.setup.node_s)
        return max(there_s - at_s, 0.0)

    def stuck(self) -> str:
        """Return a message about a replica that waits for a device held by another; empty if none waits."""
        for slot in self._waiting:
            held = self._devices.held(slot)
            if held is not None:
                device, holder = held
                return (
                    f"{self.name(slot)} waits for device {device!r}, which {self.name(holder)} holds; Release that one"
                )
        return ""

    def close(self, at_s: float) -> None:
        """Give back the devices of all replicas."""
        for replica in self.replicas.values():
            replica.end(max(at_s, replica.busy_s, replica.life.since_s))
        self.replicas.clear()
        self._waiting.clear()

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self.slot_setups):
            raise SimulationError(f"there is no slot {slot}; the fleet has the slots 0 to {len(self.slot_setups) - 1}")

    def _label(self, slot: int) -> str:
        return f"{self._functions[slot]}-{slot}"

    def pass_turns(self, at_s: float) -> None:
        """Start waiting replicas whose devices are free, or held by functions without work, in order of request."""
        for slot, asked_s in list(self._waiting.items()):
            while (held := self._devices.held(slot)) is not None and self._may_sleep(held[1]):
                self._sleep(held[1], at_s)
            if held is None:
                del self._waiting[slot]
                self._begin(slot, max(asked_s, self._devices.free_s(slot), self._gone_s[slot]))

    def _begin(self, slot: int, at_s: float) -> None:
        replica, slot_setup = self.replicas.get(slot), self.slot_setups[slot]
        self._touched.add(slot)
        at_s, late_s = self._acquired(slot, at_s)
        if replica is not None and replica.asleep:
            replica.note(replica.life.wake(at_s))
            self._expect_up(slot, at_s + late_s + slot_setup.wake_s)
            replica.asleep, replica.waking, replica.busy_s = False, True, at_s
            return
        begin_s = max(at_s, self._nodes.setdefault(slot_setup.node, at_s + self.setup.node_s))
        self._lives[slot] += 1
        life = self._lives[slot]
        self.replicas[slot] = SimulatedReplica(
            self._ledger, self._functions[slot], self._label(slot), slot_setup.allocation, begin_s, life
        )
        start_s = 0.0 if slot in self._under_way and life == 1 else slot_setup.start_s
        self._expect_up(slot, begin_s + late_s + start_s)
        mean_s = self.setup.actors[slot].spot_mean_s if slot < len(self.setup.actors) else math.inf
        if math.isfinite(mean_s):
            self.agenda.add(begin_s + float(self._random[slot].exponential(mean_s)), SpotInterrupted(slot, life))

    def _expect_up(self, slot: int, at_s: float) -> None:
        self._up_s[slot] = at_s
        self.agenda.add(at_s, Up(slot, self._turns[slot]))

    def _acquired(self, slot: int, at_s: float) -> tuple[float, float]:
        """Take the devices of a slot; return when its replica holds them, and how many more seconds it waits.

        It waits for devices that had been given back, and pays for the others meanwhile.
        """
        some, every = self._devices.gone(slot, at_s)
        lag_s = self.setup.terms.reacquire_s if some else 0.0
        begin_s = at_s + lag_s if every else at_s
        self._devices.take(slot, begin_s)
        return begin_s, 0.0 if every else lag_s

    def _may_sleep(self, slot: int) -> bool:
        """Return whether the turn of a slot's replica may end; a replica that starts or loads weights continues."""
        replica = self.replicas.get(slot)
        resting = replica is not None and replica.state in (ReplicaState.STALE, ReplicaState.SERVING)
        return resting and self._idle(slot)

    def _sleep(self, slot: int, at_s: float) -> None:
        replica = self.replicas[slot]
        self._touched.add(slot)
        begin_s = max(at_s, replica.busy_s, replica.life.since_s)
        self._gone_s[slot] = begin_s + self.slot_setups[slot].sleep_s
        replica.sleep(begin_s, self._gone_s[slot])
        self._devices.give(slot, self._gone_s[slot])

    def _end(self, slot: int, at_s: float, free_s: float | None = None) -> None:
        """End the life of a replica; its devices are free from `free_s` on."""
        replica = self.replicas.pop(slot)
        replica.end(at_s)
        self._gone_s[slot] = at_s if free_s is None else free_s
        if not replica.asleep:
            self._devices.give(slot, self._gone_s[slot])

    def _interrupt(self, slot: int, at_s: float) -> None:
        replica = self.replicas[slot]
        at_s = max(at_s, replica.busy_s)  # a Move may have waited for the end of an iteration
        replica.note(replica.life.died(at_s))
        self._waiting.pop(slot, None)
        self._end(slot, at_s, free_s=at_s + self.setup.node_s)
        self.pass_turns(at_s)

    def _up(self, slot: int, at_s: float) -> bool:
        replica = self.replicas[slot]
        replica.waking = False
        if slot >= len(self.setup.actors):
            replica.serve(version_of(self._step), at_s)
            return True
        replica.note(replica.life.started(at_s))
        if self.drawing:
            self._load(slot, at_s)
        return True

    def _expect(self, step: int) -> None:
        """Make the weights after `step` training steps the current ones: only the learner's node has them yet."""
        if step != self._step:
            self._step = step
            self._pulled_s.clear()

    def _loaded_s(self, slot: int, at_s: float) -> float:
        """Return when an actor that starts at `at_s` has loaded the weights.

        Its node pulls them first, once for all its actors. The learner's node sends them to one node after the other,
        which ends when sending to all at once would.
        """
        transport, node = self.setup.transport, self.slot_setups[slot].node
        if transport.pulls(node):
            if node not in self._pulled_s:
                self._given_s = self._pulled_s[node] = max(self._given_s, at_s) + transport.pull_s
            at_s = max(at_s, self._pulled_s[node])
        return at_s + transport.load_s

    def _load(self, slot: int, at_s: float) -> None:
        replica, end_s = self.replicas[slot], self._loaded_s(slot, at_s)
        self._touched.add(slot)
        replica.note(replica.life.ask(version_of(self._step), at_s))
        self.agenda.add(end_s, WeightsLoaded(slot, self._turns[slot], self._step, at_s))

    def _loaded(self, replica: SimulatedReplica, at_s: float, event: WeightsLoaded) -> bool:
        if event.step != self._step or replica.state is not ReplicaState.STALE:
            return False
        replica.note(replica.life.loaded(version_of(event.step), at_s))
        self._called_load(replica, event.begun_s, at_s)
        return True

    def _called_load(self, replica: SimulatedReplica, start_s: float, end_s: float) -> None:
        size = self.setup.transport.size_bytes
        replica.called(Work.LOAD_WEIGHTS, self._step + 1, start_s, end_s, size_bytes=size)


ROUNDING_S = 1e-6
"""A device that is taken again within this time counts as held throughout."""


class Devices:
    """Holders and leases of the devices of all slots."""

    def __init__(self, slot_setups: Sequence[SlotSetup], terms: RentalTerms) -> None:
        self._terms = terms
        self._since_s: dict[str, float] = {}
        """When the lease of a device started."""
        self._devices = [_in_turn(slot_setup) for slot_setup in slot_setups]
        """By slot: the devices on which its replica takes turns with other replicas."""
        self._holder: dict[str, int] = {}
        self._free_s: dict[str, float] = {}

    def change(self, slot: int, slot_setup: SlotSetup) -> None:
        """Replace the devices of a slot that holds none now."""
        self._devices[slot] = _in_turn(slot_setup)

    def held(self, slot: int) -> tuple[str, int] | None:
        """Return a device that a slot needs and another slot holds, with that other slot."""
        for device in self._devices[slot]:
            if device in self._holder:
                return device, self._holder[device]
        return None

    def free_s(self, slot: int) -> float:
        """Return the time from which the devices of a slot are free; it may be in the future."""
        return max((self._free_s.get(device, 0.0) for device in self._devices[slot]), default=0.0)

    def gone(self, slot: int, at_s: float) -> tuple[bool, bool]:
        """Return whether any device, and whether every device, of a slot was given back and is no longer paid for."""
        gone = [device in self._free_s and at_s > self._paid_until_s(device) for device in self._devices[slot]]
        return any(gone), bool(gone) and all(gone)

    def take(self, slot: int, at_s: float) -> None:
        """Hold the devices of a slot from `at_s` on: their leases continue if they are still paid for."""
        for device in self._devices[slot]:
            self._holder[device] = slot
            if device not in self._since_s or at_s > self._paid_until_s(device):
                self._since_s[device] = at_s

    def _paid_until_s(self, device: str) -> float:
        free_s = self._free_s[device]
        return max(self._terms.paid_until_s(self._since_s[device], free_s), free_s) + ROUNDING_S

    def give(self, slot: int, at_s: float) -> None:
        """Free the devices of a slot from `at_s` on."""
        for device in self._devices[slot]:
            del self._holder[device]
            self._free_s[device] = at_s


def _in_turn(slot_setup: SlotSetup) -> tuple[str, ...]:
    return () if slot_setup.beside else tuple(device.name for device in slot_setup.allocation.devices)
