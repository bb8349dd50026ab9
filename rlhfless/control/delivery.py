"""What a driver delivers, and what it is answered: the one interface between the service and the drivers of its runs.

A driver puts *items* into its outbox, numbered without gaps over all attempts of the run, and pushes them in order. The
service takes each once. A push also says what the driver does now (`Now`), which is not kept, and its answer says what
is wanted of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhfless.control.lifecycle import Status
from rlhfless.control.objects.fleet import ReplicaNow, Worked
from rlhfless.spec.errors import Problem

PROTOCOL = 1
"""Version of what a driver and the service say to each other. An upgrade replaces one before the other, so both leave
out fields that they do not know; a field that is added has a default, a kind of item that is added may be lost. A
change that the other side cannot leave out takes another number, and the two then refuse each other."""

ITEMS_PER_PUSH = 500
"""At most so many items in one push: a driver that was cut off for long delivers in several."""


def refusal(driver: int, service: int) -> str:
    """Why a driver and a service of different protocols do not work together, and the hint."""
    return (
        f"the run's driver speaks protocol {driver}, and the service protocol {service}: the images of the Ray cluster "
        "and of the service are of different versions of rlhfless. What was drawn and learned is kept. The "
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
    """Something that happened, which must not be lost."""

    seq: int = Field(ge=1)
    attempt: int = Field(ge=1)
    at: float
    kind: str
    """Key of rlhfless.control.ingest.TAKES."""
    data: dict[str, Any]


class DeliveryEnding(_Message):
    """How a driver has ended: the data of an item of kind `ended`."""

    status: Status
    """The status of the run, if no other was wished for meanwhile."""
    reason: str
    error: dict[str, Any] | None = None
    """code, message, param, problems."""
    retry: bool = False
    """It was no fault of the run: another driver may do better."""


def failure(code: str, message: str, param: str | None = None, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """An error as JSON (objects.ErrorObject). `param`: the dotted field; `problems`: all wrong fields."""
    listed = [{"param": each.where or None, "message": each.what, "hint": each.hint or None} for each in problems]
    return {"code": code, "message": message, "param": param or None, "problems": listed}


OUT_OF_MEMORY = "out_of_memory"
"""Code of the error of a run whose driver needed more memory than it may have."""


class LeaseWanted(_Message):
    """Devices that a run needs to work, and those that it could use."""

    kind: str
    minimum: int = Field(ge=1)
    maximum: int = Field(ge=1)
    unit: int = Field(ge=1)
    held: int = Field(ge=0)
    """Devices that it uses now."""
    tenants: int = Field(default=1, ge=1)
    """Most runs that it shares them with, itself included."""


class Now(_Message):
    """What a driver does now."""

    reason: str
    """What it does or waits for, in words."""
    left_s: float | None = None
    lease: LeaseWanted | None = None
    replicas: list[ReplicaNow] = []
    worked: list[Worked] = []
    """What its functions have done since the last push."""


class Introduction(_Message):
    """What a push of every protocol says."""

    protocol: int = PROTOCOL
    attempt: int = Field(ge=1)


class Push(Introduction):
    """One delivery."""

    items: list[Item] = Field(max_length=ITEMS_PER_PUSH)
    now: Now
    marked: bool = False
    """The driver has left its mark in the run's folder, and the service has not said yet that it finds it."""


class PushAnswer(_Message):
    """What the service has, and what it wants of the driver."""

    pushed: int
    """Number of the last item that it has: the next push begins with the one after it."""
    wish: Literal["run", "pause", "cancel", "yield"]
    """`yield`: stop after the step, as for a pause; the run goes on when its turn comes again."""
    granted: int
    """Devices that the run may hold; 0 while it waits for its lease."""
    lease_reason: str
    """Why it waits, in words."""


class HostAnswer(_Message):
    """What the service tells the host of a cluster elsewhere."""

    leaving: dict[str, float] = {}
    """Addresses of nodes that are about to leave, and when (unix time; 0: not known)."""


class DriverOrder(_Message):
    """What a driver is started with: a file in its run's folder that its user alone can read."""

    protocol: int = PROTOCOL
    run_id: str
    attempt: int
    token: str
    service_file: str
    """Where the service's address is found, also after it has started again."""
    service_url: str | None
    """The address itself, for a driver elsewhere."""
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
    """Of the run, among those that share its devices."""
