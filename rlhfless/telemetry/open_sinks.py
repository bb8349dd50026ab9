"""Opens the metric sinks of a spec."""

from __future__ import annotations

from pathlib import Path

from rlhfless.spec import LoggingSpec
from rlhfless.telemetry.sinks import JsonlSink, MetricSink, MetricSinks


def open_sinks(logging: LoggingSpec, folder: Path, run_id: str, *others: MetricSink) -> MetricSinks:
    """Open the spec's sinks below the run's output folder, and combine them with `others`.

    Raises PortInUse if `logging.metrics_port` is taken.
    """
    sinks: list[MetricSink] = list(others)
    # Imported here because most runs need neither, and each takes a quarter of a second to import. The
    # exporter comes first because only it can fail.
    if logging.metrics_port is not None:
        from rlhfless.telemetry.prometheus import PrometheusSink

        sinks.append(PrometheusSink(logging.metrics_port, run_id))
    if logging.tensorboard:
        from rlhfless.telemetry.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder / "tensorboard"))
    sinks.append(JsonlSink(folder / "metrics.jsonl"))
    return MetricSinks(sinks)
