"""What a fleet and its scaling policy say to each other: events in, actions out, the clock handed in. Pure.

The live fleet asks a policy on the wall clock, the simulator on a virtual one: the policy that was checked there is the
one that runs here. A policy is asked at every event below and answers with actions, which are carried out in their
order. It sees no response length before its sample has ended, and no future.

An action that the fleet cannot carry out is a fault of the policy. So is an answer after which an unfinished sample
belongs to no slot, or to a slot where no replica is up or has been asked to come up. `rlhfless.scaling.assignment`
has these rules, for both fleets; what can be started, released and put to sleep is each fleet's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhfless.records import Decision, FunctionName, ReplicaState
from rlhfless.scaling.engine_model import EngineModel

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
N = TypeVar("N", bound=np.generic)

UNASSIGNED = -1
"""The slot of a sample that has ended, was lost, or was not given to a slot yet."""


# -- what there is


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine in a slot can hold, and how long it takes."""

    model: EngineModel
    kv_capacity_tokens: int
    max_sequences: int
    """Most sequences that it runs at once."""
    prefill_only: bool = False
    """Its samples leave after their first token, with their KV, to decode elsewhere."""


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """Slot for one replica of a function. A slot is the index of a slot in its fleet."""

    function: FunctionName
    kind: str
    """Device kind, as the price book names it."""
    devices: tuple[str, ...]
    """Names of its devices. Slots that share a device take turns on it, unless they may be `beside` each other: one
    replica at a time is awake there, and one that is started or woken meanwhile waits until that one sleeps or is
    released."""
    node: str
    usd_per_s: float
    """Of all its devices while a replica holds them."""
    start_s: float
    """A cold start until it is up, without the load of the weights."""
    wake_s: Mapping[str, float]
    """By sleep tier: until it is up again, without the load of the weights."""
    resident_usd_per_s: Mapping[str, float]
    """By sleep tier: what it costs to sleep there."""
    engine: EngineLimits | None = None
    """In a slot for generation."""
    beside: bool = False
    """It may be awake beside others on its devices: CPU cores, or a device with memory for both."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """The slots, and how long moves between them take. Latency models are the best that are known by now."""

    replica_slots: tuple[ReplicaSlot, ...]
    load_s: float
    """Weights of a version into one actor."""
    move_s: float
    """Seconds until a sample is at another actor by its tokens; its KV is computed again there."""
    kv_token_s: float
    """Seconds per token more if its KV travels too; infinite where no connector does that."""
    beat_s: float
    """Between two beats of a step."""
    max_tokens: int
    """The longest response."""

    def generation(self) -> tuple[int, ...]:
        """Slots for generation actors."""
        return tuple(
            i for i, replica_slot in enumerate(self.replica_slots) if replica_slot.function is FunctionName.GENERATION
        )


# -- how it stands


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot at the instant it is shown."""

    state: ReplicaState | None
    """None: no replica."""
    tier: str | None = None
    """The tier it sleeps in."""
    running: int = 0
    """Samples that decode."""
    waiting: int = 0
    """Samples that prefill, or wait for the replica to be ready."""

    @property
    def working(self) -> bool:
        return self.running + self.waiting > 0


@dataclass(frozen=True, slots=True)
class StepView:
    """A step and the fleet, at the instant at which they are shown. The arrays are the fleet's own: read only."""

    fleet: FleetView
    slots: tuple[SlotView, ...]
    step: int
    prompt_ids: tuple[str, ...]  # [groups]
    prompt_tokens: Ints  # [groups]
    group: Ints  # [samples], ascending
    tokens: Ints
    """`[samples]`: drawn so far, by the last beat; the whole response once it is finished."""
    finished: Flags  # [samples]
    truncated: Flags  # [samples]: ended by max_tokens, not by itself
    home: Ints  # [samples]: slot, or UNASSIGNED

    def samples_at(self, slot: int) -> Ints:
        """Unfinished samples that belong to a slot, ascending."""
        return np.flatnonzero(self.home == slot)


def read_only(column: NDArray[N]) -> NDArray[N]:
    """The same memory, protected from writing: a column of a StepView."""
    seen = column.view()
    seen.flags.writeable = False
    return seen


# -- what happens


@dataclass(frozen=True, slots=True)
class StepBegan:
    """The step's samples are to be drawn; all of them are unassigned. The answer must give each one a slot."""


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
class Beat:
    """Time went on; `tokens` and `finished` are new."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The last sample of the step has ended. Actors that stay idle from here on cost money."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A function other than generation has done its work of the step. Its replica stays up unless it is released; a
    function that has work and no replica is started then, and waited for."""

    slot: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step's weights are published."""

    start_s: float
    end_s: float


Event = StepBegan | Serving | Lost | Beat | Generated | Idle | StepEnded


# -- what to do


@dataclass(frozen=True, slots=True)
class Assign:
    """Gives unassigned samples to a slot, in this order. They wait there if its actor does not serve yet."""

    slot: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Move:
    """Takes samples from one slot to another, with their tokens. Samples that have ended meanwhile are left out."""

    source: int
    target: int
    samples: Ints
    with_kv: bool = False
    """Their KV travels too, where there is a connector; else it is computed again at the target."""


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a replica at a slot that has none, or wakes the one that sleeps there."""

    slot: int
    at_s: float | None = None
    """Not before then: to be ready for a step that is foreseen. Void if the replica is asked for earlier."""


@dataclass(frozen=True, slots=True)
class Release:
    """Drains a replica that has no samples left, to sleep in `tier`, or to give its devices back (None). Refused while
    samples belong to the slot."""

    slot: int
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Writes a decision and what it was made from to the ledger."""

    decision: Decision


Action = Assign | Move | Start | Release | Note


class Policy(Protocol):
    """Decides where samples are drawn, and which replicas are up."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        """What to do now. Between two steps the view shows the last one."""
        ...
