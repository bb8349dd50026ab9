"""The destinations of metrics. A sink gets one emission per training step; `MetricSinks` checks it for all sinks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from rlhfless.telemetry.metrics import Kind, UndeclaredMetric, resolve

NO_SAMPLES: Mapping[str, Sequence[float]] = MappingProxyType({})


class MetricSink(Protocol):
    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        """Takes the values of one step, and for histograms all samples of it."""

    def close(self) -> None:
        """Writes the remaining values and frees all resources. No emission may follow."""


class MetricSinks:
    """Several sinks as one. Raises UndeclaredMetric, before any sink sees the values."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        for name in values:
            if resolve(name)[0].kind is Kind.HISTOGRAM:
                raise UndeclaredMetric(name)
        for name in samples:
            if resolve(name)[0].kind is not Kind.HISTOGRAM:
                raise UndeclaredMetric(name)
        for sink in self._sinks:
            sink.emit(step, values, samples)

    def close(self) -> None:
        """Closes all of them, even if closing one fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class JsonlSink:
    """One JSON object per emission: `step`, `time_s` (unix), the values, and the samples as lists.

    Appends, so that a resumed run goes on in the same file; a step that is done again is not written again. NaN and
    infinity are `null`, because JSON cannot write them.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text("utf-8", "replace") if path.exists() else ""
        self._written = _emissions_in(before)
        # Line buffering: a run that dies leaves whole lines.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if before and not before.endswith("\n"):  # a full disk has cut the last line off
            self._file.write("\n")

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        if (which := emission(step, values)) in self._written:
            return
        self._written.add(which)
        line: dict[str, object] = {"step": step, "time_s": time.time()}
        line |= {name: finite(value) for name, value in values.items()}
        line |= {name: [finite(value) for value in many] for name, many in samples.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def emission(step: int, names: Container[str]) -> tuple[int, bool]:
    """Identifies an emission: the metrics of a step, or the evaluation after it."""
    return step, "step_s" in names


def _emissions_in(lines: str) -> set[tuple[int, bool]]:
    """The emissions in the lines of earlier attempts of a run. A line that was cut off does not count."""
    emissions = set()
    for text in lines.splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            emissions.add(emission(line["step"], line))
    return emissions


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON cannot have."""
    return float(value) if math.isfinite(value) else None
