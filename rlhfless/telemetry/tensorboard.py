"""TensorBoard event files, written with TensorBoard's own writer because torch's would import all of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlhfless.telemetry.sinks import NO_SAMPLES, emission

# TensorBoard always draws 30 buckets; more would only enlarge the file.
_BUCKETS = 30


class TensorBoardSink:
    """Writes scalars and histograms under the metrics' names. A repeated step is not written twice."""

    def __init__(self, folder: Path) -> None:
        self._written = _emissions_in(folder)
        self._writer = EventFileWriter(str(folder))

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        if (which := emission(step, values)) in self._written:
            return
        self._written.add(which)
        rows = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        rows += [Summary.Value(tag=name, histo=_histogram(many)) for name, many in samples.items() if many]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=rows)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _emissions_in(folder: Path) -> set[tuple[int, bool]]:
    """Return the emissions that earlier attempts of the run wrote."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = (event for path in folder.glob("events.out.tfevents.*") for event in EventFileLoader(str(path)).Load())
    return {emission(event.step, {value.tag for value in event.summary.value}) for event in events}


def _histogram(samples: Sequence[float]) -> HistogramProto:
    numbers = np.asarray(samples, dtype=np.float64)
    counts, edges = np.histogram(numbers, bins=_BUCKETS)
    return HistogramProto(
        min=numbers.min(),
        max=numbers.max(),
        num=len(numbers),
        sum=numbers.sum(),
        sum_squares=np.square(numbers).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
