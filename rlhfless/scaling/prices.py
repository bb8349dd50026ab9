"""The price book: the price of a device while it is held, whether it works or not.

A user-supplied YAML file; by default the prices in the table of devices (`devices.yaml` in this folder). See
docs/prices.md. Every figure carries its source and date, because rental prices differ by a factor of three between
sellers and change by the month.

The cost of a run (`cost_usd`) is time held x price, to the second. `accounting.leased_usd` adds the sellers' rounding,
and `RentalTerms` provides it to policies. `AcquisitionLags` estimates how long devices take to arrive.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from statistics import fmean, median
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhfless.records import START, Decision, Holding, ReplicaState, StartPhase
from rlhfless.scaling.placement import Device, DeviceGroup, Node
from rlhfless.spec.base import SpecModel
from rlhfless.spec.explain import nearest
from rlhfless.spec.load import read_values
from rlhfless.util.errors import UserError

M = TypeVar("M", bound=SpecModel)

SECONDS_PER_HOUR = 3600.0

Rate = Literal["usd_per_hour", "saved_usd_per_hour", "released_usd_per_hour"]
"""Rates of a DevicePrice: its full price, and the parts of it that a release does and does not save."""

PriceSource = Literal["rent", "hyperscaler"]

PRICE_SOURCES: tuple[PriceSource, ...] = get_args(PriceSource)
"""The sources of the bundled table: the rent at smaller clouds (the default), and a hyperscaler's on-demand price. They
differ up to fourfold, and by a different factor for each kind."""

DEVICES_FILE = "rlhfless/scaling/devices.yaml"
"""Path of the table of devices, for messages."""


class PriceError(UserError):
    """Raised for a device kind without a price. The message names it and the known kinds."""


Usd = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class Cited(SpecModel):
    """Figures with where and when they were read."""

    source: Annotated[str, Field(min_length=1)]
    """Where the figures were read or measured; an assumption should say that it is one."""

    as_of: date
    """When they were read."""

    link: Annotated[str, Field(pattern="^https://")] | None = None
    """Where they can be read."""


class SpotPrice(Cited):
    """The same device as spot capacity: cheaper, but the seller may take it away."""

    usd_per_hour: Usd
    """US dollars per hour of one whole device."""

    interruptions_per_hour: Annotated[float, Field(ge=0)]
    """How often one device is taken away, on average."""


class Billing(Cited):
    """How the seller counts the time of a machine."""

    granularity_s: Seconds = 0.0
    """Time is rounded up to a multiple of this; 0 bills the time used."""

    minimum_s: Seconds = 0.0
    """Shortest time that is billed."""


class Provisioning(Cited):
    """Getting a machine that is not running yet."""

    lag_s: Seconds
    """Seconds from asking for a machine to a device that a replica can start on."""


class Residency(Cited):
    """A sleeping replica: it has released its device, and keeps its weights in host memory."""

    usd_per_hour: Usd
    """US dollars per hour of one sleeping replica's host memory."""


class Owned(SpecModel):
    """Hardware that is paid for whether it is used or not; the device's `usd_per_hour` is what owning it costs."""

    released_value: Annotated[float, Field(ge=0, le=1)]
    """Share of the price that a released device earns, because another job uses it; 0 if none does."""


class DeviceTerms(Cited):
    """What a device costs, and on which terms."""

    usd_per_hour: Usd
    """US dollars per hour of one whole device, on demand; for owned hardware, of owning it."""

    spot: SpotPrice | None = None
    """Its terms as spot capacity, if it can be had so."""

    billing: Billing | None = None
    """How time is billed; by default to the second."""

    provisioning: Provisioning | None = None
    """How long a new machine takes; by default machines are there from the start."""

    residency: Residency | None = None
    """The price of a replica that sleeps in host memory; by default the whole price of the device."""

    owned: Owned | None = None
    """Set for devices that are owned, not rented."""

    rented_by: Literal["node", "device"] = "node"
    """What is rented: whole nodes, which are paid for as long as the run lasts, so that the release of a device saves
    nothing; or single devices, which are paid for while they are held. Means nothing for owned devices."""

    @model_validator(mode="after")
    def _owned_is_not_rented(self) -> DeviceTerms:
        if self.owned is not None and (self.spot is not None or self.billing is not None):
            raise ValueError("hardware that is owned has no spot price and no billing; take `spot` and `billing` out")
        return self

    @property
    def released_usd_per_hour(self) -> float:
        """Return the cost of a device after its release: 0 if it is rented individually."""
        if self.owned is not None:
            return self.usd_per_hour * (1 - self.owned.released_value)
        return self.usd_per_hour if self.rented_by == "node" else 0.0

    @property
    def saved_usd_per_hour(self) -> float:
        """Return the hourly saving from releasing a device."""
        return self.usd_per_hour - self.released_usd_per_hour


class DevicePrice(DeviceTerms):
    """The price of one kind of device."""

    kind: Annotated[str, Field(min_length=1)]
    """Name of the device kind, as holdings carry it."""


