"""Grants devices to runs. Pure functions: requests and the current time in, grants out.

A run asks for the *sizes* that it can have: those of `placement.devices`, or its minimum and its actors above that by
*units*, the devices of one actor. A *grant* is the number of devices that the run may hold. A lowered grant takes
effect at the end of the run's step, so devices that the run still holds count until it reports them free. The sum of
granted or held devices therefore never exceeds their number, and a grant is raised only once the devices are free.

Waiting runs are ordered by priority, which grows while a run waits (so no run starves); then by owner, least holdings
first; then by request time. The first run in this order whose minimum does not exceed the total number of devices of
its kind is served before any run behind it, so smaller runs cannot overtake it forever. How many devices each run gets
is decided in rlhfless.scaling.sizing. If the minimums of all runs do not fit beside that of a waiting run, runs of
lower priority yield all their devices; so do the last in order if devices are lost.

If an autoscaler can add nodes, the devices are at most `most`. Runs of fixed sizes are granted devices that have yet to
come: what they then request from Ray is what the autoscaler sees. Elastic runs, and runs beside them, are granted only
devices that are there, so that a run works until a larger size can start, and shrinks when a node leaves.
`wanted_devices` says how many they would have if all nodes were there, for the autoscaler. A run that works keeps its
minimum while a lost node is replaced.

Runs that share devices (`tenants` above 1) may get the same devices in turns (rlhfless.scaling.turn_scheduler). Each
may have the devices that non-sharing runs leave, as long as no device has more runs than any run on it allows. Together
they may use as many devices as were granted to them in total, so a run that does not share waits for the rest. Where
runs share, devices that no run waits for go evenly to the runs that can use more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlhfless.scaling.sizes import SpeedCurve
from rlhfless.scaling.sizing import Division, SizedRun, Team, divide
from rlhfless.scaling.turn_scheduler import aged_priority

MOST_LEVELS = 10
"""Largest priority, in either direction, that weighs in sizes: a factor of a thousand."""


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
    sizes: tuple[int, ...] = ()
    """Numbers of devices that an elastic run can have; empty for one whose actors come and go by units."""
    curve: SpeedCurve = SpeedCurve({})  # noqa: RUF009 (frozen)
    steps_left: float = 1.0
    change_s: float = 0.0
    """Seconds that a change of an elastic run's size costs."""
    needed: int = 0
    """Fewest devices that keep the deadline of its contract; 0 without one."""

    @property
    def sized(self) -> SizedRun:
        sizes = self.sizes or tuple(range(self.minimum, self.maximum + 1, self.unit))
        level = min(max(self.priority, -MOST_LEVELS), MOST_LEVELS)
        size = 0 if self.waits else max((size for size in sizes if size <= self.granted), default=sizes[0])
        return SizedRun(
            self.run_id, sizes, self.curve, self.steps_left, size, self.change_s, self.needed, level, self.owner
        )

    @property
    def unplanned(self) -> SizedRun:
        """The run at the size that it has or starts with, because its speed at others is not known yet."""
        sized = self.sized
        return replace(sized, sizes=(sized.size or sized.sizes[0],))

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
    changes: Mapping[str, str] = field(default_factory=dict)
    """Why the grants of runs that work change, by run id."""


@dataclass
class _Kind:
    """The devices of one kind during a decision."""

    count: int
    """Devices to divide."""
    most: int
    """Devices that there may be, if nodes can be added."""
    requests: list[DevicesRequest]
    granted: dict[str, int] = field(default_factory=dict)
    yields: list[str] = field(default_factory=list)
    changes: Mapping[str, str] = field(default_factory=dict)

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


