"""Export a run as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process per function, one track per device and kind of slice: the replica that held it with its state, and the calls
that ran. Times are in microseconds, as the format requires.
"""

from __future__ import annotations

from typing import Any

from rlhfless.records import FunctionName, Work, in_order
from rlhfless.records.traces import Trace

_US = 1e6


def trace_events(trace: Trace) -> dict[str, Any]:
    """Return the trace as a JSON object."""
    names = in_order([*(held.function for held in trace.holdings), *(call.function for call in trace.invocations)])
    processes = {name: number for number, name in enumerate(names, 1)}
    tracks: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []

    def track(process: int, name: str) -> int:
        return tracks.setdefault((process, name), len(tracks) + 1)

    device_of: dict[str, str] = {}
    for holding in trace.holdings:
        process = processes[holding.function]
        device_of.setdefault(holding.incarnation, holding.device)
        events.append(
            _slice(process, track(process, holding.device), str(holding.state), holding.start_s, holding.end_s)
            | {"args": {"replica": holding.replica, "incarnation": holding.incarnation, "share": holding.share}}
        )
    for call in trace.invocations:
        process = processes[call.function]
        where = f"{device_of.get(call.incarnation, call.replica)} work"
        events.append(
            _slice(process, track(process, where), _work_text(call.function, call.work), call.start_s, call.end_s)
            | {"args": {"step": call.step, "input_tokens": call.input_tokens, "output_tokens": call.output_tokens}}
        )
    steps = len(processes) + 1
    for record in trace.steps:
        events.append(_slice(steps, track(steps, "steps"), f"step {record.step}", record.start_s, record.end_s))
    for decision in trace.decisions:
        events.append(
            {"ph": "i", "s": "p", "name": f"{decision.kind}: {decision.choice}", "ts": decision.at_s * _US}
            | {"pid": steps, "tid": track(steps, "decisions"), "args": dict(decision.inputs)}
        )
    named = [(number, name) for name, number in processes.items()] + [(steps, "run")]
    meta = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in named]
    meta += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for (pid, name), tid in tracks.items()
    ]
    return {"traceEvents": meta + events, "displayTimeUnit": "ms"}


def _slice(process: int, track: int, name: str, start_s: float, end_s: float) -> dict[str, Any]:
    span = {"ts": start_s * _US, "dur": (end_s - start_s) * _US}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **span}


def _work_text(function: str, work: Work) -> str:
    """Return the name of a call's work; a critic's calls have the kinds of the reference's and the learner's."""
    if function == FunctionName.CRITIC:
        return {Work.LOGPROBS: "critic values", Work.LEARN: "critic learn"}.get(work, str(work).replace("_", " "))
    return "reference" if work is Work.LOGPROBS else str(work).replace("_", " ")
