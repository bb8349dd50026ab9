"""The run's view of its host, which grants devices, may stop the run after a step, and is notified of events.

A run started from the command line uses the class `Host` itself, and may use all devices that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlhfless.records import Experience
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.util.errors import UserError

if TYPE_CHECKING:
    from rlhfless.orchestrator.base_run import BaseRun
    from rlhfless.orchestrator.run import RLRun


@dataclass(frozen=True, slots=True)
class DevicesWanted:
    """Devices that a run requests from its host."""

    kind: str
    minimum: int
    """The fewest devices with which it can run."""
    maximum: int
    """The devices for all actors that its spec allows."""
    unit: int
    """Devices of one generation actor, acquired and released together."""
    tenants: int = 1
    """Maximum number of runs on the devices, including this one."""
    sizes: tuple[int, ...] = ()
    """Numbers of devices that an elastic run can have; empty for others, which grow by units."""
    present: int = 0
    """Devices of the kind that an elastic run's cluster has, whoever holds them, or may have (Host.capacity)."""


class StopCause(StrEnum):
    """The reason why a run stops after a step, with a checkpoint."""

    PAUSE = "pause"
    """Its user requested it."""
    YIELD = "yield"
    """A run of higher priority needs the devices."""
    LIMIT = "limit"
    """It has reached a limit of its spec."""
    RESIZE = "resize"
    """It continues with another number of devices."""


class RunPaused(UserError):
    """The run has stopped after a step, and can resume from its checkpoint."""

    def __init__(self, cause: StopCause, text: str) -> None:
        super().__init__(cause, text)
        self.cause = cause
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The host's instructions to a run after a step."""

    stop: StopCause | None = None
    actors: int | None = None
    """Maximum number of generation actors from now on; None for the spec's maximum."""


class Host:
    """A host that lets the run use all devices that it finds, until its end; also the base class of other hosts. All
    methods except `devices` return without waiting."""

    capacity: Mapping[str, int] = MappingProxyType({})
    """Most devices by kind, where an autoscaler adds nodes."""

    watches_nodes = False
    """Whether an elastic run shows the host its nodes (`look`). A service watches them itself."""

    @property
    def changes_size(self) -> bool:
        """Whether the run stops to start again with another number of devices; its engines then stay."""
        return False

    async def devices(self, wanted: DevicesWanted) -> int:
        """Wait until the run may acquire the minimum, or one of its sizes; return the number of devices that it may
        acquire now. Raises FleetError on timeout."""
        there = [size for size in wanted.sizes if size <= wanted.present]
        return max(there, default=wanted.minimum) if wanted.sizes else wanted.maximum

    def began(self, run: BaseRun, held: Callable[[str], int]) -> int | None:
        """Handle the run before its fleet starts; return the maximum number of generation actors for now, or None for
        the spec's maximum. `held` returns the current number of devices of a kind that the run holds or waits for.
        """

    def look(self, nodes: Sequence[int]) -> None:
        """Handle the devices of each node that stays, as of now. Called every few seconds."""

    def generated(self, run: RLRun, step: int, experience: Experience) -> None:
        """Handle the complete samples of a step. Called for runs that generate."""

    def evaluated(self, run: RLRun, step: int, sampled: Experience, greedy: Experience) -> None:
        """Handle the scored samples of an evaluation after a step. Called for runs that generate. `greedy` has one
        response to each prompt of `sampled`."""

    def after_step(self, run: BaseRun, step: int) -> Verdict:  # noqa: ARG002
        """Return the instructions to the run after a finished and evaluated step."""
        return Verdict()

    def saved(self, checkpoints: Checkpoints) -> None:
        """Handle a new checkpoint. Older ones may have been deleted."""