class PriceBook(SpecModel):
    """Prices by device kind."""

    devices: Annotated[tuple[DevicePrice, ...], Field(min_length=1)]
    """One entry per device kind."""

    cpu_kind: str = "cpu-core"
    """The device kind of a CPU core."""

    @field_validator("devices")
    @classmethod
    def _kinds_differ(cls, devices: Sequence[DevicePrice]) -> Sequence[DevicePrice]:
        kinds = [device.kind for device in devices]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} has two prices; take one of them out")
        return devices

    @model_validator(mode="after")
    def _cpu_has_a_price(self) -> PriceBook:
        if all(device.kind != self.cpu_kind for device in self.devices):
            raise ValueError(f"cpu_kind is {self.cpu_kind!r}, which has no price; add it under `devices`")
        return self

    def device(self, kind: str) -> DevicePrice:
        """Return the entry of a kind. Raises PriceError if the book has none."""
        for device in self.devices:
            if device.kind == kind:
                return device
        known = [device.kind for device in self.devices]
        unpriced = {entry["kind"]: entry["unpriced"] for entry in bundled_devices() if "unpriced" in entry}
        raise PriceError(
            f"no price for device kind {kind!r}; {unpriced[kind] + '. ' if kind in unpriced else nearest(kind, known)}"
            "Give one in a price book of your own (`scaling.prices` of a run, `cluster.prices` of a scenario; "
            f"docs/prices.md). This one has {', '.join(known)}"
        )

    def usd_per_s(self, shared: Iterable[tuple[Device, float]], rate: Rate) -> float:
        """Return US dollars per second of shares of devices. Raises PriceError for a kind without a price."""
        per_hour = (share * float(getattr(self.device(device.kind), rate)) for device, share in shared)
        return math.fsum(per_hour) / SECONDS_PER_HOUR

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the device kinds that have a price."""
        return tuple(device.kind for device in self.devices)

    def occupies(self, holding: Holding) -> bool:
        """Return whether a holding's device is billed.

        It is not if the replica holds no device, or sleeps at a price for sleep.
        """
        asleep = holding.state is ReplicaState.SLEEPING
        return holding.state.holds_device and not (asleep and self.device(holding.device_kind).residency is not None)

    def cost_usd(self, holdings: Iterable[Holding]) -> float:
        """Return the cost of the holdings: device-seconds x price of their state.

        Raises PriceError for a device kind without a price.
        """
        return math.fsum(
            holding.device_s * self._holding_usd_per_hour(holding) / SECONDS_PER_HOUR
            for holding in holdings
            if holding.state.holds_device
        )

    def _holding_usd_per_hour(self, holding: Holding) -> float:
        residency = self.device(holding.device_kind).residency
        if residency is not None and not self.occupies(holding):
            return residency.usd_per_hour
        return self.device(holding.device_kind).usd_per_hour

    def snapshot(self) -> dict[str, Any]:
        """Return the book as JSON values for the trace; `PriceBook.model_validate` reads it back."""
        return self.model_dump(mode="json")


OWN_DEVICES = "RLHFLESS_DEVICES"
"""Environment variable that names a file with the user's own devices, in the format of the bundled table."""


class _OwnEntry(SpecModel):
    """The price of a device of the user's own; `rlhfless.scaling.latency.devices` reads its figures."""

    model_config = ConfigDict(extra="ignore")

    kind: str
    price: DeviceTerms | None = None


class _OwnTable(SpecModel):
    devices: tuple[_OwnEntry, ...]


@cache
def bundled_devices() -> tuple[dict[str, Any], ...]:
    """Return the entries of the bundled table of devices: figures and price of each kind."""
    text = files(__package__).joinpath("devices.yaml").read_text("utf-8")
    return tuple(yaml.load(text, yaml.CSafeLoader)["devices"])


def own_devices(model: type[M]) -> M | None:
    """Return the parsed file of the user's own devices, or None without one. Raises InputError."""
    path = os.environ.get(OWN_DEVICES)
    return read_values(path, model, f"correct {OWN_DEVICES}, or leave it out") if path else None


def load_price_book(path: str | os.PathLike[str] | None = None) -> PriceBook:
    """Load a price book; without `path`, the prices of the bundled table of devices and of the user's own.

    Raises InputError with all problems: file, line, field, value, and the hint.
    """
    if path is None:
        terms = {entry["kind"]: entry.get("price") for entry in bundled_devices()}
        own = own_devices(_OwnTable)
        for each in own.devices if own is not None else ():
            terms[each.kind] = None if each.price is None else each.price.model_dump()
        priced = [{"kind": kind, **price} for kind, price in terms.items() if price is not None]
        return PriceBook.model_validate({"devices": priced})
    return read_values(path, PriceBook, "correct `scaling.prices`, or leave it out for the bundled price book")


