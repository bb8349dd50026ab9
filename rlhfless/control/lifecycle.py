"""The life cycle of a run: which status follows which, and what a user may request in each. Pure.

    queued -> validating -> provisioning -> running -> succeeded | failed | cancelled
                                 running -> pausing -> paused -> queued (resumed)
                    any with a driver -> cancelling -> cancelled

A `queued` run waits for its turn, a `provisioning` run for devices and for the start of its functions. A `paused` run
keeps its checkpoint and holds no device. A run that gives way to a run of higher priority is `queued` again.
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
    """The last request of the run's user."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


ENDED = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED})
"""Statuses that never change again."""

AT_REST = ENDED | {Status.PAUSED}
"""Statuses of runs without a driver or a device."""

DRIVEN = frozenset({Status.VALIDATING, Status.PROVISIONING, Status.RUNNING, Status.PAUSING, Status.CANCELLING})
"""Statuses of runs that have a driver, or should have one."""

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
"""The statuses that may follow each status. Every driver of a run begins with `validating`."""


class NotPossible(Exception):
    """A request that is impossible in the run's status; the text says why, and what is possible."""


def apply_request(status: Status, desired: DesiredState, request: DesiredState) -> tuple[Status, DesiredState]:
    """Return status and desired state of a run after its user's request. Idempotent. Raises NotPossible."""
    if request is DesiredState.CANCEL:
        if status in ENDED - {Status.CANCELLED}:
            raise NotPossible(f"the run has {_ended(status)}; there is nothing left to cancel")
        return (Status.CANCELLING if status in DRIVEN else Status.CANCELLED), request
    if desired is DesiredState.CANCEL or status is Status.CANCELLING:
        raise NotPossible("the run is cancelled; start a new one, from its newest checkpoint if it should go on there")
    if status in ENDED:
        raise NotPossible(f"the run has {_ended(status)}; start a new one")
    if request is DesiredState.PAUSE:
        if status is Status.QUEUED:
            return Status.PAUSED, request
        return (Status.PAUSED if status is Status.PAUSED else Status.PAUSING), request
    if status is Status.PAUSED:
        return Status.QUEUED, request
    # A pause that is called off before it is done: the driver is told to go on, and reports what it does.
    return (Status.RUNNING if status is Status.PAUSING else status), request


def _ended(status: Status) -> str:
    return {Status.SUCCEEDED: "succeeded", Status.FAILED: "failed", Status.CANCELLED: "been cancelled"}[status]
