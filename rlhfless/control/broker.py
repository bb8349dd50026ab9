"""Grants devices to runs. Pure functions: requests and the current time in, grants out.

A run asks for a *minimum* that it needs to work, a *maximum* that it could use, and a *unit*: the devices of one
generation actor, by which it grows and shrinks. A *grant* is the number of devices that the run may hold. A lowered
grant takes effect at the end of the run's step, so devices that the run still holds count until it reports them free.
The sum of granted or held devices therefore never exceeds their number.

Waiting runs are ordered by priority, which grows while a run waits (so no run starves); then by owner, least holdings
first; then by request time. The first run in this order whose minimum does not exceed the total number of devices of
its kind is served before any run behind it, so smaller runs cannot overtake it forever. Other runs give back devices
above their minimum, the last in order first. If these are too few, runs of lower priority yield all their devices.

Runs that share devices (`tenants` above 1) may get the same devices in turns (rlhfless.scaling.turn_scheduler). Each
may have the devices that non-sharing runs leave, as long as no device has more runs than any run on it allows. Together
they may use as many devices as were granted to them in total, so a run that does not share waits for the rest.

Devices that no run waits for go evenly to the runs that can use more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhfless.scaling.turn_scheduler import aged_priority


@dataclass(frozen=True, slots=True)
class DevicesRequest:
    """The devices that a run requests, has been granted, and holds."""

    owner: str
    priority: int
    run_id: str
    kind: str
    minimum: int
    maximum: int
    unit: int
    granted: int
    held: int
    asked_at: float
    tenants: int = 1
    """Maximum number of runs on its devices, including this run."""

    @property
    def shares(self) -> bool:
        return self.tenants > 1

    @property
    def taken(self) -> int:
        """Number of devices that other runs cannot have now."""
        return max(self.granted, self.held)

    @property
    def waits(self) -> bool:
        return self.granted == 0

    @property
    def spare(self) -> int:
        """Number of devices that the run can return and still work."""
        return max(self.granted - self.minimum, 0) // self.unit * self.unit


@dataclass(frozen=True, slots=True)
class Decisions:
    granted: Mapping[str, int]
    """Changed grants by run id."""
    yields: tuple[str, ...]
    """Runs that yield at the end of their step."""
    reasons: Mapping[str, str]
    """Why each run waits, by run id."""


@dataclass
class _Kind:
    """The devices of one kind during a decision."""

    count: int
    requests: list[DevicesRequest]
    granted: dict[str, int] = field(default_factory=dict)
    yields: list[str] = field(default_factory=list)

    def of(self, request: DevicesRequest) -> int:
        """Return the current grant of a run."""
        return self.granted.get(request.run_id, request.granted)

    @property
    def free(self) -> int:
        """Number of devices that are neither granted nor held."""
        alone, together = self._taken(held=True)
        return self.count - alone - min(together, max(self.count - alone, 0))

    def available(self, request: DevicesRequest) -> int:
        """Return the number of devices that a waiting run can be granted now."""
        return self._left_for(request, *self._taken(held=True))

    def to_come(self, request: DevicesRequest) -> int:
        """Return the number of devices that the run can be granted once all recalled devices are free."""
        return self._left_for(request, *self._taken(held=False))

    def _taken(self, *, held: bool) -> tuple[int, int]:
        """Return the device counts of runs that do not share, and of runs that share."""
        of = {request.run_id: max(self.of(request), request.held) if held else self.of(request)
              for request in self.requests if held or request.run_id not in self.yields}  # fmt: skip
        alone = sum(of.get(request.run_id, 0) for request in self.requests if not request.shares)
        return alone, sum(of.values()) - alone

    def _left_for(self, request: DevicesRequest, alone: int, together: int) -> int:
        left = self.count - alone
        if not request.shares:
            return left - min(together, max(left, 0))
        most = min(each.tenants for each in self.requests if each.shares and (self.of(each) or each is request))
        return min(left, most * left - together)


def decide(requests: Iterable[DevicesRequest], present: Mapping[str, int], now_s: float) -> Decisions:
    """Decide all grants. `present`: number of devices by kind."""
    by_kind: dict[str, list[DevicesRequest]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.run_id):
        by_kind[request.kind].append(request)
    granted: dict[str, int] = {}
    reasons: dict[str, str] = {}
    yields: list[str] = []
    for name, of_kind in by_kind.items():
        kind = _Kind(present.get(name, 0), of_kind)
        waiting = _serve(kind, now_s)
        if not any(request.minimum <= kind.count for request in waiting):
            _share_out(kind)
        granted |= {r.run_id: kind.of(r) for r in of_kind if kind.of(r) != r.granted}
        yields += kind.yields
        reasons |= {request.run_id: _reason(request, kind, now_s, place) for place, request in enumerate(waiting)}
    return Decisions(granted, tuple(yields), reasons)


def _serve(kind: _Kind, now_s: float) -> list[DevicesRequest]:
    """Grant minimums in order, and return the runs that still wait."""
    waiting = _in_order([request for request in kind.requests if request.waits], kind, now_s)
    left: list[DevicesRequest] = []
    blocked = False
    for request in waiting:
        possible = request.minimum <= kind.count
        if possible and not blocked and request.held == 0 and request.minimum <= kind.available(request):
            kind.granted[request.run_id] = request.minimum
            continue
        left.append(request)
        if possible and not blocked:
            blocked = True
            _take_back(kind, request)
    return left


def _in_order(waiting: Sequence[DevicesRequest], kind: _Kind, now_s: float) -> list[DevicesRequest]:
    owned: dict[str, int] = defaultdict(int)
    for request in kind.requests:
        owned[request.owner] += request.taken

    def rank(request: DevicesRequest) -> tuple[float, int, float, str]:
        aged = aged_priority(request.priority, now_s - request.asked_at)
        return -aged, owned[request.owner], request.asked_at, request.run_id

    return sorted(waiting, key=rank)


def _take_back(kind: _Kind, wanting: DevicesRequest) -> None:
    """Lower grants until a run's minimum will be free at the end of the current steps."""
    holders = [request for request in kind.requests if not request.waits]
    last_first = sorted(holders, key=lambda r: (r.priority, -r.asked_at, r.run_id))
    for request in last_first:
        while kind.to_come(wanting) < wanting.minimum and kind.of(request) - request.unit >= request.minimum:
            kind.granted[request.run_id] = kind.of(request) - request.unit
    below = [request for request in last_first if request.priority < wanting.priority]
    if kind.to_come(wanting) + sum(kind.of(request) for request in below) < wanting.minimum:
        return  # even all of their devices are too few
    for request in below:
        if kind.to_come(wanting) < wanting.minimum:
            kind.yields.append(request.run_id)


