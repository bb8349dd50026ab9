"""The interface between a fleet and its scaling policy: events in, actions out, with the time as an argument. Pure.

The live fleet calls a policy on the wall clock, the simulator on a virtual one, so a simulated policy runs unchanged in
production. A policy is called at every event below and returns actions, which are executed in order. It sees no
response length before the sample has ended, and no future events.

An action that the fleet cannot execute is a policy fault. So is an answer that leaves an unfinished sample without a
slot, or at a slot without a replica that is running or has been started. `rlhfless.scaling.assignment` enforces these
rules for both fleets; each fleet determines for itself what can be started and released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

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
"""Slot of a sample that has ended, was lost, or has not been assigned yet."""


# -- the fleet


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The capacity and the latency model of an engine in a slot."""

    model: EngineModel
    kv_capacity_tokens: int
    """Capacity as reported by the engine. vLLM counts sequences of maximum length: for a model with windows, shorter
    sequences fill the cache at fewer tokens."""
    max_sequences: int
    """Maximum number of sequences that run at once."""


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """The properties of a slot, which holds one replica of a function.

    Actions refer to a slot by its index in the fleet.
    """

    function: str
    role: FunctionRole
    kind: str
    """Device kind, as in the price book."""
    devices: tuple[str, ...]
    """Names of its devices. If slots share a device whose memory cannot hold them all, the fleet makes them take
    turns: a function with work wakes, and the others sleep."""
    node: str
    usd_per_s: float
    """Saving of a release: the price of all its devices while a replica holds them, or 0 if they are paid for in any
    case (`FleetView.kept_usd_per_s`)."""
    start_s: float
    """Seconds of a cold start, from the availability of its devices until the replica is ready, excluding the load
    of the weights."""
    engine: EngineLimits | None = None
    """Set in generation slots; None in others."""
    usable: bool = True
    """Whether the run may hold its devices now. An unusable slot has no replica: another run has its devices."""
    reacquire_s: float = 0.0
    """Seconds that a cold start waits for its devices because their node has to join; 0 if they are held or free."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """The slots, and the times of transitions. Latency models are the best known so far."""

    replica_slots: tuple[ReplicaSlot, ...]
    load_s: float
    """Seconds to load the weights of a version into one actor."""
    move_s: float
    """Seconds until a sample's tokens are migrated to another actor, which recomputes its KV."""
    heartbeat_s: float
    """Seconds between two heartbeats of a step."""
    max_tokens: int
    """Tokens of the longest possible response."""
    kept_usd_per_s: float = 0.0
    """Cost per second of the run even if no device is held: nodes rented as a whole, the learner's devices, and the
    part of owned devices' cost that their release does not recover."""
    terms: RentalTerms = RentalTerms()  # noqa: RUF009 (frozen)
    """Cost of releasing and reacquiring a device."""

    def generation(self) -> tuple[int, ...]:
        slots = enumerate(self.replica_slots)
        return tuple(i for i, replica_slot in slots if replica_slot.role is FunctionRole.SAMPLES)


# -- its state


class SlotView(NamedTuple):
    """A slot at the time of the view."""

    state: ReplicaState | None
    """State of its replica; None if it has none. A replica that sleeps until its turn is STALE."""
    running: int = 0
    """Number of decoding samples."""
    waiting: int = 0
    """Number of samples that prefill, or wait for the replica to be ready."""


@dataclass(frozen=True, slots=True)
class StepView:
    """A step and the fleet at the time of an event. The arrays belong to the fleet: read only."""

    fleet: FleetView
    slots: tuple[SlotView, ...]
    step: int
    prompt_ids: tuple[str, ...]  # [groups]
    prompt_tokens: Ints  # [groups]
    group: Ints  # [samples], ascending
    tokens: Ints
    """`[samples]`: tokens as of the last heartbeat; the whole response once finished."""
    finished: Flags  # [samples]
    truncated: Flags  # [samples]: ended by max_tokens
    home: Ints  # [samples]: slot, or UNASSIGNED
    prefixes: PrefixTree | None = None
    """Long prefixes shared by prompts; None if only prompt lengths are known."""
    parked: Flags | None = None
    """`[samples]`: unfinished, and without a slot while they wait for their environment; None: no sample does."""
    waited_s: NDArray[np.float64] | None = None
    """`[samples]`: seconds for which each has waited for its environment, as far as known; None without one."""

    def samples_at(self, slot: int) -> Ints:
        """Return the unfinished samples that belong to a slot, ascending."""
        return np.flatnonzero(self.home == slot)


def read_only(column: NDArray[N]) -> NDArray[N]:
    """Return a read-only view of an array, for a field of a StepView."""
    seen = column.view()
    seen.flags.writeable = False
    return seen


# -- events


@dataclass(frozen=True, slots=True)
class StepBegan:
    """A step starts, with all samples unassigned. The answer must assign each one to a slot."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The generation actor at a slot is ready: it has loaded the step's weights."""

    slot: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The generation actor at a slot was lost, and its samples are unassigned.

    The answer must assign each of them to a slot.
    """

    slot: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Answered:
    """The environment has answered samples that were parked. They are unassigned.

    Those that the answer assigns to no slot return to the slots that they had, or to others with an actor.
    """

    samples: Ints
    slots: Ints
    """The slots that they had."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Periodic event during a step; `tokens` and `finished` are up to date."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The last sample of the step has ended. From here on, awake actors cost money without doing work."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A function other than generation has finished its work for the step.

    Its replica keeps running unless it is released. If a function without a replica gets work, a replica is started and
    waited for.
    """

    slot: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step's weights are published."""

    start_s: float
    end_s: float


Event = StepBegan | Serving | Lost | Answered | Heartbeat | Generated | Idle | StepEnded


# -- actions


@dataclass(frozen=True, slots=True)
class Assign:
    """Assign unassigned samples to a slot, in this order. They wait there until its actor is serving."""

    slot: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Move:
    """Migrate samples from one slot to another, keeping their tokens.

    The target recomputes their KV. Samples that have ended in the meantime are ignored.
    """

    source: int
    target: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica at a slot that has none."""

    slot: int
    at_s: float | None = None
    """Earliest time of the start, for an expected step. Ignored if the replica is needed earlier."""


@dataclass(frozen=True, slots=True)
class Release:
    """Drain a replica that has no samples left, and release its devices.

    Refused while samples belong to the slot, and for the learner, which keeps the run's state.
    """

    slot: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write a decision and its inputs to the ledger."""

    decision: Decision


Action = Assign | Move | Start | Release | Note


class Policy(Protocol):
    """Decides where samples are generated, and which replicas run."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        """Return the actions to take now. Between two steps the view shows the last step."""
        ...
