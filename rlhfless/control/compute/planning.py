"""The memory, time and cost of a run: on the service's devices, and on other devices of the price book."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless.control.compute.prediction import Lengths, lengths_of, predicted
from rlhfless.prepare.memory.assumed import config_file, parsed_devices, question_of
from rlhfless.prepare.memory.changes import Question, nearest_change
from rlhfless.prepare.memory.settled import plan_problems
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.placement import CPU_KIND, PlacementError
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, UserError

COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of devices that are tried of each other kind."""


def planned(question: Mapping[str, Any]) -> dict[str, Any]:
    """The plan, as JSON. Raises InputError.

    `question`: spec, present (devices by kind), devices (of the user's choice), trace (folder of an earlier run, for
    its lengths and latencies), deadline_s, alone (only the run's own devices)."""
    spec = RunSpec.model_validate(question["spec"])
    trace = read_trace(question["trace"], tokens=False) if question.get("trace") else None
    lengths, config = lengths_of(spec, trace), _config(spec)
    kind, count = _chosen(spec, question["present"])
    main = question_of(spec, kind, count)
    rows = [_row(main, config, lengths, trace)]
    asked = question.get("devices") or ()
    others = [] if question.get("alone") else _others(spec, kind, count, asked)
    for name, number in others:
        try:
            rows.append(_row(question_of(spec, name, number), config, lengths, trace))
        except (InputError, PlacementError) as error:
            if asked:  # devices of the user's choice get an error; impossible kinds of the price book are left out
                rows.append(_empty_row(name, number, spec.placement.mode, [str(error)]))
    return {
        "spec": main.spec.model_dump(mode="json"),
        "steps": spec.steps,
        "sequence_tokens": main.sequence_tokens,
        "parameters": main.shape.parameters,
        "chosen": rows[0],
        "memory": _memory(main),
        "alternatives": _in_order(rows[1:], question.get("deadline_s")),
        "lengths": lengths.source,
        "missing": _missing(lengths, trace, kind, question["present"]),
    }


def planned_on(asked: Question, trace: Trace | None, measured: LatencyFile | None = None) -> tuple[dict[str, Any], str]:
    """`chosen` and `lengths` of a plan, for these devices alone; with latencies `measured` on them, if they were."""
    lengths = lengths_of(asked.spec, trace)
    return _row(asked, _config(asked.spec), lengths, trace, measured), lengths.source


def _config(spec: RunSpec) -> dict[str, Any] | None:
    """The model's config.json; None if it cannot be read."""
    try:
        path = config_file(spec.model.path)
        return json.loads(path.read_text("utf-8")) if path.is_file() else None
    except OSError:
        return None


def _chosen(spec: RunSpec, devices: Mapping[str, int]) -> tuple[str, int]:
    """Kind and number of the run's devices, from its spec or else from the service."""
    gpus = [kind for kind in devices if kind != CPU_KIND]
    kind = spec.placement.kind or (gpus[0] if gpus else CPU_KIND)
    return kind, spec.placement.devices or devices.get(kind, 0) or 1


def _others(spec: RunSpec, kind: str, count: int, asked: Sequence[str]) -> list[tuple[str, int]]:
    if asked:
        return [parsed_devices(text) for text in asked]
    known = load_price_book(spec.scaling.prices).kinds
    kinds = [name for name in load_devices() if name in known and name != CPU_KIND]
    return [(name, number) for name in kinds for number in COUNTS if (name, number) != (kind, count)]


def _empty_row(kind: str, count: int, placement: str, problems: Sequence[str]) -> dict[str, Any]:
    """PlannedDevices without a prediction. `problems`: why the run does not fit; empty if it does."""
    empty = {"nearest_change": None, "predicted": None, "reason": None}
    devices = {"kind": kind, "count": count, "placement": placement}
    return devices | {"fits": not problems, "problems": list(problems)} | empty


def _row(
    asked: Question,
    config: dict[str, Any] | None,
    lengths: Lengths,
    trace: Trace | None,
    measured: LatencyFile | None = None,
) -> dict[str, Any]:
    """The plan for a kind and number of devices: whether the run fits, and its time and cost if it does."""
    plan = asked.plan()
    problems = plan_problems(asked, plan)
    row = _empty_row(asked.sheet.kind, asked.count, asked.spec.placement.mode, problems)
    if problems:
        change = None if plan.fits else nearest_change(asked)
        row["nearest_change"] = None if change is None else change.text
    elif config is None:
        row["reason"] = "the model's config.json cannot be read"
    else:
        try:
            same = None if measured is not None else _same_devices(trace, asked)
            latency = measured if same is None else calibrate([same])
            row["predicted"] = predicted(asked, config, lengths, latency).model_dump()
        except (UserError, ValueError) as error:
            row["reason"] = str(error).splitlines()[-1].strip()
    return row


def _same_devices(trace: Trace | None, asked: Question) -> Trace | None:
    """The trace, if it was recorded with this model on these devices."""
    if trace is None or trace.meta.spec["model"]["path"] != asked.spec.model.path:
        return None
    kinds = {holding.device_kind for holding in trace.holdings}
    return trace if asked.sheet.kind in kinds else None


def _memory(asked: Question) -> dict[str, Any]:
    """Per device and phase, as `rlhfless plan` shows it."""
    plan = asked.plan()
    devices = [
        {
            "kind": device.kind,
            "count": device.count,
            "memory_bytes": int(device.memory_bytes),
            "size_bytes": int(device.size_bytes),
            "fits": device.fits,
            "functions": [
                {
                    "function": str(part.function),
                    "phases": [
                        {
                            "name": phase.name,
                            "size_bytes": int(phase.size_bytes),
                            "parts": {one.name: int(one.size_bytes) for one in phase.parts if one.size_bytes},
                        }
                        for phase in part.phases
                    ],
                }
                for part in device.functions
            ],
        }
        for device in plan.devices
    ]
    return {
        "devices": devices,
        "kv_tokens": int(max(plan.kv_tokens, 0)),
        "micro_batch_tokens": int(plan.micro_batch_tokens),
        "host_bytes": int(plan.host_bytes),
        "shared_bytes": int(plan.shared_bytes),
    }


def _in_order(rows: Sequence[dict[str, Any]], deadline_s: float | None) -> list[dict[str, Any]]:
    """Rows in order: devices that keep the deadline, the cheapest first; those that miss it, the fastest first;
    others."""

    def rank(row: dict[str, Any]) -> tuple[int, float]:
        predicted = row["predicted"]
        if predicted is None:
            return (2 if row["fits"] else 3, row["count"])
        late = deadline_s is not None and predicted["wall_s"] > deadline_s
        return (1, predicted["wall_s"]) if late else (0, predicted["cost_usd"])

    return sorted(rows, key=rank)


def _missing(lengths: Lengths, trace: Trace | None, kind: str, devices: Mapping[str, int]) -> list[str]:
    """The missing inputs of a better answer."""
    missing = []
    if not lengths.known:
        missing.append("response lengths: name an earlier run of these prompts with `lengths_of`")
    if trace is None:
        missing.append("measured latencies: an earlier run of this model on these devices, by `lengths_of`")
    if kind not in devices:
        missing.append(f"{kind}: the service has none now")
    return missing
