"""Opens the metric sinks of a spec."""

from __future__ import annotations

from pathlib import Path

from rlhfless.spec import RunSpec
from rlhfless.telemetry.sinks import JsonlSink, MetricSink, MetricSinks
from rlhfless.util.text import redacted


def open_sinks(spec: RunSpec, folder: Path, run_id: str, *others: MetricSink) -> MetricSinks:
    """Open the spec's sinks below the run's output folder, and combine them with `others`.

    Raises PortInUse if `logging.metrics_port` is taken, and InputError if a tracker's package is not installed.
    """
    logging = spec.logging
    sinks: list[MetricSink] = list(others)
    # Imported here because most runs need neither, and each takes a quarter of a second to import. The
    # exporter comes first because only it can fail.
    if logging.metrics_port is not None:
        from rlhfless.telemetry.prometheus import PrometheusSink

        sinks.append(PrometheusSink(logging.metrics_port, run_id))
    if logging.tensorboard:
        from rlhfless.telemetry.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if logging.trackers:
        from rlhfless.telemetry.trackers import TrackerSink

        config = redacted(spec.model_dump(mode="json"))
        sinks += [TrackerSink(tracker, folder, run_id, config) for tracker in logging.trackers]
    sinks.append(JsonlSink(folder / "metrics.jsonl"))
    return MetricSinks(sinks)
