"""Objects of replicas and devices, now and over time."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from rlhfless.control.objects.common import ApiObject


class Bar(ApiObject):
    """What a device did for a while."""

    function: str
    work: str | None
    """None: it was held."""
    step: int | None
    state: str
    start_s: float
    end_s: float


class DeviceRow(ApiObject):
    """One device of a run."""

    device: str
    bars: list[Bar]


class TimelineObject(ApiObject):
    """Devices over the last steps."""

    object: Literal["timeline"] = "timeline"
    run_id: str
    rows: list[DeviceRow]


class DeviceWork(ApiObject):
    """What a function of a run has done on its devices."""

    function: str
    work: str
    step: int
    devices: list[str]
    """What they are called in the cluster, whichever run is on them."""
    start_s: float
    end_s: float


class RunBar(ApiObject):
    """What a function of a run did on a device."""

    run_id: str
    function: str
    work: str
    step: int
    start_s: float
    end_s: float


class SharedDeviceRow(ApiObject):
    """One device of the cluster."""

    device: str
    bars: list[RunBar]


class DevicesTimelineObject(ApiObject):
    """Which runs worked on which devices lately, as their drivers have said since the service started."""

    object: Literal["devices_timeline"] = "devices_timeline"
    rows: list[SharedDeviceRow]


class ReplicaNow(ApiObject):
    """What a driver says of a replica of its run."""

    model_config = ConfigDict(extra="ignore")  # see rlhfless.control.delivery.PROTOCOL

    function: str
    replica: str
    state: str
    since: float
    weights: str | None
    """Version that it serves."""
    devices: list[str]
    kind: str
    node: str
    usd_per_hour: float


class ReplicaObject(ReplicaNow):
    """A replica of a function, now."""

    object: Literal["function"] = "function"
    run_id: str


class HolderObject(ApiObject):
    """A run that holds devices, or waits for them."""

    run_id: str
    name: str
    granted: int
    """Devices that it may hold; 0 while it waits."""
    held: int
    """Devices that it uses: more than granted only until its step ends."""
    minimum: int
    maximum: int
    asked_at: float
    tenants: int = 1
    """Most runs that share its devices in turns, itself included."""


class DeviceKindObject(ApiObject):
    """Devices of one kind, now."""

    object: Literal["devices"] = "devices"
    kind: str
    total: int
    free: int
    """Neither promised to a run nor held by one."""
    runs: list[HolderObject]
    """In the order in which they asked."""