def decide(
    requests: Iterable[DevicesRequest],
    present: Mapping[str, int],
    now_s: float,
    nodes: Mapping[str, Sequence[int]] | None = None,
    teams: Mapping[str, Team] | None = None,
    most: Mapping[str, int] | None = None,
) -> Decisions:
    """Decide all grants. `present`: number of devices by kind. `nodes`: those of each node, by kind, if known. `teams`:
    quotas by owner. `most`: devices that there may be by kind, where they are not those that are present."""
    by_kind: dict[str, list[DevicesRequest]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.run_id):
        by_kind[request.kind].append(request)
    granted: dict[str, int] = {}
    reasons: dict[str, str] = {}
    changes: dict[str, str] = {}
    yields: list[str] = []
    for name, of_kind in by_kind.items():
        there = present.get(name, 0)
        allowed = (most or {}).get(name, there)
        kind = _Kind(_count(there, allowed, of_kind), allowed, of_kind)
        if any(request.shares for request in of_kind):
            waiting = _serve(kind, teams or {}, now_s)
            blocked = [request for request in waiting if not _over_quota(request, kind, teams or {})]
            if not any(request.minimum <= kind.count for request in blocked):
                _share_out(kind, teams or {})
        else:
            by_node = (nodes or {}).get(name, ())
            waiting = _divide(kind, by_node if sum(by_node) == kind.count else (kind.count,), teams or {}, now_s)
            changes |= kind.changes
        granted |= {r.run_id: kind.of(r) for r in of_kind if kind.of(r) != r.granted}
        yields += kind.yields
        for place, request in enumerate(waiting):
            reasons[request.run_id] = _over_quota(request, kind, teams or {}) or _reason(request, kind, now_s, place)
    return Decisions(granted, tuple(yields), reasons, {run_id: changes[run_id] for run_id in changes & granted.keys()})


def wanted_devices(
    requests: Iterable[DevicesRequest], most: Mapping[str, int], teams: Mapping[str, Team], now_s: float
) -> dict[str, int]:
    """Return the devices to request from an autoscaler, by kind: those of all runs if there were `most`. Kinds without
    elastic runs are left out, because their runs request what they are granted."""
    by_kind: dict[str, list[DevicesRequest]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.run_id):
        by_kind[request.kind].append(request)
    wanted = {}
    for name, of_kind in by_kind.items():
        if name not in most or not _limited_to_nodes(of_kind):
            continue
        working = [request for request in of_kind if not request.waits]
        least = sum(request.minimum for request in working)
        waiting = _in_order(
            [request for request in of_kind if request.waits], _Kind(most[name], most[name], of_kind), now_s
        )
        sized = [request.sized if request.curve.step_s else request.unplanned for request in (*working, *waiting)]
        sizes = divide(sized, [max(most[name], least)], teams).sizes
        wanted[name] = min(sum(sizes.values()), most[name])
    return wanted


def _limited_to_nodes(requests: Sequence[DevicesRequest]) -> bool:
    """Return whether runs of a kind are granted only devices that are there. Runs that share have one size."""
    return any(request.sizes for request in requests) and not any(request.shares for request in requests)


def _count(there: int, most: int, requests: Sequence[DevicesRequest]) -> int:
    """Return the devices to divide."""
    if not _limited_to_nodes(requests):
        return most
    return min(most, max(there, sum(request.minimum for request in requests if not request.waits)))


def _divide(kind: _Kind, nodes: Sequence[int], teams: Mapping[str, Team], now_s: float) -> list[DevicesRequest]:
    """Grant sizes to runs that do not share, and return the runs that still wait."""
    waiting = _in_order([request for request in kind.requests if request.waits], kind, now_s)
    working = [request for request in kind.requests if not request.waits]
    for request in _last_first(working):
        if sum(each.minimum for each in working) > kind.count:  # devices were lost
            kind.yields.append(request.run_id)
            working.remove(request)
    division = divide([each.sized for each in (*working, *waiting)], nodes, teams, kind.most)
    for request in working:
        kind.granted[request.run_id] = min(division.sizes[request.run_id], request.granted)
    free = kind.free
    left = []
    for request in waiting:
        size = division.sizes[request.run_id]
        if 0 < size <= free and request.held == 0:
            kind.granted[request.run_id] = size
        else:
            left.append(request)
        free -= size
    for request in working:
        more = division.sizes[request.run_id] - request.granted
        if 0 < more <= free:
            kind.granted[request.run_id] = request.granted + more
            free -= more
    kind.changes = _changes(working, division)
    blocked = [each for each in left if not division.sizes[each.run_id] and not _over_quota(each, kind, teams)]
    _yield_to_first(kind, blocked, working)
    return left


def _changes(working: Sequence[DevicesRequest], division: Division) -> dict[str, str]:
    ids = {request.run_id for request in working}
    return {run_id: reason for run_id, reason in division.reasons.items() if run_id in ids}


