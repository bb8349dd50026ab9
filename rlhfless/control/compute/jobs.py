"""The jobs by name. Each takes and returns JSON values. Only `preload` imports this module, because its imports take
seconds."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfless.control.compute.simulating import best_static, check, simulated
from rlhfless.planning.compare import comparison
from rlhfless.planning.run_plan import forecast, planned
from rlhfless.prepare.reward_trial import try_rewards
from rlhfless.records.traces import read_trace
from rlhfless.sim.workloads.recorded import read_runtime
from rlhfless.spec import LengthPenaltySpec, RunSpec
from rlhfless.spec.errors import InputError, Problem

Json = dict[str, Any]

MOST_BARS = 20_000
"""Maximum number of bars per device in one answer. A step of a hundred actors has a few hundred."""


def static(question: Json) -> Json:
    """Return the best static fleet for a run's trace, as objects.StaticFleet."""
    folder = question["trace"]
    return best_static(read_trace(folder, tokens=False), read_runtime(folder))


def timeline(question: Json) -> Json:
    """Return `rows` of objects.TimelineObject: the devices of a trace's last steps, with their holdings and work.
    `question`: trace (its folder), steps."""
    trace = read_trace(question["trace"], tokens=False)
    records = trace.steps[-question["steps"] :]
    if not records:
        return {"rows": []}
    since_s, until_s = records[0].start_s, records[-1].end_s
    rows: dict[str, list[Json]] = defaultdict(list)
    devices: dict[str, set[str]] = defaultdict(set)

    def add(device: str, start_s: float, end_s: float, function: str, state: str, **call: Any) -> None:
        bar = {"function": str(function), "work": None, "step": None, "state": str(state)} | call
        if end_s > since_s and start_s < until_s:
            rows[device].append(bar | {"start_s": max(start_s, since_s), "end_s": min(end_s, until_s)})

    for holding in trace.holdings:
        devices[holding.incarnation].add(holding.device)
        add(holding.device, holding.start_s, holding.end_s, holding.function, holding.state)
    for call in trace.invocations:
        for device in devices[call.incarnation]:
            add(device, call.start_s, call.end_s, call.function, "serving", work=str(call.work), step=call.step)
    return {"rows": [{"device": device, "bars": _newest(bars)} for device, bars in sorted(rows.items())]}


def _newest(bars: list[Json]) -> list[Json]:
    return sorted(bars, key=lambda bar: (bar["start_s"], bar["end_s"]))[-MOST_BARS:]


def rewards(question: Json) -> Json:
    """Return the scores of given samples: the value of each part, the weighted sum, and the failures. Raises
    InputError."""
    values = {"model": {"path": "none"}, "prompts": {"path": "none"}, "rewards": question["rewards"]}
    spec = RunSpec.model_validate(values | {"scoring": {"http_hosts": question["http_hosts"]}})
    samples = [_with_tokens(index, sample, spec) for index, sample in enumerate(question["samples"])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        file.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples), "utf-8")
        trial = try_rewards(spec, file)
    data = [
        {
            "parts": dict(score.parts),
            "reward": None if score.failures else score.total,
            "failures": dict(score.failures),
        }
        for score in trial.scores
    ]
    return {"data": data, "wall_s": trial.wall_s}


def _with_tokens(index: int, sample: Json, spec: RunSpec) -> Json:
    """Return the sample with a number of tokens, because no tokenizer is available. Raises InputError if a reward needs
    it."""
    if "response_tokens" not in sample and any(isinstance(part, LengthPenaltySpec) for part in spec.rewards):
        what, hint = "missing, and a length_penalty needs it", "give the number of tokens of the response"
        raise InputError("the samples", [Problem(f"samples.{index}.response_tokens", what, hint)])
    return {"response_tokens": 0} | sample


JOBS: dict[str, Callable[[Json], Json]] = {
    "plan": planned,
    "forecast": forecast,
    "compare": comparison,
    "static": static,
    "rewards": rewards,
    "check_simulation": check,
    "simulation": simulated,
    "timeline": timeline,
}
