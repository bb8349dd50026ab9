"""Fleets of runs that share engines (`placement.share`): their engines and bills, and which runs may join."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from rlhfless.control.database.tables import RunRow
from rlhfless.control.errors import ApiError
from rlhfless.control.lifecycle import ENDED, DesiredState
from rlhfless.control.objects import FleetEngineNow, FleetEngineObject, FleetObject, FleetRunObject
from rlhfless.scaling.fleets import Terms, difference, terms_of
from rlhfless.spec import RunSpec

GONE_S = 60.0
"""An engine of which no run has told for longer has ended. Drivers tell every few seconds."""

KEPT = 200
"""Engines that have ended, of which the figures are kept."""


class Fleets:
    """The engines that several runs share, in memory: what the runs' drivers have told since the service started."""

    def __init__(self) -> None:
        self._engines: dict[str, FleetEngineNow] = {}
        """By incarnation, in the order of their starts."""

    def add(self, engines: Iterable[FleetEngineNow]) -> None:
        """Take a driver's report. Several runs tell of the same engine; the newest report counts."""
        for engine in engines:
            known = self._engines.get(engine.incarnation)
            if known is None or known.now_s < engine.now_s:
                self._engines[engine.incarnation] = engine
        for incarnation in [*self._engines][: max(len(self._engines) - KEPT, 0)]:
            del self._engines[incarnation]

    def objects(self, now_s: float) -> list[FleetObject]:
        """Return the fleets, the newest first."""
        by_fleet: dict[str, list[FleetEngineNow]] = defaultdict(list)
        for engine in self._engines.values():
            by_fleet[engine.fleet].append(engine)
        return [_fleet(name, engines, now_s) for name, engines in reversed(by_fleet.items())]


def _fleet(name: str, engines: Sequence[FleetEngineNow], now_s: float) -> FleetObject:
    runs: dict[str, FleetRunObject] = {}
    for engine in engines:
        alive = now_s - engine.now_s < GONE_S
        for run_id, share in engine.runs.items():
            run = runs.setdefault(run_id, FleetRunObject(run_id=run_id))
            run.busy_device_s += share.busy_s * engine.devices
            run.present = run.present or (share.present and alive)
            run.waiting += share.waiting * alive
            run.running += share.running * alive
    told = [_engine(engine, now_s) for engine in engines]
    busy_s = sum(run.busy_device_s for run in runs.values())
    for run in runs.values():
        run.share = run.busy_device_s / busy_s if busy_s else 0.0
    return FleetObject(
        id=name,
        terms=engines[-1].terms,
        engines=told,
        runs=sorted(runs.values(), key=lambda run: -run.busy_device_s),
        provisioned_device_s=sum(each.provisioned_device_s for each in told),
        busy_device_s=sum(each.busy_device_s for each in told),
        idle_device_s=sum(each.idle_device_s for each in told),
        cold_device_s=sum(each.cold_device_s for each in told),
    )


def _engine(engine: FleetEngineNow, now_s: float) -> FleetEngineObject:
    busy_s = sum(share.busy_s for share in engine.runs.values())
    return FleetEngineObject(
        name=engine.engine,
        incarnation=engine.incarnation,
        started_at=engine.started_s,
        seen_at=engine.now_s,
        up=now_s - engine.now_s < GONE_S,
        kind=engine.kind,
        devices=engine.devices,
        slots=engine.slots,
        provisioned_device_s=(engine.now_s - engine.started_s) * engine.devices,
        busy_device_s=busy_s * engine.devices,
        idle_device_s=max(engine.now_s - engine.up_s - busy_s, 0.0) * engine.devices,
        cold_device_s=(engine.up_s - engine.started_s) * engine.devices,
    )


def require_same_terms(session: Session, spec: RunSpec) -> None:
    """Refuse a run whose engines would differ from those that unfinished runs of the same model share. Raises ApiError
    (409)."""
    if spec.placement.share is None:
        return
    mine, found = terms_of(spec), ""
    for run_id, theirs in _sharing(session):
        if theirs["model.path"] != mine["model.path"]:
            continue
        differs = difference(mine, theirs)
        if not differs:
            return
        found = found or f"run {run_id} of the same model shares its engines with other settings: {differs}"
    if found:
        hint = "set them equal, or leave placement.share out"
        raise ApiError(409, "other_fleet", f"placement.share is adapters, but {found}; {hint}", "placement.share")


def _sharing(session: Session) -> Iterable[tuple[str, Terms]]:
    """Yield the unfinished runs that share engines, with the terms of their fleets, oldest first."""
    goes_on = RunRow.status.not_in(list(ENDED)), RunRow.desired_state != DesiredState.CANCEL
    query = select(RunRow.id, RunRow.spec).where(*goes_on).order_by(RunRow.created_at)
    for run_id, values in session.execute(query):
        if (values.get("placement") or {}).get("share") is not None:
            yield run_id, terms_of(RunSpec.model_validate(values))
