"""What each device of a run did in its last steps, as bars."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rlhfless.records.traces import read_trace

MOST_BARS = 20_000
"""In one answer; a step of a hundred actors has some hundreds."""


def timeline_of(folder: str, steps: int) -> dict[str, Any]:
    """`TimelineObject` without the run's id, as JSON: devices with their holdings and the work in them."""
    trace = read_trace(folder, tokens=False)
    records = trace.steps[-steps:]
    if not records:
        return {"rows": []}
    since_s, until_s = records[0].start_s, records[-1].end_s
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    devices: dict[str, set[str]] = defaultdict(set)
    for holding in trace.holdings:
        devices[holding.incarnation].add(holding.device)
        if holding.end_s > since_s and holding.start_s < until_s:
            rows[holding.device].append(
                {
                    "function": str(holding.function),
                    "work": None,
                    "step": None,
                    "state": str(holding.state),
                    "start_s": max(holding.start_s, since_s),
                    "end_s": min(holding.end_s, until_s),
                }
            )
    for call in trace.invocations:
        if call.end_s > since_s and call.start_s < until_s:
            for device in devices[call.incarnation]:
                rows[device].append(
                    {
                        "function": str(call.function),
                        "work": str(call.work),
                        "step": call.step,
                        "state": "serving",
                        "start_s": max(call.start_s, since_s),
                        "end_s": min(call.end_s, until_s),
                    }
                )
    ordered = sorted(rows.items())
    return {"rows": [{"device": device, "bars": _bounded(bars)} for device, bars in ordered]}


def _bounded(bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(bars, key=lambda bar: (bar["start_s"], bar["end_s"]))[-MOST_BARS:]
