"""The interface between the service and the drivers of its runs: what a driver delivers, and the answer.

A driver puts *items* into its outbox, numbered without gaps over all attempts of the run, and pushes them in order. The
service takes each once. A push also has the driver's state (`DriverState`), which is not kept, and its answer says
what the service wants of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhfless.control.lifecycle import Status
from rlhfless.control.objects import DeviceWork, ReplicaNow
from rlhfless.spec.errors import Problem

PROTOCOL = 2
"""Version of the messages between driver and service. An upgrade replaces one before the other, so both ignore fields
that they do not know; a new field has a default, and an item of a new kind may be lost. A change that the other side
cannot ignore takes another number, and driver and service then refuse each other."""

ITEMS_PER_PUSH = 500
"""Most items of one push: a driver that was cut off for long delivers in several."""


def refusal(driver: int, service: int) -> str:
    """Return the message, with the hint, for a driver and a service of different protocols."""
    return (
        f"the run's driver speaks protocol {driver}, and the service protocol {service}: the images of the Ray cluster "
        "and of the service are of different versions of rlhfless. Samples and checkpoints are kept. The "
        "service's operator brings both to one version (the chart: helm upgrade with ray.takeNewImage=true); then "
        "resume the run"
    )


class OtherProtocol(RuntimeError):
    """A driver was started by a service of another protocol."""

    def __init__(self, attempt: int, protocol: int) -> None:
        """`attempt` of the driver; `protocol` of the service."""
        super().__init__(refusal(PROTOCOL, protocol))
        self.attempt = attempt


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    """See PROTOCOL."""


class Item(_Message):
    """An occurrence in a run that must not be lost."""

    seq: int = Field(ge=1)
    attempt: int = Field(ge=1)
    at: float
    kind: str
    """Key of rlhfless.control.ingest.HANDLERS."""
    data: dict[str, Any]


class DriverExit(_Message):
    """How a driver has ended: the data of an item of kind `ended`."""

    status: Status
    """The status of the run, unless its user has requested another meanwhile."""
    reason: str
    error: dict[str, Any] | None = None
    """code, message, param, problems."""
    retry: bool = False
    """The run was not at fault: another driver may succeed."""


def failure(code: str, message: str, param: str | None = None, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return an error as JSON (objects.ErrorObject). `param`: the dotted field; `problems`: all wrong fields."""
    listed = [{"param": each.where or None, "message": each.what, "hint": each.hint or None} for each in problems]
    return {"code": code, "message": message, "param": param or None, "problems": listed}


OUT_OF_MEMORY = "out_of_memory"
"""Code of the error of a run of which the driver or a function needed more memory than it may have."""


class LeaseWanted(_Message):
    """The devices that a run needs to work, and those that it could use."""

    kind: str
    minimum: int = Field(ge=1)
    maximum: int = Field(ge=1)
    unit: int = Field(ge=1)
    held: int = Field(ge=0)
    """Devices that the run uses now."""
    tenants: int = Field(default=1, ge=1)
    """Most runs that it shares them with, itself included."""


class DriverState(_Message):
    """What a driver does at the moment of a push."""

    reason: str
    """What the driver does or waits for, in words."""
    left_s: float | None = None
    lease: LeaseWanted | None = None
    replicas: list[ReplicaNow] = []
    worked: list[DeviceWork] = []
    """Calls of the run's functions since the last push."""


class Introduction(_Message):
    """The fields of a push in every protocol."""

    protocol: int = PROTOCOL
    attempt: int = Field(ge=1)


class Push(Introduction):
    """A delivery of items, with the driver's state."""

    items: list[Item] = Field(max_length=ITEMS_PER_PUSH)
    now: DriverState
    marked: bool = False
    """The driver has left its mark in the run's folder, and has no answer yet."""


class PushAnswer(_Message):
    """What the service has received, and what it wants of the driver."""

    pushed: int
    """Number of the last item that the service has: the next push begins with the following item."""
    desired_state: Literal["run", "pause", "cancel", "yield"]
    """`yield`: stop after the step, as for a pause; the run goes on when its turn comes again."""
    granted: int
    """Devices that the run may hold; 0 while it waits for its lease."""
    lease_reason: str
    """Why the run waits for devices, in words."""


class HostAnswer(_Message):
    """The service's answer to the host of a cluster elsewhere."""

    leaving: dict[str, float] = {}
    """Addresses of nodes that are about to leave, and when (unix time; 0: not known)."""


class DriverOrder(_Message):
    """The input of a driver: a file in its run's folder that its user alone can read."""

    protocol: int = PROTOCOL
    run_id: str
    attempt: int
    token: str
    service_file: str
    """The file with the service's address, also after a restart."""
    service_url: str | None
    """The service's address, for a driver elsewhere."""
    ray_address: str
    one_machine: bool
    """The Ray cluster is this machine alone."""
    http_hosts: list[str]
    """See ServiceSettings.http_hosts."""
    roots: list[str] | None = None
    """See ServiceSettings.roots; None of a service that does not say."""
    allow_hub: bool = True
    """See ServiceSettings.allow_hub."""
    spec: dict[str, Any]
    """As it was POSTed."""
    sizes: dict[str, int] = {}
    """See ServiceSettings.sizes."""
    memory_gib: float | None = None
    """See ServiceSettings.driver_memory_gib."""
    priority: int = 0
    """The run's priority among the runs that share its devices."""
