"""Writes the table of all metrics into docs/metrics.md, between its two markers, from rlhfless/telemetry/metrics.py.

Run it after a change of that file; `--check` only says whether the page is up to date (exit code 1 if not).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from marked_page import write_part

from rlhfless.telemetry.metrics import METRICS, Kind, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


def reference() -> str:
    """One row per metric, in the order of the declarations."""
    return "\n".join(["| metric | unit | |\n|---|---|---|", *map(_row, METRICS.values()), ""])


def _row(metric: Metric) -> str:
    name = f"{metric.name}/<{metric.label}>" if metric.label else metric.name
    return f"| `{name}` | {metric.unit.replace('_', ' ')} | {'. '.join(_sentences(metric))} |"


def _sentences(metric: Metric) -> Iterator[str]:
    yield metric.help.replace("|", "\\|")
    if metric.kind is Kind.HISTOGRAM:
        yield "A histogram: its quantiles are `/p10`, `/p50`, `/p90` and `/p99`"


if __name__ == "__main__":
    sys.exit(write_part(PAGE, BEGIN, END, reference()))
