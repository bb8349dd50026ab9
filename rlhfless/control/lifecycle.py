"""The life cycle of a run: the transitions between statuses, and the user requests allowed in each. Pure functions.

    queued -> validating -> provisioning -> running -> succeeded | failed | cancelled
                                 running -> pausing -> paused -> queued (resumed)
                    any with a driver -> cancelling -> cancelled

A `queued` run waits for its turn, and a `provisioning` run waits for devices and for its functions to start. A `paused`
run keeps its checkpoint and holds no device. A run that yields to a run of higher priority is `queued` again.
"""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    QUEUED = "queued"
    VALIDATING = "validating"
    PROVISIONING = "provisioning"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DesiredState(StrEnum):
    """The last state that the run's user requested."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


ENDED = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED})
"""Final statuses."""

AT_REST = ENDED | {Status.PAUSED}
"""Statuses of runs without a driver or a device."""

DRIVEN = frozenset({Status.VALIDATING, Status.PROVISIONING, Status.RUNNING, Status.PAUSING, Status.CANCELLING})
"""Statuses of runs that have a driver or should have one."""

FOLLOWING: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.VALIDATING, Status.PAUSED, Status.CANCELLED, Status.FAILED}),
    **{status: (DRIVEN - {status}) | AT_REST | {Status.QUEUED} for status in DRIVEN},
    Status.VALIDATING: (DRIVEN - {Status.VALIDATING, Status.RUNNING}) | AT_REST | {Status.QUEUED},
    Status.CANCELLING: ENDED,
    Status.PAUSED: frozenset({Status.QUEUED, Status.CANCELLED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}
"""The statuses that may follow each status. Every driver of a run starts with `validating`."""


class NotPossible(Exception):
    """A request is impossible in the run's status. The message says why, and what is possible."""


def apply_request(status: Status, desired: DesiredState, request: DesiredState) -> tuple[Status, DesiredState]:
    """Return a run's status and desired state after its user's request. Idempotent. Raises NotPossible."""
    if request is DesiredState.CANCEL:
        if status in ENDED - {Status.CANCELLED}:
            raise NotPossible(f"the run has {_ended(status)}; there is nothing left to cancel")
        return (Status.CANCELLING if status in DRIVEN else Status.CANCELLED), request
    if desired is DesiredState.CANCEL or status is Status.CANCELLING:
        raise NotPossible("the run is cancelled; start a new one, from its newest checkpoint to continue there")
    if status in ENDED:
        raise NotPossible(f"the run has {_ended(status)}; start a new one")
    if request is DesiredState.PAUSE:
        if status is Status.QUEUED:
            return Status.PAUSED, request
        return (Status.PAUSED if status is Status.PAUSED else Status.PAUSING), request
    if status is Status.PAUSED:
        return Status.QUEUED, request
    # The pause is revoked before it is complete: the driver continues, and reports its own status.
    return (Status.RUNNING if status is Status.PAUSING else status), request


def _ended(status: Status) -> str:
    return {Status.SUCCEEDED: "succeeded", Status.FAILED: "failed", Status.CANCELLED: "been cancelled"}[status]
