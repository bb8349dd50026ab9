"""The interface between a fleet and its scaling policy: events in, actions out, the clock handed in. Pure.

The live fleet asks a policy on the wall clock, the simulator on a virtual one: the policy that was simulated is the
policy that runs. A policy is asked at every event below and answers with actions, which are carried out in their
order. It sees no response length before its sample has ended, and no future.

An action that the fleet cannot carry out is a fault of the policy. So is an answer after which an unfinished sample
belongs to no slot, or to a slot where no replica is up or has been asked to come up. `rlhfless.scaling.assignment`
has these rules, for both fleets; each fleet itself decides what can be started and released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import Decision, FunctionRole, ReplicaState
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.prices import RentalTerms

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
N = TypeVar("N", bound=np.generic)

UNASSIGNED = -1
"""The slot of a sample that has ended, was lost, or was not given to a slot yet."""


# -- the fleet


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The capacity and the latency model of an engine in a slot."""

    model: EngineModel
    kv_capacity_tokens: int
    """As the engine reports it. vLLM counts sequences of the longest length: with a model that has windows, shorter
    sequences fill the cache at fewer tokens."""
    max_sequences: int
    """Most sequences that run at once."""


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """The properties of a slot, which holds one replica of a function. Actions name a slot by its index in the
    fleet."""

    function: str
    role: FunctionRole
    kind: str
    """Device kind, as the price book names it."""
    devices: tuple[str, ...]
    """Names of its devices. Where slots share a device and its memory does not hold them all, the fleet lets them take
    turns by itself: a function that has work wakes, and the others sleep."""
    node: str
    usd_per_s: float
    """The saving of a release: the price of all its devices while a replica holds them, and 0 where they are paid for
    in any case (`FleetView.kept_usd_per_s`)."""
    start_s: float
    """Seconds of a cold start, from when its devices are there until the replica is up, without the load of the
    weights."""
    engine: EngineLimits | None = None
    """Set in slots for generation; None in others."""
    usable: bool = True
    """The run may hold its devices now. A slot that is not usable has no replica: another run has its devices."""
    reacquire_s: float = 0.0
    """Seconds that a cold start waits for its devices: their node has to come. 0 where they are held or free."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """The slots, and the times of moves between them. Latency models are the best known so far."""

    replica_slots: tuple[ReplicaSlot, ...]
    load_s: float
    """Seconds to load the weights of a version into one actor."""
    move_s: float
    """Seconds until a sample is at another actor by its tokens; its KV is computed again there."""
    heartbeat_s: float
    """Seconds between two heartbeats of a step."""
    max_tokens: int
    """Tokens of the longest possible response."""
    kept_usd_per_s: float = 0.0
    """Cost of a second of the run if no device is held: of nodes that are rented whole, of the learner's devices, and
    of owned devices what their release does not earn."""
    terms: RentalTerms = RentalTerms()  # noqa: RUF009 (frozen)
    """The cost of giving a device back and taking it again."""

    def generation(self) -> tuple[int, ...]:
        """Slots for generation actors."""
        slots = enumerate(self.replica_slots)
        return tuple(i for i, replica_slot in slots if replica_slot.role is FunctionRole.SAMPLES)


# -- its state


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot at the time of the view."""

    state: ReplicaState | None
    """The state of its replica; None if it has none. One that sleeps until its turn comes is STALE."""
    running: int = 0
    """The number of samples that decode."""
    waiting: int = 0
    """The number of samples that prefill, or wait for the replica to be ready."""


@dataclass(frozen=True, slots=True)
class StepView:
    """A step and the fleet at the time of an event. The arrays are the fleet's own: read only."""

    fleet: FleetView
    slots: tuple[SlotView, ...]
    step: int
    prompt_ids: tuple[str, ...]  # [groups]
    prompt_tokens: Ints  # [groups]
    group: Ints  # [samples], ascending
    tokens: Ints
    """`[samples]`: tokens so far, by the last heartbeat; the whole response once it is finished."""
    finished: Flags  # [samples]
    truncated: Flags  # [samples]: ended by max_tokens, not by itself
    home: Ints  # [samples]: slot, or UNASSIGNED
    prefixes: PrefixTree | None = None
    """The long prefixes that prompts share; None if prompts are known by their lengths alone."""

    def samples_at(self, slot: int) -> Ints:
        """Unfinished samples that belong to a slot, ascending."""
        return np.flatnonzero(self.home == slot)


def read_only(column: NDArray[N]) -> NDArray[N]:
    """The same memory, protected from writing: a column of a StepView."""
    seen = column.view()
    seen.flags.writeable = False
    return seen


# -- events


@dataclass(frozen=True, slots=True)
class StepBegan:
    """The step's samples are to be generated; all are unassigned. The answer must give each one a slot."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The generation actor at a slot can work: it has loaded the step's weights."""

    slot: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The generation actor at a slot was lost. These samples are unassigned now; the answer must give each a slot."""

    slot: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Time has passed; `tokens` and `finished` are up to date."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The last sample of the step has ended. Actors that stay awake from here on cost money without work."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A function other than generation has finished its work of the step. Its replica stays up unless it is released. A
    function that gets work and has no replica is started then, and waited for."""

    slot: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step's weights are published."""

    start_s: float
    end_s: float


Event = StepBegan | Serving | Lost | Heartbeat | Generated | Idle | StepEnded


# -- actions


@dataclass(frozen=True, slots=True)
class Assign:
    """Gives unassigned samples to a slot, in this order. They wait there if its actor does not serve yet."""

    slot: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Move:
    """Takes samples from one slot to another, with their tokens; their KV is computed again there. Samples that have
    ended meanwhile are ignored."""

    source: int
    target: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a replica at a slot that has none."""

    slot: int
    at_s: float | None = None
    """The earliest time of the start, for a step that is expected. Void if the replica is asked for earlier."""


@dataclass(frozen=True, slots=True)
class Release:
    """Drains a replica that has no samples left, and gives its devices back. Refused while samples belong to the
    slot, and for the learner, which keeps the run's state."""

    slot: int


@dataclass(frozen=True, slots=True)
class Note:
    """Writes a decision and its inputs to the ledger."""

    decision: Decision


Action = Assign | Move | Start | Release | Note


class Policy(Protocol):
    """Decides where samples are generated, and which replicas are up."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        """The actions to take now. Between two steps the view shows the last step."""
        ...
