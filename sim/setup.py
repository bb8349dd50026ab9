"""The parts of a simulated run: slots for replicas, the work of each function, and the transport.

Slots are numbered: generation first, then the services, then the learner.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from rlhfless.prefixes.shared_forward import SharedForward
from rlhfless.records import FunctionName, FunctionRole, Work
from rlhfless.scaling.fleet_constants import SimulatedTransport
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.prices import RentalTerms
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.spec import ScheduleSpec

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Transport:
    """The time to bring weights to the actors. Raises ValueError for a rate of 0 or less."""

    kind: SimulatedTransport
    load_bytes_per_s: float
    """Rate at which an actor loads a version, from its node's memory or by a broadcast."""
    fixed_s: float
    size_bytes: int
    home: str | None = None
    """The node of the learner's first rank, from which each other node pulls a version before its actors load it; None
    if no node pulls."""
    pull_bytes_per_s: float = math.inf
    """Rate at which the home node sends to all others together."""

    def __post_init__(self) -> None:
        for name in ("load_bytes_per_s", "pull_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def load_s(self) -> float:
        """Seconds to load a version that is in the actor's node, or is broadcast."""
        return self.fixed_s + self.size_bytes / self.load_bytes_per_s

    @property
    def pull_s(self) -> float:
        """Seconds for the home node to send a version to another node."""
        return self.size_bytes / self.pull_bytes_per_s

    def pulls(self, node: str) -> bool:
        """Return whether a node has to pull a version."""
        return self.home not in (None, node)


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """How a run computes shared prefixes, in addition to each engine's own cache."""

    planned: bool = False
    """Whether policies know the prefixes of the prompts. Actors then compute a prefix before the samples that start
    with it."""
    forward: SharedForward | None = None
    """How reference and learner compute a shared prefix once per micro-batch; None: for each sample."""


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """A slot for one replica, and its start, sleep and wake times."""

    allocation: Allocation
    node: str
    start_s: float
    """Seconds of a cold start, from the start of the process until it is ready; for generation without loading the
    weights."""
    sleep_s: float = 0.0
    """Seconds from the request to sleep until its devices' memory is free for another function."""
    wake_s: float = 0.0
    """Seconds to wake a sleeping replica; for generation without loading the weights."""
    beside: bool = False
    """Whether its replica may be awake at the same time as others on its devices: CPU cores, or a device with memory
    for both. The times of these functions must then be measured side by side. Other replicas take turns on a device."""


@dataclass(frozen=True, slots=True)
class ActorShape:
    """A slot for a generation actor, and the speed of its engine."""

    slot_setup: SlotSetup
    engine: EngineShape
    prices: PricedModel
    slowdown: float = 1.0
    """Above 1: a straggler."""
    spot_mean_s: float = math.inf
    """Mean time until an actor is interrupted."""


@dataclass(frozen=True, slots=True)
class ServiceShape:
    """A slot for a function that serves complete groups in order of arrival."""

    slot_setup: SlotSetup
    function: str
    work: Work | None
    """None: an environment, whose answers are waits of the samples (`sim.samples.EpisodeTurns`)."""
    group_s: float
    """Seconds per group, whatever its size."""
    token_s: float
    """Seconds per token of prompt and response."""
    update_fixed_s: float = 0.0
    update_token_s: float = 0.0
    """Its own update of a step, before the learner's: a fixed time, and a time per token of prompt and response in each
    pass. Both are 0 for functions that do not learn."""
    epochs: int = 1
    """Passes of its update over the batch."""

    @property
    def learns(self) -> bool:
        """Whether it learns, as a critic does."""
        return self.update_fixed_s + self.update_token_s > 0

    @property
    def role(self) -> FunctionRole:
        if self.learns:
            return FunctionRole.UPDATES
        if self.work is None:
            return FunctionRole.ANSWERS
        return FunctionRole.SCORES if self.work is Work.SCORE else FunctionRole.ANNOTATES


@dataclass(frozen=True, slots=True)
class LearnerShape:
    """The slot of the learner, with a fixed time and times per token of prompt and response."""

    slot_setup: SlotSetup
    fixed_s: float
    evaluate_token_s: float
    """Over all tokens; 0 with one update per batch, which needs no evaluation pass."""
    learn_token_s: float
    """Per pass over the batch."""
    publish_s: float
    parts: int = 1
    """Mini-batches times ranks: each part of a batch forwards its own shared prefixes."""
    epochs: int = 1
    """Passes over the batch."""
    paid_around: tuple[float, float] | None = None
    """Seconds before and after its work of a step in which its devices are paid for, if it gives them back after the
    work; None if it keeps them."""


@dataclass(frozen=True)
class Setup:
    """A fleet and its use.

    Raises ValueError for heartbeats without time between them, for steps that overlap on shared devices, and for shares
    of a device that add up to more than 1.
    """

    actors: tuple[ActorShape, ...]
    services: tuple[ServiceShape, ...]
    learner: LearnerShape
    transport: Transport
    heartbeat_s: float
    """Seconds between two heartbeats of a step."""
    schedule: ScheduleSpec
    """The order in which steps generate and learn, as in the spec of a run."""
    node_s: float
    """Seconds to provision a node that was not used yet, or a replacement for a machine that was taken away."""
    max_tokens: int
    """The longest response."""
    seed: int
    terms: RentalTerms = RentalTerms()  # noqa: RUF009 (frozen)
    """The cost of giving a device back and taking it again."""
    prefixes: PrefixUse = PrefixUse()
    warm: bool = False
    """Whether the run is under way when the simulation starts, with everything started that a live run waits for before
    its first step."""
    fewest_actors: int = 0
    """The number of actors below which a release is not carried out, as live (`scaling.generation.min_actors`), and
    with which a run that is under way starts; 0: it starts with all."""

    def __post_init__(self) -> None:
        if not self.heartbeat_s > 0:
            raise ValueError(f"heartbeat_s is {self.heartbeat_s}; it must be above 0")
        if self.schedule.steps_ahead and self._takes_turns():
            raise ValueError("this schedule overlaps generation and learning; give them devices of their own")
        if self.transport.kind == "nccl" and self._takes_turns():
            raise ValueError("transport.kind is nccl, and a broadcast does not go between functions on one GPU")
        self._check_shares()

    @cached_property
    def slot_setups(self) -> tuple[SlotSetup, ...]:
        """By slot."""
        replica_slots: tuple[ActorShape | ServiceShape | LearnerShape, ...] = (
            *self.actors,
            *self.services,
            self.learner,
        )
        return tuple(replica_slot.slot_setup for replica_slot in replica_slots)

    @cached_property
    def functions(self) -> tuple[str, ...]:
        """By slot, the names of their functions."""
        services = (service.function for service in self.services)
        return (*(FunctionName.GENERATION for _ in self.actors), *services, FunctionName.LEARNER)

    @cached_property
    def under_way(self) -> tuple[int, ...]:
        """Slots whose replicas have started before the first step."""
        if not self.warm:
            return ()
        fewest = self.fewest_actors or len(self.actors)
        return tuple(slot for slot, role in enumerate(self.roles) if role is not FunctionRole.SAMPLES or slot < fewest)

    @cached_property
    def roles(self) -> tuple[FunctionRole, ...]:
        """By slot."""
        services = (service.role for service in self.services)
        return (*(FunctionRole.SAMPLES for _ in self.actors), *services, FunctionRole.UPDATES)

    def _takes_turns(self) -> bool:
        """Return whether the learner takes turns with an actor on a device."""
        alone = {
            device.name
            for actor in self.actors
            if not actor.slot_setup.beside
            for device in actor.slot_setup.allocation.devices
        }
        learner = self.learner.slot_setup
        return not learner.beside and any(device.name in alone for device in learner.allocation.devices)

    def _check_shares(self) -> None:
        """Check the shares of each device: the sum of those held side by side, plus the largest of those in turns."""
        beside: dict[str, float] = defaultdict(float)
        in_turn: dict[str, float] = defaultdict(float)
        for slot_setup in self.slot_setups:
            for device, share in slot_setup.allocation.shared:
                if slot_setup.beside:
                    beside[device.name] += share
                else:
                    in_turn[device.name] = max(in_turn[device.name], share)
        for name in beside.keys() | in_turn.keys():
            if beside[name] + in_turn[name] > 1 + _ROUNDING:
                raise ValueError(
                    f"the shares of device {name!r} add up to {beside[name] + in_turn[name]:g}; lower them"
                )
