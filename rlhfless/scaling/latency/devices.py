"""Kinds of devices: Ray's accelerator types, and properties with sources and prices from
`rlhfless/scaling/devices.yaml`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated

from pydantic import Field, model_validator

from rlhfless.scaling.prices import DEVICES_FILE, OWN_DEVICES, DeviceTerms, PriceSource, bundled_devices, own_devices
from rlhfless.spec.base import SpecModel
from rlhfless.spec.explain import nearest
from rlhfless.spec.load import read_values
from rlhfless.util.errors import UserError

HEADROOM = 0.02
"""Share of the memory reported by the driver that no plan fills. An L4 of 24 GB and an L40S of 48 GB report 1 to 2 %
less than their data sheets, an H100 6 % more."""


class Figure(SpecModel):
    """A number, and where it comes from."""

    value: Annotated[float, Field(gt=0)]
    source: Annotated[str, Field(min_length=1)]


class Share(SpecModel):
    """A share of a peak, and where it comes from."""

    value: Annotated[float, Field(gt=0, le=1)]
    source: Annotated[str, Field(min_length=1)]


class GroupRates(SpecModel):
    """A rate by the number of devices that work together, and where it comes from."""

    value: Annotated[dict[Annotated[int, Field(ge=2)], Annotated[float, Field(gt=0)]], Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]

    def among(self, devices: int) -> float:
        """Return the rate of the smallest tabulated group of at least this size, or else of the largest group."""
        larger = [size for size in self.value if size >= devices]
        return self.value[min(larger) if larger else max(self.value)]


class DeviceSheet(SpecModel):
    """One kind of device. All rates are per device and, for links, in one direction."""

    kind: Annotated[str, Field(min_length=1)]
    """Its name, as in the price book."""
    flops_per_s: Figure
    """Peak of dense matrix products in 16 bit (fp32 on a CPU)."""
    fp8_flops_per_s: Figure | None = None
    """Peak of dense products of 8 bit floats; None for a device without them."""
    fp4_flops_per_s: Figure | None = None
    """Peak of dense products of 4 bit floats; None for a device without them."""
    memory_bytes_per_s: Figure
    memory_bytes: Figure
    visible_bytes: Figure | None = None
    """Memory that the driver reports, where it was read."""
    link_bytes_per_s: Figure
    """Rate to the other devices of its machine."""
    host_bytes_per_s: Figure
    """Rate to host memory."""
    matmul_efficiency: Share
    """Share of `flops_per_s` that large matrix products reach."""
    weights_efficiency: Share
    """Share of `memory_bytes_per_s` at which a small batch reads weights."""
    attention_efficiency: Share
    """Share of `memory_bytes_per_s` at which decode attention reads KV."""
    all_reduce_s: Figure
    """Seconds of an all-reduce of a tiny message."""
    all_reduce_bytes_per_s: GroupRates
    """Rate at which each device of a group sends and receives in a large all-reduce. Without NVLink they share a
    bus."""
    linked_devices: Annotated[int, Field(ge=1)] = 8
    """Devices that fast links join; engines of more span nodes."""
    power_w: Figure | None = None
    """Power that it is built for, with its memory."""
    no_engine: Annotated[str, Field(min_length=1)] | None = None
    """Why no run can be started on it, although it can be planned for."""
    price: DeviceTerms | None = None
    """In a price book of its own, a kind's entry there counts."""
    hyperscaler: DeviceTerms | None = None
    """The price on demand of a hyperscaler; None if none has been read for the table."""
    unpriced: Annotated[str, Field(min_length=1)] | None = None
    """Why the bundled table has no price."""

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that a memory plan may fill.

        These are the data sheet's bytes, or the reported memory without HEADROOM if that is less.
        """
        visible = self.visible_bytes or self.memory_bytes
        return int(min(self.memory_bytes.value, (1 - HEADROOM) * visible.value))

    @property
    def prices(self) -> dict[PriceSource, DeviceTerms | None]:
        """Return the table's prices, by source."""
        return {"rent": self.price, "hyperscaler": self.hyperscaler}

    @model_validator(mode="after")
    def _priced_or_not(self) -> DeviceSheet:
        if self.price is not None and self.unpriced is not None:
            raise ValueError(f"{self.kind} has a price, and `unpriced` says why it has none; take one of them out")
        return self


class DeviceTable(SpecModel):
    """A file of devices."""

    devices: tuple[DeviceSheet, ...]


class UnknownDevice(UserError, ValueError):
    """Raised for a device kind that the table does not have. The message names it and the nearest kind."""

    where = "placement.kind"


