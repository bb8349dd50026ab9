"""A Prometheus exporter on the loopback interface, with its own registry.

Only emitted metrics are exposed, because an unset gauge would read 0. It listens on loopback only, because metrics name
the run; use a proxy to read them from other machines.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from rlhfless.telemetry.metrics import Kind, Metric, resolve
from rlhfless.telemetry.sinks import NO_SAMPLES
from rlhfless.util.errors import UserError

HOST = "127.0.0.1"

# Buckets of response lengths: powers of two up to the longest context in common use.
_BUCKETS = tuple(float(2**power) for power in range(4, 18))
# Longest wait for the server thread to end when the sink closes.
_STOP_S = 5.0


class PortInUse(UserError):
    """Another process uses the exporter's port. The message names the port and a hint."""


class PrometheusSink:
    """Serves the latest values at http://127.0.0.1:<port>/metrics. Raises PortInUse."""

    def __init__(self, port: int, run_id: str) -> None:
        self._registry = CollectorRegistry()
        self._collectors: dict[str, Counter | Gauge | Histogram] = {}
        self._totals: dict[str, float] = {}
        run = Gauge("rlhfless_run_info", "The run these metrics are of", ["run_id"], registry=self._registry)
        run.labels(run_id).set(1)
        self._step = Gauge("rlhfless_step", "Training steps done", registry=self._registry)
        try:
            self._server, self._thread = start_http_server(port, addr=HOST, registry=self._registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortInUse(
                f"logging.metrics_port is {port}, and another process listens on that port of {HOST}; "
                "choose another port, or leave it out to serve no metrics"
            ) from error

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        self._step.set(step)
        for name, value in values.items():
            metric, label = resolve(name)
            collector = self._collector(metric)
            if isinstance(collector, Counter):
                # Prometheus counts by increments; a total that does not grow adds nothing.
                before = self._totals.get(metric.name, 0.0)
                collector.inc(max(value - before, 0.0))
                self._totals[metric.name] = max(value, before)
            elif isinstance(collector, Gauge):
                (collector.labels(label) if metric.label else collector).set(value)
        for name, many in samples.items():
            histogram = self._collector(resolve(name)[0])
            if isinstance(histogram, Histogram):
                for value in many:
                    histogram.observe(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_S)

    def _collector(self, metric: Metric) -> Counter | Gauge | Histogram:
        """Return a metric's Prometheus collector, created on its first emission."""
        if metric.name not in self._collectors:
            name, text, registry = metric.prometheus_name, metric.help, self._registry
            match metric.kind:
                case Kind.COUNTER:
                    collector: Counter | Gauge | Histogram = Counter(name, text, registry=registry)
                case Kind.HISTOGRAM:
                    collector = Histogram(name, text, buckets=_BUCKETS, registry=registry)
                case Kind.GAUGE:
                    collector = Gauge(name, text, [metric.label] if metric.label else [], registry=registry)
            self._collectors[metric.name] = collector
        return self._collectors[metric.name]