# Keeps a time that is a multiple of the granularity, up to rounding, from being rounded up to the next one.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RentalTerms:
    """Rental terms of devices, for policies and the simulator."""

    granularity_s: float = 0.0
    """A lease is billed in multiples of this; 0 bills the time used."""
    minimum_s: float = 0.0
    """Shortest billed lease."""
    reacquire_s: float = 0.0
    """Seconds from requesting a released device until it is available again; not billed."""

    @classmethod
    def of(cls, billings: Iterable[Billing | None], reacquire_s: float) -> RentalTerms:
        """Return the most expensive combination of the terms of several kinds of devices."""
        known = [billing for billing in billings if billing is not None]
        granularity_s = max((billing.granularity_s for billing in known), default=0.0)
        return cls(granularity_s, max((billing.minimum_s for billing in known), default=0.0), reacquire_s)

    @property
    def free(self) -> bool:
        """Return whether releasing and reacquiring a device is free."""
        return self == RentalTerms()

    def paid_until_s(self, start_s: float, end_s: float) -> float:
        """Return the end of the paid time of a lease held from `start_s` to `end_s`."""
        return start_s + self._billed_s(end_s - start_s)

    def _billed_s(self, held_s: float) -> float:
        if held_s <= 0:
            return 0.0
        at_least_s = max(held_s, self.minimum_s)
        if self.granularity_s == 0:
            return at_least_s
        return max(math.ceil(at_least_s / self.granularity_s - _ROUNDING) * self.granularity_s, held_s)

    def another_s(self, lease_s: float) -> float:
        """Return the expected seconds that another lease of about `lease_s` is billed beyond its use."""
        return self.granularity_s / 2 + max(self.minimum_s - lease_s, 0.0)


ACQUIRE = "acquire"
"""Kind of the decisions that record waits for devices."""

RECENT = 8
"""Number of latest waits per kind in an estimate, few enough to follow a cloud whose machines become scarce within a
day."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """Devices of one node that a run requested and got."""

    device_kind: str
    devices: int
    asked_s: float  # unix time
    held_s: float
    node_came: bool
    """Whether their node was absent from the cluster when they were requested."""

    @property
    def lag_s(self) -> float:
        """Return the seconds from the request until the devices were held."""
        return self.held_s - self.asked_s

    def decision(self, step: int) -> Decision:
        """Return the wait as a row of the trace."""
        inputs: dict[str, float | int | str | bool] = {
            "device_kind": self.device_kind,
            "devices": self.devices,
            "lag_s": self.lag_s,
            "node_came": self.node_came,
        }
        return Decision(step, self.asked_s, ACQUIRE, f"{self.devices} x {self.device_kind}", inputs)

    @classmethod
    def of(cls, decisions: Iterable[Decision]) -> list[Acquired]:
        """Return the waits recorded in a trace's decisions."""
        return [
            cls(
                str(row.inputs["device_kind"]),
                int(row.inputs["devices"]),
                row.at_s,
                row.at_s + float(row.inputs["lag_s"]),
                bool(row.inputs["node_came"]),
            )
            for row in decisions
            if row.kind == ACQUIRE
        ]


class AcquisitionLags:
    """Estimates of how long devices take to arrive if an autoscaler must add their node."""

    def __init__(self, prices: PriceBook, earlier: Iterable[Acquired] = ()) -> None:
        self._prices = prices
        self._lags_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        for acquired in earlier:
            self.add(acquired)

    def add(self, acquired: Acquired) -> None:
        """Record a wait. Waits for devices of a present node are ignored."""
        if acquired.node_came:
            self._lags_s[acquired.device_kind].append(acquired.lag_s)

    def lag_s(self, kind: str) -> float:
        """Return the median of the last measured lags of a kind.

        Before the first measurement it is `provisioning.lag_s` of the price book, or 0 without that.
        """
        if measured := self._lags_s.get(kind):
            return median(measured)
        provisioning = self._prices.device(kind).provisioning
        return 0.0 if provisioning is None else provisioning.lag_s


def fitting(groups: Sequence[DeviceGroup], nodes: Sequence[Node]) -> frozenset[str]:
    """Return the names of the groups that fit, one after the other, into the nodes' free devices."""
    free = Counter({(node.name, kind): node.free(kind) for node in nodes for kind in {group.kind for group in groups}})
    fits = set()
    for group in groups:
        node = next((node.name for node in nodes if free[node.name, group.kind] >= len(group.devices)), None)
        if node is not None:
            free[node, group.kind] -= len(group.devices)
            fits.add(group.name)
    return frozenset(fits)


def by_kind(acquired: Collection[Acquired]) -> Mapping[str, tuple[list[float], list[float]]]:
    """Return, by device kind, the lags of devices whose node was present, and of those whose node joined."""
    lags_s: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for one in acquired:
        lags_s[one.device_kind][one.node_came].append(one.lag_s)
    return lags_s


def started(decisions: Iterable[Decision]) -> list[dict[str, float]]:
    """Return the engine starts in these rows: seconds per phase (StartPhase)."""
    starts = [decision.inputs for decision in decisions if decision.kind == START]
    return [
        {name.removesuffix("_s"): float(value) for name, value in inputs.items() if name.endswith("_s")}
        for inputs in starts
    ]


def mean_phases(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each phase, in the order of StartPhase. A phase missing from a start counts as 0."""
    present = [str(phase) for phase in StartPhase if any(phase in start for start in starts)]
    return {phase: fmean(start.get(phase, 0.0) for start in starts) for phase in present}
