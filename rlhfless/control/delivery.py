"""The interface between the service and the drivers of its runs: deliveries and their answers.

A driver puts *items* into its outbox, numbered without gaps across all attempts of the run, and pushes them in order.
The service accepts each item once. A push also carries the driver's state (`DriverState`), which is not stored. The
answer carries the service's requests to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhfless.control.lifecycle import Status
from rlhfless.control.objects import DeviceWork, FleetEngineNow, ReplicaNow
from rlhfless.spec.errors import Problem

PROTOCOL = 2
"""Version of the messages between driver and service. An upgrade replaces one side first, so both sides ignore unknown
fields; a new field has a default, and an item of a new kind may be lost. A change that the other side cannot ignore
raises the number, and driver and service then refuse each other."""

ITEMS_PER_PUSH = 500
"""Maximum number of items in a push. A driver that was cut off for long delivers in several pushes."""


def refusal(driver: int, service: int) -> str:
    """Return the message, with a hint, for a driver and a service with different protocols."""
    return (
        f"the run's driver speaks protocol {driver}, and the service protocol {service}: the images of the Ray cluster "
        "and of the service are of different versions of rlhfless. Samples and checkpoints are kept. The "
        "service's operator brings both to one version (the chart: helm upgrade with ray.takeNewImage=true); then "
        "resume the run"
    )


class OtherProtocol(RuntimeError):
    """A service with another protocol started the driver."""

    def __init__(self, attempt: int, protocol: int) -> None:
        """`attempt` of the driver; `protocol` of the service."""
        super().__init__(refusal(PROTOCOL, protocol))
        self.attempt = attempt


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    """See PROTOCOL."""


class Item(_Message):
    """A run event that must not be lost."""

    seq: int = Field(ge=1)
    attempt: int = Field(ge=1)
    at: float
    kind: str
    """Key of rlhfless.control.ingest.HANDLERS."""
    data: dict[str, Any]


class DriverExit(_Message):
    """How a driver has ended: the data of an item of kind `ended`."""

    status: Status
    """The status of the run, unless its user has requested another one meanwhile."""
    reason: str
    error: dict[str, Any] | None = None
    """code, message, param, problems."""
    retry: bool = False
    """True if the run was not at fault, so another driver may succeed."""


def failure(code: str, message: str, param: str | None = None, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return an error as JSON (objects.ErrorObject). `param`: the dotted field; `problems`: all wrong fields."""
    listed = [{"param": each.where or None, "message": each.what, "hint": each.hint or None} for each in problems]
    return {"code": code, "message": message, "param": param or None, "problems": listed}


OUT_OF_MEMORY = "out_of_memory"
"""Error code of a run whose driver or function exceeded its memory limit."""


class LeaseWanted(_Message):
    """The devices that a run needs to work, and those that it could use."""

    kind: str
    minimum: int = Field(ge=1)
    maximum: int = Field(ge=1)
    unit: int = Field(ge=1)
    held: int = Field(ge=0)
    """Number of devices that the run uses now."""
    tenants: int = Field(default=1, ge=1)
    """Maximum number of runs that share the devices, including this run."""
    sizes: list[int] = []
    """Numbers of devices that an elastic run can have; empty for others."""
    seen_s: dict[str, float] = {}
    """Measured seconds per step of an elastic run, by number of devices."""
    steps_left: float = 0.0
    change_s: float = 0.0
    """Seconds that a change of an elastic run's size costs."""


class DriverState(_Message):
    """The state of a driver at the moment of a push."""

    reason: str
    """Current activity or wait, as text."""
    left_s: float | None = None
    lease: LeaseWanted | None = None
    replicas: list[ReplicaNow] = []
    fleet: list[FleetEngineNow] = []
    """Engines that the run shares with others."""
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
    """The driver has left its mark in the run's folder, and has not received an answer yet."""


class PushAnswer(_Message):
    """The service's acknowledgement, and its requests to the driver."""

    pushed: int
    """Number of the last stored item. The next push starts with the following item."""
    desired_state: Literal["run", "pause", "cancel", "yield"]
    """`yield`: stop after the step as for a pause; the run resumes at its next turn."""
    granted: int
    """Number of devices that the run may hold; 0 while it waits for its lease."""
    lease_reason: str
    """Why the run waits for devices, as text."""
    size_reason: str = ""
    """Why an elastic run has this number of devices, as text."""


class HostAnswer(_Message):
    """The service's answer to the host of a remote cluster."""

    leaving: dict[str, float] = {}
    """Addresses of nodes that are about to leave, and the unix time at which they leave; 0 if unknown."""
    wanted: dict[str, int] | None = None
    """Devices to request from the cluster's autoscaler, by kind; None to leave the last request."""


class DriverOrder(_Message):
    """The input of a driver: a file in its run's folder that only its user can read."""

    protocol: int = PROTOCOL
    run_id: str
    attempt: int
    token: str
    service_file: str
    """File with the service's address, also after a restart."""
    service_url: str | None
    """The service's address, for a remote driver."""
    ray_address: str
    one_machine: bool
    """Whether the Ray cluster consists of this machine alone."""
    http_hosts: list[str]
    """See ServiceSettings.http_hosts."""
    roots: list[str] | None = None
    """See ServiceSettings.roots. None if the service does not send them."""
    allow_hub: bool = True
    """See ServiceSettings.allow_hub."""
    spec: dict[str, Any]
    """The spec as POSTed."""
    sizes: dict[str, int] = {}
    """See ServiceSettings.sizes."""
    memory_gib: float | None = None
    """See ServiceSettings.driver_memory_gib."""
    priority: int = 0
    """The run's priority among the runs that share its devices."""
    capacity: dict[str, int] = {}
    """See ServiceSettings.capacity."""
