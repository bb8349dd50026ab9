"""Figures of the service and of all runs at work, for Prometheus: made of the database when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.api.documented import answers
from rlhfless.control.database.tables import LeaseRow, RunRow
from rlhfless.control.lifecycle import Status
from rlhfless.control.security.access import requires
from rlhfless.control.service import Service, service_of
from rlhfless.telemetry.metrics import Kind, Metric, UndeclaredMetric, resolve

router = APIRouter(tags=["health"])

RUN = ["run_id", "run"]


@router.get(
    "/metrics",
    response_class=Response,
    summary="For Prometheus",
    dependencies=[Depends(requires("read"))],
    responses=answers("text/plain", {"type": "string"}, "Figures in Prometheus's format."),
)
async def prometheus(request: Request) -> Response:
    """Runs by status, devices, and the latest metrics of each run that is at work or paused."""
    service = service_of(request.app)
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
        """See prometheus_client."""
        by_status = GaugeMetricFamily("rlhfless_runs", "Runs by status", labels=["status"])
        for status in Status:
            by_status.add_metric([status], self._counts.get(status, 0))
        yield by_status
        ray = self._service.ray()
        up = GaugeMetricFamily("rlhfless_ray_up", "Whether the Ray of the runs is there")
        up.add_metric([], float(ray is not None))
        yield up
        yield from self._devices()
        yield from self._of_runs()
        yield from self._latest()

    def _devices(self) -> Iterator[GaugeMetricFamily]:
        devices = GaugeMetricFamily("rlhfless_devices", "Devices that runs may hold together", labels=["kind"])
        for kind, count in self._service.devices_there().items():
            devices.add_metric([kind], count)
        yield devices
        held: Counter[str] = Counter()
        wanted: Counter[str] = Counter()
        for lease in self._leases:
            held[lease.kind] += lease.held
            wanted[lease.kind] += 0 if lease.granted else lease.minimum
        for name, help_, counts in (
            ("rlhfless_devices_held", "Devices that runs hold", held),
            ("rlhfless_devices_wanted", "Devices that runs wait for", wanted),
        ):
            family = GaugeMetricFamily(name, help_, labels=["kind"])
            for kind, count in counts.items():
                family.add_metric([kind], count)
            yield family

    def _of_runs(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        step = GaugeMetricFamily("rlhfless_step", "Training steps done", labels=RUN)
        cost = CounterMetricFamily("rlhfless_run_cost_usd", "Cost of the run so far", labels=RUN)
        attempts = GaugeMetricFamily("rlhfless_run_attempts", "Drivers that have worked on the run", labels=RUN)
        since = GaugeMetricFamily(
            "rlhfless_run_status_since_seconds", "Unix time since which the run has its status", labels=[*RUN, "status"]
        )
        for run in self._runs:
            labels = [run.id, run.name]
            step.add_metric(labels, run.step)
            cost.add_metric(labels, run.cost_usd)
            attempts.add_metric(labels, run.attempt)
            since.add_metric([*labels, run.status], run.status_since)
        yield from (step, cost, attempts, since)

    def _latest(self) -> Iterator[GaugeMetricFamily]:
        """The metrics of rlhfless.telemetry.metrics, as `logging.metrics_port` names them."""
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


def _declared(name: str) -> tuple[Metric, str | None] | None:
    try:
        return resolve(name)
    except UndeclaredMetric:
        return None