def _yield_to_first(kind: _Kind, waiting: Sequence[DevicesRequest], working: Sequence[DevicesRequest]) -> None:
    """Let runs of lower priority yield, if the first waiting run fits in no other way."""
    first = next((request for request in waiting if request.minimum <= kind.most), None)
    if first is None:
        return
    least = {request.run_id: request.minimum for request in working}
    below = [request for request in _last_first(working) if request.priority < first.priority]
    if sum(least.values()) - sum(request.minimum for request in below) + first.minimum > kind.most:
        return  # even all of their devices are too few
    for request in below:
        if sum(least.values()) + first.minimum > kind.most:
            kind.yields.append(request.run_id)
            del least[request.run_id]


def _last_first(requests: Sequence[DevicesRequest]) -> list[DevicesRequest]:
    return sorted(requests, key=lambda each: (each.priority, -each.asked_at, each.run_id))


def _serve(kind: _Kind, teams: Mapping[str, Team], now_s: float) -> list[DevicesRequest]:
    """Grant minimums in order, and return the runs that still wait. One that waits for its quota blocks no other."""
    waiting = _in_order([request for request in kind.requests if request.waits], kind, now_s)
    left: list[DevicesRequest] = []
    blocked = False
    for request in waiting:
        possible = request.minimum <= kind.count and not _over_quota(request, kind, teams)
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
    last_first = _last_first(holders)
    for request in last_first:
        while kind.to_come(wanting) < wanting.minimum and kind.of(request) - request.unit >= request.minimum:
            kind.granted[request.run_id] = kind.of(request) - request.unit
    below = [request for request in last_first if request.priority < wanting.priority]
    if kind.to_come(wanting) + sum(kind.of(request) for request in below) < wanting.minimum:
        return  # even all of their devices are too few
    for request in below:
        if kind.to_come(wanting) < wanting.minimum:
            kind.yields.append(request.run_id)


def _share_out(kind: _Kind, teams: Mapping[str, Team]) -> None:
    """Grant unclaimed devices to the runs that can use more, starting with the run least above its minimum."""
    growing = [r for r in kind.requests if kind.of(r) and r.maximum > kind.of(r) and r.run_id not in kind.yields]
    while growing:
        request = min(growing, key=lambda r: (kind.of(r) - r.minimum, -r.priority, r.asked_at, r.run_id))
        within = kind.of(request) + request.unit <= request.maximum and _admits(request, request.unit, kind, teams)
        if within and request.unit <= kind.free:
            kind.granted[request.run_id] = kind.of(request) + request.unit
        else:
            growing.remove(request)


def _admits(request: DevicesRequest, more: int, kind: _Kind, teams: Mapping[str, Team]) -> bool:
    """Return whether the quota of a run's owner allows it `more` devices. Runs that share count with all of theirs."""
    limit = teams.get(request.owner, Team()).max_devices
    taken = sum(kind.of(each) for each in kind.requests if each.owner == request.owner)
    return limit is None or taken + more <= limit


def _over_quota(request: DevicesRequest, kind: _Kind, teams: Mapping[str, Team]) -> str:
    """Return why the quota of its owner keeps a run waiting; empty if it does not."""
    if _admits(request, request.minimum, kind, teams):
        return ""
    limit = teams[request.owner].max_devices
    taken = sum(kind.of(each) for each in kind.requests if each.owner == request.owner)
    return f"waiting for {request.minimum} x {request.kind}: its API key may have {limit} (--quota), and has {taken}"


def _reason(request: DevicesRequest, kind: _Kind, now_s: float, place: int) -> str:
    waited_s = max(now_s - request.asked_at, 0.0)
    wanted = f"waiting for {request.minimum} x {request.kind} for {waited_s:.0f} s"
    if request.minimum > kind.most:
        return f"{wanted}; there are {kind.most} in all. Ask for fewer (placement.devices), or add nodes"
    ahead = f", {place} run(s) before it" if place else ""
    if request.minimum > kind.count:
        return f"{wanted}; {kind.count} of {kind.most} are there, and the autoscaler is asked for more{ahead}"
    return f"{wanted}; {max(kind.free, 0)} of {kind.count} free{ahead}"