def load_devices(path: str | None = None) -> dict[str, DeviceSheet]:
    """Return the devices by kind.

    The bundled table is overridden by the user's own devices (the file named by `OWN_DEVICES`), and these by a file at
    `path` in the same format. Raises InputError with all problems of an unreadable file.
    """
    return _loaded(path, os.environ.get(OWN_DEVICES))


@cache
def _loaded(path: str | None, _: str | None) -> dict[str, DeviceSheet]:
    tables = [DeviceTable.model_validate({"devices": bundled_devices()}), own_devices(DeviceTable)]
    if path is not None:
        tables.append(read_values(path, DeviceTable, f"name a file in the form of {DEVICES_FILE}"))
    return {device.kind: device for table in tables if table is not None for device in table.devices}


def device_of(kind: str) -> DeviceSheet:
    """Return the device of a kind. Raises UnknownDevice."""
    table = load_devices()
    if kind not in table:
        raise UnknownDevice(
            f"nothing is known of device kind {kind!r}; {nearest(kind, table)}The table has {', '.join(table)}"
        )
    return table[kind]


NODE_LABEL = "ray.io/node-id"
"""Ray's node label for the node id."""

TYPE_LABEL = "ray.io/accelerator-type"
"""Ray's node label for the accelerator type."""

KINDS: Mapping[str, str] = {
    "A10G": "a10g",
    "A100-40G": "a100-40gb",
    "A100-80G": "a100-80gb",
    "AMD-Instinct-MI300X-OAM": "mi300x",
    "AMD-Instinct-MI325X-OAM": "mi325x",
    "AMD-Instinct-MI355X-OAM": "mi355x",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "GH200": "gh200",
    "H100": "h100",
    "H20": "h20",
    "H200": "h200",
    "L4": "l4",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx-pro-6000",
}
"""Kinds of the price book by Ray's accelerator types."""

AMBIGUOUS: Mapping[str, Mapping[int, str]] = {"A100": {40: "a100-40gb", 80: "a100-80gb"}}
"""Kinds by memory in GiB, for types with several memory sizes."""

MODEL_NAME = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")
"""Matches the maker, then the model: words in capitals up to the first with a digit."""


class UnknownAccelerator(UserError):
    """Raised for devices whose type does not map to a kind of the price book."""


def kind_of(accelerator: str, known: Collection[str], memory_bytes: int | None = None) -> str:
    """Return the price book's kind of an accelerator type. `known` are the kinds in the book.

    A type outside the table maps to the kind of the same name, if the book has it. Raises UnknownAccelerator.
    """
    if accelerator in AMBIGUOUS:
        return _by_memory(accelerator, memory_bytes)
    kind = KINDS.get(accelerator, accelerator.lower())
    if accelerator in KINDS or kind in known:
        return kind
    types = ", ".join(sorted([*KINDS, *AMBIGUOUS]))
    what = f"devices of type {accelerator!r}" if accelerator else "GPUs without a type"
    label = "" if accelerator else f", and start the node with the label {TYPE_LABEL}"
    raise UnknownAccelerator(
        f"{what} are not known; known are {types}. Add a kind {kind!r} to the price book (scaling.prices){label}, or "
        "name another kind with placement.kind"
    )


def type_of(device_name: str) -> str:
    """Return the accelerator type of a device name, as Ray derives it (ray/_private/accelerators/nvidia_gpu.py).

    `NVIDIA A100-SXM4-80GB` is an A100, `NVIDIA RTX PRO 6000 Blackwell Server Edition` an RTX-PRO-6000.
    """
    match = MODEL_NAME.match(device_name)
    name = match.group(1) if match else device_name.removeprefix("NVIDIA").strip()
    return name.replace(" ", "-")


def types_of(kind: str) -> list[str]:
    types = [accelerator for accelerator, of in KINDS.items() if of == kind]
    types += [accelerator for accelerator, sizes in AMBIGUOUS.items() if kind in sizes.values()]
    return types or [kind, kind.upper()]


def _by_memory(accelerator: str, memory_bytes: int | None) -> str:
    sizes = AMBIGUOUS[accelerator]
    if memory_bytes is None:
        raise UnknownAccelerator(
            f"the memory of a device of type {accelerator} could not be read, so it is not known which of "
            f"{', '.join(sizes.values())} it is; start its node with the label {TYPE_LABEL}, such as A100-80G"
        )
    return sizes[min(sizes, key=lambda size_gib: abs(size_gib - memory_bytes / 2**30))]
