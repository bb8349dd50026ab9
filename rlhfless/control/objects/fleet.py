"""Objects of replicas and devices, now and over time."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from rlhfless.control.objects.common import ApiObject


class Bar(ApiObject):
    """A time span in which a device was held or worked."""

    function: str
    work: str | None
    """The kind of work; None while the device was only held."""
    step: int | None
    state: str
    start_s: float
    end_s: float


class DeviceRow(ApiObject):
    """A device of a run over time."""

    device: str
    bars: list[Bar]


class TimelineObject(ApiObject):
    """The devices of a run over its last steps."""

    object: Literal["timeline"] = "timeline"
    run_id: str
    rows: list[DeviceRow]


class DeviceWork(ApiObject):
    """A call of a run's function on its devices, as its driver reports it."""

    function: str
    work: str
    step: int
    devices: list[str]
    """Names of the devices in the cluster, the same for all runs."""
    start_s: float
    end_s: float


class RunBar(ApiObject):
    """A time span in which a run's function worked on a device."""

    run_id: str
    function: str
    work: str
    step: int
    start_s: float
    end_s: float


class SharedDeviceRow(ApiObject):
    """A device of the cluster over time."""

    device: str
    bars: list[RunBar]


class DevicesTimelineObject(ApiObject):
    """The recent work of runs on devices, as their drivers have reported since the service started."""

    object: Literal["devices_timeline"] = "devices_timeline"
    rows: list[SharedDeviceRow]


class ReplicaNow(ApiObject):
    """A replica of a run, as its driver reports it."""

    model_config = ConfigDict(extra="ignore")  # see rlhfless.control.delivery.PROTOCOL

    function: str
    replica: str
    state: str
    since: float
    weights: str | None
    """The weight version that the replica serves."""
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
    """Devices that the run may hold; 0 while it waits."""
    held: int
    """Devices that the run uses: more than granted only until its step ends."""
    minimum: int
    maximum: int
    asked_at: float
    tenants: int = 1
    """Most runs that share the run's devices in turns, itself included."""


class DeviceKindObject(ApiObject):
    """The devices of a kind, now."""

    object: Literal["devices"] = "devices"
    kind: str
    total: int
    free: int
    """Devices that are neither granted to a run nor held by one."""
    runs: list[HolderObject]
    """Runs that hold or wait for devices, in the order of their requests."""
