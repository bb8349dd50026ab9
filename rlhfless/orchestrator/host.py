"""The host of a run, as the run sees it: it promises devices, may stop the run after a step, and is notified of what
happens. A run that the command line started has no host but this class: it may use all devices that it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhfless.records import Experience
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.util.errors import UserError

if TYPE_CHECKING:
    from rlhfless.orchestrator.base_run import BaseRun
    from rlhfless.orchestrator.run import RLRun


@dataclass(frozen=True, slots=True)
class DevicesWanted:
    """Devices that a run asks its host for."""

    kind: str
    minimum: int
    """The fewest with which it can work."""
    maximum: int
    """The number with which it has all actors that its spec allows."""
    unit: int
    """Devices of one generation actor, which it takes and gives back together."""
    tenants: int = 1
    """Most runs that it shares them with, itself included."""


class StopCause(StrEnum):
    """Why a run stops after a step, with a checkpoint."""

    PAUSE = "pause"
    """Its user asked for it."""
    YIELD = "yield"
    """A run of higher priority needs the devices."""
    LIMIT = "limit"
    """It has reached a limit of its spec."""


class RunPaused(UserError):
    """The run has stopped after a step; it can go on from its checkpoint."""

    def __init__(self, cause: StopCause, text: str) -> None:
        super().__init__(cause, text)
        self.cause = cause
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a host wants after a step."""

    stop: StopCause | None = None
    actors: int | None = None
    """Most generation actors from now on; None for as many as the spec allows."""


class Host:
    """A host that lets the run use all devices that it finds, until it ends, and the base of others. All methods but
    `devices` return at once."""

    async def devices(self, wanted: DevicesWanted) -> None:
        """Wait until the run may take the minimum. Raises FleetError if that does not happen in time."""

    def began(self, run: BaseRun, held: Callable[[str], int]) -> int | None:
        """Called before the run's fleet starts. `held`: the devices of a kind that the run takes or has when it is
        called.

        Returns the most generation actors for now; None for as many as the spec allows.
        """

    def drawn(self, run: RLRun, step: int, experience: Experience) -> None:
        """Called when the samples of a step are complete; of runs that draw."""

    def evaluated(self, run: RLRun, step: int, sampled: Experience, greedy: Experience) -> None:
        """Called when the samples of an evaluation after a step are scored; of runs that draw. `greedy`: one response
        to each prompt of `sampled`."""

    def after_step(self, run: BaseRun, step: int) -> Verdict:  # noqa: ARG002
        """Called when a step is done and evaluated."""
        return Verdict()

    def saved(self, checkpoints: Checkpoints) -> None:
        """Called when a checkpoint was saved; others may have been deleted."""
