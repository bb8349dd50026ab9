"""Liveness, readiness, and Prometheus metrics computed from the database on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy import text as sql
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.routes import OfService, answers
from rlhfless.control.database.access import Unavailable
from rlhfless.control.database.tables import LeaseRow, RunRow
from rlhfless.control.keys import requires
from rlhfless.control.lifecycle import Status
from rlhfless.control.service import Service
from rlhfless.telemetry.metrics import Kind, Metric, UndeclaredMetric, resolve

router = APIRouter(tags=["health"])

RUN = ["run_id", "run"]


@router.get("/healthz", summary="Liveness")
async def healthz() -> dict[str, str]:
    """Answer without checking database or Ray, because a service that waits for them must not be restarted."""
    return {"status": "ok"}


@router.get("/readyz", summary="Readiness", responses={503: {"description": "What the service waits for."}})
async def readyz(service: OfService) -> JSONResponse:
    """Answer 200 when database and Ray answer, else 503 with what the service waits for."""
    waiting = []
    try:
        await service.database.read(lambda session: session.execute(sql("SELECT 1")).scalar())
    except Unavailable as error:
        waiting.append(str(error))
    if wait := service.ray_wait():
        waiting.append(wait)
    devices = service.device_counts()
    body = {"status": "waiting" if waiting else "ok", "waiting_for": waiting, "devices": devices}
    return JSONResponse(body, 503 if waiting else 200)


@router.get(
    "/metrics",
    response_class=Response,
    summary="Prometheus metrics",
    dependencies=[Depends(requires("read"))],
    responses=answers("text/plain", {"type": "string"}, "Figures in Prometheus's format."),
)
async def prometheus(service: OfService) -> Response:
    """Return runs by status, devices, and the latest metrics of each run that has not ended."""
    counts, runs, leases = await service.database.read(_figures)
    registry = CollectorRegistry()
    registry.register(_Collected(service, counts, runs, leases))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _figures(session: Session) -> tuple[dict[str, int], list[RunRow], list[LeaseRow]]:
    counted = session.execute(select(RunRow.status, func.count()).group_by(RunRow.status))
    by_status: dict[str, int] = dict(counted.tuples().all())
    return by_status, store.unended(session), list(session.scalars(select(LeaseRow)))


class _Collected(Collector):
    def __init__(self, service: Service, counts: dict[str, int], runs: list[RunRow], leases: list[LeaseRow]) -> None:
        self._service = service
        self._counts = counts
        self._runs = runs
        self._leases = leases

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        counts = [([status], self._counts.get(status, 0)) for status in Status]
        yield _family("rlhfless_runs", "Runs by status", ["status"], counts)
        up = self._service.ray() is not None
        yield _family("rlhfless_ray_up", "Whether the Ray of the runs is there", [], [([], float(up))])
        yield from self._devices()
        yield from self._of_runs()
        yield from self._latest()

    def _devices(self) -> Iterator[GaugeMetricFamily]:
        held: Counter[str] = Counter()
        wanted: Counter[str] = Counter()
        for lease in self._leases:
            held[lease.kind] += lease.held
            wanted[lease.kind] += 0 if lease.granted else lease.minimum
        for name, text, counts in (
            ("rlhfless_devices", "Devices that runs may hold together", self._service.device_counts()),
            ("rlhfless_devices_held", "Devices that runs hold", held),
            ("rlhfless_devices_wanted", "Devices that runs wait for", wanted),
        ):
            yield _family(name, text, ["kind"], [([kind], count) for kind, count in counts.items()])

    def _of_runs(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        named = [([run.id, run.name], run) for run in self._runs]
        yield _family("rlhfless_step", "Training steps done", RUN, [(label, run.step) for label, run in named])
        cost = CounterMetricFamily("rlhfless_run_cost_usd", "Cost of the run so far", labels=RUN)
        for label, run in named:
            cost.add_metric(label, run.cost_usd)
        yield cost
        attempts = [(label, run.attempt) for label, run in named]
        yield _family("rlhfless_run_attempts", "Drivers that have worked on the run", RUN, attempts)
        since = [([*label, run.status], run.status_since) for label, run in named]
        text = "Unix time since which the run has its status"
        yield _family("rlhfless_run_status_since_seconds", text, [*RUN, "status"], since)

    def _latest(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of rlhfless.telemetry.metrics, under the same names as `logging.metrics_port`."""
        families: dict[str, GaugeMetricFamily] = {}
        for run in self._runs:
            for name, value in run.latest.items():
                declared = _declared(name)
                if declared is None or value is None or declared[0].kind is Kind.HISTOGRAM:
                    continue
                metric, label = declared
                labels = [*RUN, *([metric.label] if metric.label else [])]
                family = families.setdefault(
                    metric.name, GaugeMetricFamily(metric.prometheus_name, metric.help, labels=labels)
                )
                family.add_metric([run.id, run.name, *([label] if label else [])], value)
        yield from families.values()


def _family(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values:
        family.add_metric(label, value)
    return family


def _declared(name: str) -> tuple[Metric, str | None] | None:
    try:
        return resolve(name)
    except UndeclaredMetric:
        return None