def _share_out(kind: _Kind) -> None:
    """Grant unclaimed devices to the runs that can use more, starting with the run least above its minimum. Without
    free devices, the run with the most returns some."""
    growing = [r for r in kind.requests if kind.of(r) and r.maximum > kind.of(r) and r.run_id not in kind.yields]
    while growing:
        request = min(growing, key=lambda r: (kind.of(r) - r.minimum, -r.priority, r.asked_at, r.run_id))
        if request.unit <= kind.free and kind.of(request) + request.unit <= request.maximum:
            kind.granted[request.run_id] = kind.of(request) + request.unit
        else:
            growing.remove(request)
            _even_out(kind, request)


def _even_out(kind: _Kind, poor: DevicesRequest) -> None:
    """Recall a unit from the run furthest above its minimum, if it is at least two units ahead of a run that can use
    more. The unit is granted once it is free."""
    if kind.of(poor) + poor.unit > poor.maximum or kind.to_come(poor) - kind.of(poor) * poor.shares >= poor.unit:
        return
    rich = max(kind.requests, key=lambda r: (kind.of(r) - r.minimum, r.run_id))
    if kind.of(rich) - rich.minimum - (kind.of(poor) - poor.minimum) >= 2 * max(rich.unit, poor.unit):
        kind.granted[rich.run_id] = kind.of(rich) - rich.unit


def _reason(request: DevicesRequest, kind: _Kind, now_s: float, place: int) -> str:
    waited_s = max(now_s - request.asked_at, 0.0)
    wanted = f"waiting for {request.minimum} x {request.kind} for {waited_s:.0f} s"
    if request.minimum > kind.count:
        return f"{wanted}; there are {kind.count} in all. Ask for fewer (placement.devices), or add nodes"
    ahead = f", {place} run(s) before it" if place else ""
    return f"{wanted}; {max(kind.free, 0)} of {kind.count} free{ahead}"
