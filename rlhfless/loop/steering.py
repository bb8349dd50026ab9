"""One policy, asked on the wall clock: what happens to a run's generation becomes its events, its actions are done.

The simulator asks the same policies on a virtual clock (rlhfless.scaling.policy has the contract). There a policy's
fault stops the simulation; here it must not cost a run. Actions up to the fault stand, what they leave without a place
is dealt out evenly, and the policy is asked again at the next event. The first fault is logged with its trace, all are
counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rlhfless.fleet.replica import ReplicaLost
from rlhfless.loop.board import Board
from rlhfless.loop.even_deal import deal
from rlhfless.records import Decision
from rlhfless.scaling.policy import (
    NOBODY,
    Action,
    Assign,
    Event,
    FleetView,
    Move,
    Note,
    PlaceView,
    Policy,
    Release,
    Start,
    StepBegan,
    StepView,
)

log = logging.getLogger(__name__)


class PolicyFault(Exception):
    """A policy asked for what the fleet cannot do, or forgot samples. Says which."""


class Fleet(Protocol):
    """What a policy sees of a fleet, and may do to it."""

    def view(self) -> FleetView:
        """The rooms, with the best figures that are known by now."""

    def places(self, board: Board) -> tuple[PlaceView, ...]:
        """Who is there."""

    def expects(self, place: int) -> bool:
        """Whether a generation actor serves at a place, or will."""

    def start(self, place: int, at_s: float | None, step: int) -> None:
        """See rlhfless.scaling.policy.Start. Raises PolicyFault."""

    def release(self, place: int, tier: str | None, step: int) -> None:
        """See rlhfless.scaling.policy.Release. Raises PolicyFault."""


class Steering:
    """Asks one policy for one run, or for one stage."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        note: Callable[[Decision], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._note = note
        self._clock = clock
        self._feasible = True
        self._view: FleetView | None = None
        self._board: Board | None = None
        self._faults = 0
        self._figures: dict[str, float] = {}

    @property
    def step(self) -> int | None:
        """The step that was steered last."""
        return None if self._board is None else self._board.step

    @property
    def figures(self) -> Mapping[str, float]:
        """Metrics of the step that was steered last."""
        return {**self._figures, "policy_faults": float(self._faults)}

    def ask(self, event: Event, board: Board | None = None) -> None:
        """Ask what to do now, and do it; without a board, the one of the last step is shown.

        Raises ReplicaLost if samples are left and nobody is there, or will be, to draw them.
        """
        board = board or self._board
        if board is None:
            return  # no step was steered yet: there is nothing to see
        if isinstance(event, StepBegan):
            self._board, self._view = board, self._fleet.view()
            self._figures = {"moved_samples": 0.0}
        try:
            for action in self._policy.decide(self._clock(), event, self._seen(board)):
                self._carry_out(action, board)
            self._check(board)
        except Exception as fault:
            self._faulted(event, fault)
        self._mend(board)
        if isinstance(event, StepBegan):
            self._figures["actors_wanted"] = float(len(set(board.home[board.left].tolist())))

    def _seen(self, board: Board) -> StepView:
        view = self._view if self._view is not None else self._fleet.view()
        return board.view(view, self._fleet.places(board))

    def _carry_out(self, action: Action, board: Board) -> None:
        match action:
            case Assign(place, samples):
                self._require_room(place)
                if (taken := board.home[samples] != NOBODY).any():
                    raise PolicyFault(f"sample {samples[taken][0]} was given to {place}, and belongs to another place")
                board.give(samples.tolist(), place)
            case Move(source, target, samples, with_kv):
                if with_kv:
                    raise PolicyFault(f"samples are to go from {source} with their KV, and no connector moves it")
                self._require_room(target)
                moving = samples[board.home[samples] == source]
                board.give(moving.tolist(), target)
                self._figures["moved_samples"] += moving.size
            case Start(place, at_s):
                self._fleet.start(place, at_s, board.step)
            case Release(place, tier):
                if left := int((board.home == place).sum()):
                    raise PolicyFault(f"place {place} is released with {left} samples")
                self._fleet.release(place, tier, board.step)
            case Note(decision):
                self._note(decision)
                if decision.kind == "plan":
                    self._planned(decision)

    def _planned(self, decision: Decision) -> None:
        """A step's plan. That no plan can keep the contract is said when it begins to be so, not at every step."""
        inputs = decision.inputs
        if "step_s" in inputs:
            self._figures["planned_generation_s"] = float(inputs["step_s"])
        feasible = inputs.get("feasible") is not False
        if self._feasible and not feasible:
            what = "step %d: no plan for generation keeps its part of the contract (%s); the nearest is kept: %s"
            log.warning(what, decision.step, inputs["reason"], inputs["nearest"])
        self._feasible = feasible

    def _require_room(self, place: int) -> None:
        if self._view is not None and place not in self._view.generation():
            raise PolicyFault(f"samples were given to place {place}, which has no room for a generation actor")

    def _check(self, board: Board) -> None:
        # Where nobody is left, that is no fault of the policy's: `_mend` says so.
        if (forgotten := board.forgotten).size and any(map(self._fleet.expects, self._fleet.view().generation())):
            raise PolicyFault(f"{forgotten.size} samples have no place, such as {forgotten[0]}")
        if stranded := self._stranded(board):
            raise PolicyFault(f"samples wait at place {stranded[0]}, where nobody is or will be")

    def _stranded(self, board: Board) -> list[int]:
        """Places with samples, and nobody to draw them."""
        homes = set(board.home[board.left].tolist()) - {NOBODY}
        return [place for place in sorted(homes) if not self._fleet.expects(place)]

    def _mend(self, board: Board) -> None:
        """Whatever was decided, every sample has a place after this."""
        for place in self._stranded(board):
            board.take_from(place)
        if not board.forgotten.size:
            return
        for assign in deal(self._seen(board), board.forgotten):
            board.give(assign.samples.tolist(), assign.place)
        if left := board.forgotten.size:
            raise ReplicaLost(f"no generation actor is left for {left} unfinished samples")

    def _faulted(self, event: Event, fault: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            log.error(
                "the scaling policy failed at %s; samples without a place are dealt out evenly, there and whenever "
                "it fails again (metric policy_faults)",
                type(event).__name__,
                exc_info=fault,
            )
