"""How long a run waits for devices and engines: measured waits, and the estimates that plans use. Pure.

Devices on a node that is present come within a second or two; a node that a cluster autoscaler has to bring takes
minutes. Each wait is a row of the trace's table `decisions`, of kind `acquire`; each start of an engine is one of kind
`start`, with the seconds of its phases.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rlhfless.records import START, Decision, StartPhase
from rlhfless.scaling.placement import DeviceGroup, Node
from rlhfless.scaling.prices import PriceBook

ACQUIRE = "acquire"
"""Kind of the decisions that say how long devices were waited for."""

RECENT = 8
"""Waits of a kind that an estimate is made of: it follows a cloud whose machines become rare within a day."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """Devices of one node that a run asked for and got."""

    device_kind: str
    devices: int
    asked_s: float  # unix time
    held_s: float
    node_came: bool
    """Their node was not in the cluster when they were asked for."""

    @property
    def lag_s(self) -> float:
        """Seconds from the demand until the devices were held."""
        return self.held_s - self.asked_s

    def decision(self, step: int) -> Decision:
        """The wait as a row of the trace."""
        inputs: dict[str, float | int | str | bool] = {
            "device_kind": self.device_kind,
            "devices": self.devices,
            "lag_s": self.lag_s,
            "node_came": self.node_came,
        }
        return Decision(step, self.asked_s, ACQUIRE, f"{self.devices} x {self.device_kind}", inputs)

    @classmethod
    def of(cls, decisions: Iterable[Decision]) -> list[Acquired]:
        """The rows of a trace that are of this kind."""
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
    """Estimates how long devices take whose node has to be brought by an autoscaler."""

    def __init__(self, prices: PriceBook, earlier: Iterable[Acquired] = ()) -> None:
        self._prices = prices
        self._lags_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        for acquired in earlier:
            self.add(acquired)

    def add(self, acquired: Acquired) -> None:
        """Learns from a wait; one for devices of a node that was present says nothing about a node that has to come."""
        if acquired.node_came:
            self._lags_s[acquired.device_kind].append(acquired.lag_s)

    def lag_s(self, kind: str) -> float:
        """The median of the last measured lags of a kind; before the first, `provisioning.lag_s` of the price book, or
        0 if that has none."""
        if measured := self._lags_s.get(kind):
            return median(measured)
        provisioning = self._prices.device(kind).provisioning
        return 0.0 if provisioning is None else provisioning.lag_s


def fitting(groups: Sequence[DeviceGroup], nodes: Sequence[Node]) -> frozenset[str]:
    """Names of the groups that fit, one after the other, on what is free on the nodes that are there."""
    free = Counter({(node.name, kind): node.free(kind) for node in nodes for kind in {group.kind for group in groups}})
    fits = set()
    for group in groups:
        node = next((node.name for node in nodes if free[node.name, group.kind] >= len(group.devices)), None)
        if node is not None:
            free[node, group.kind] -= len(group.devices)
            fits.add(group.name)
    return frozenset(fits)


def by_kind(acquired: Collection[Acquired]) -> Mapping[str, tuple[list[float], list[float]]]:
    """By device kind: lags of devices whose node was there, and of devices whose node came."""
    lags_s: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for one in acquired:
        lags_s[one.device_kind][one.node_came].append(one.lag_s)
    return lags_s


def started(decisions: Iterable[Decision]) -> list[dict[str, float]]:
    """The starts of engines in these rows: the seconds of each phase, by StartPhase."""
    starts = [decision.inputs for decision in decisions if decision.kind == START]
    return [
        {name.removesuffix("_s"): float(value) for name, value in inputs.items() if name.endswith("_s")}
        for inputs in starts
    ]


def mean_phases(starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean seconds of each phase, in the order of StartPhase; a phase counts as 0 in a start without it."""
    present = [str(phase) for phase in StartPhase if any(phase in start for start in starts)]
    return {phase: fmean(start.get(phase, 0.0) for start in starts) for phase in present}
