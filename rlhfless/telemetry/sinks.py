"""Destinations of a run's metrics and progress.

A sink gets one emission per training step; `MetricSinks` validates it for all sinks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rlhfless.telemetry.metrics import Kind, UndeclaredMetric, resolve

Responses = Sequence[Mapping[str, Any]]
"""Rows with a prompt, a response and its reward."""

NO_SAMPLES: Mapping[str, Sequence[float]] = MappingProxyType({})


class MetricSink(Protocol):
    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        """Take the values of one step, and all of its samples for histograms."""

    def close(self) -> None:
        """Write the remaining values and free all resources. Do not emit afterwards."""


class MetricSinks:
    """Combines several sinks. Raises UndeclaredMetric before any sink sees the values."""

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

    def responses(self, step: int, rows: Responses) -> None:
        """Show responses of a step, in the sinks that can."""
        for sink in self._sinks:
            if rows and (show := getattr(sink, "responses", None)):
                show(step, rows)

    def close(self) -> None:
        """Close all sinks, even if closing one fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class JsonlSink:
    """Writes a JSON object per emission: `step`, `time_s` (unix), the values, and the samples as lists.

    Appends, so a resumed run continues in the same file; a repeated step is not written twice. NaN and infinity become
    `null`, because JSON cannot represent them.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text("utf-8", "replace") if path.exists() else ""
        self._written = _emissions_in(before)
        # Line buffering, so that a run that dies leaves whole lines.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if before and not before.endswith("\n"):  # a full disk truncated the last line
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
    """Return an emission's identity: a step's metrics, or the evaluation after it."""
    return step, "step_s" in names


def _emissions_in(lines: str) -> set[tuple[int, bool]]:
    """Return the emissions of a run's earlier attempts. Truncated lines do not count."""
    emissions = set()
    for text in lines.splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            emissions.add(emission(line["step"], line))
    return emissions


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON cannot represent."""
    return float(value) if math.isfinite(value) else None


# -- progress


FOR_DEVICES = "waiting for devices"
"""Prefix of a wait for granted devices. A service that knows the reason for the wait appends it."""


class RunProgress(Protocol):
    """The progress display of a run, on a terminal or in a service."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Show the awaited event within the block. For long waits, such as a start."""

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Show a stage of a step within the block."""

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None:
        """Announce, before anything starts, that the run resumes after `step`; earlier attempts took `earlier_s`."""

    def show(self, content: str) -> None:
        """Show a line."""
