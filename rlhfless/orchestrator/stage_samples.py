"""What a generation stage needs of its samples.

A stage (`rlhfless.orchestrator.generation`) knows actors, slots and requests. Its samples know what is generated: a
live run has `InFlightSamples`, with tokens and a journal; a simulated one has samples of known lengths.

A sample has the slot that the policy assigned (`rlhfless.scaling.assignment`), and is *on* at most one request to an
actor. The stage reconciles the two: it submits a sample without a request as soon as an actor serves at its slot, and
aborts a sample whose request went to another slot. Samples and requests are identified by numbers, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from rlhfless.functions.generation.messages import GenerateRequest, GenerationEvent
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.records import Decision, Group
from rlhfless.scaling.assignment import Assignment
from rlhfless.scaling.policy import FleetView, Ints, SlotView, StepView


class ReplayedTokens(Protocol):
    """How far the engines of migrated samples agree (rlhfless.orchestrator.in_flight_samples.Replayed)."""

    tokens: int

    def figures(self) -> Mapping[str, float]:
        """Return the comparison as metrics; empty if no token was compared."""

    def decision(self, step: int, at_s: float) -> Decision:
        """Return the comparison as a row of the trace."""


class AssignedSamples(Protocol):
    """The samples of a step as scaling sees them."""

    step: int
    slot_of: Ints
    """`[samples]`: the slot of each, or UNASSIGNED."""
    assignment: Assignment

    @property
    def replayed(self) -> ReplayedTokens:
        """How far the engines of migrated samples agree."""

    @property
    def left(self) -> Ints:
        """Unfinished samples."""

    @property
    def unassigned(self) -> Ints:
        """Unfinished samples without a slot."""

    def give(self, samples: Ints, slot: int) -> None:
        """Assign unfinished samples to a slot; those without a request wait there."""

    def lose(self, slot: int) -> Ints:
        """Unassign the samples of a slot, and return them."""

    def view(self, fleet: FleetView, slots: Sequence[SlotView]) -> StepView:
        """Return the policy's current view of the step."""

    def counts(self) -> tuple[Ints, Ints]:
        """Return the numbers of unfinished samples with at least one token, and without any, by slot `[slots]`."""

    def prefixes_decision(self, at_s: float) -> Decision | None:
        """Return the prompts' shared prefixes as a row of the trace; None without any."""


class StageSamples(AssignedSamples, Protocol):
    """The samples of a generation stage, without those that are known when it starts."""

    request: RolloutRequest
    resumed: tuple[int, int]
    """Number of samples that an earlier step deferred, and of their tokens."""
    ended: int
    """Number of samples that actors have delivered."""

    @property
    def from_earlier(self) -> Sequence[Group]:
        """Groups that were already complete, in the order of completion."""

    @property
    def complete(self) -> bool:
        """Whether all groups are complete."""

    # -- requests to actors

    def take_waiting(self, serves: Callable[[int], bool]) -> Sequence[tuple[int, Ints]]:
        """Return the waiting samples of slots where an actor serves, in the order of their assignment, as pairs of a
        slot and the samples of one request. They wait no longer: submit each."""

    def submit(self, samples: Ints, request: int, actor: str, version: str) -> GenerateRequest:
        """Put samples on a request, and return what the actor, which serves `version`, is to generate."""

    def on(self, requests: Collection[int]) -> Mapping[int, Ints]:
        """Return the samples on these requests, by request."""

    def strays(self, slot_of: Callable[[int], int]) -> Mapping[int, Ints]:
        """Return the samples that have another slot than their request, by request. `slot_of` returns the slot of a
        request; UNASSIGNED if its actor is gone."""

    def names(self, samples: Ints) -> Sequence[Any]:
        """Return the names by which actors know samples."""

    def session(self, sample: int) -> Any:
        """Return the name by which the environment knows a sample."""

    def take_parked(self) -> Sequence[int]:
        """Return the samples that have been parked since the last call (see rlhfless.scaling.assignment)."""

    def answered(self, samples: Ints) -> tuple[Ints, Ints]:
        """Unassign the parked ones of these samples, which have their answers; return them, and the slots they had."""

    # -- messages of actors

    def take(self, request: int, message: GenerationEvent) -> Sequence[Group]:
        """Apply a message of a request; return the groups that it completes. Aborted samples wait at their slots, and
        continue from their tokens. Samples that are no longer on the request are ignored."""

    def restart_lost(self, request: int) -> Ints:
        """Take the samples off a request whose actor died, and return them. They wait at their slots, and restart from
        their tokens at the request's start."""

    # -- the end of the stage

    def defer(self) -> int:
        """Defer unfinished samples to later steps, and return how many have tokens. The policy sees them end."""

    def learned(self, prompt_ids: Sequence[str]) -> None:
        """Record the groups that the step learns from."""
