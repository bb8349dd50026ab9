"""The jobs by name. Each takes and returns JSON values. Only `preload` imports this module, because its imports take
seconds."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhfless.prediction.compare import comparison
from rlhfless.prediction.run_plan import forecast, planned
from rlhfless.prepare.reward_trial import try_rewards
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.sim.experiment.compare import compare, quoted_part
from rlhfless.sim.policies import PolicyError, make_policy, policy_kind
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.measured import WALL
from rlhfless.sim.replay.replay import AS_RECORDED, Replay, replay
from rlhfless.sim.replay.what_if import run_policy
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.workloads.recorded import read_runtime
from rlhfless.spec import LengthPenaltySpec, RunSpec, WeightedSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import explain
from rlhfless.spec.fleet import StaticSpec

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
    for bars in rows.values():
        bars.sort(key=lambda bar: (bar["start_s"], bar["end_s"]))
    return {"rows": [{"device": device, "bars": bars[-MOST_BARS:]} for device, bars in sorted(rows.items())]}


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


# -- simulations


MOST_RESPONSES = 200_000_000
"""Maximum number of responses of a scenario, including its seeds and policies. The simulator handles about a hundred
thousand per second, and has half an hour."""

SLOWER = 1.01
"""A fleet within this factor counts as equally fast; this is the precision of the simulation."""

STATIC_STEPS = 100
"""Maximum number of steps of a simulated static fleet; the newest steps are used."""


def check(question: Mapping[str, Any]) -> dict[str, Any]:
    """Check that a simulation can start, and return an empty answer. Raises InputError for a wrong scenario or
    policy."""
    if question["run"] is None:
        scenario_of(question)
        return {}
    for index, name in enumerate(question["policies"]):
        try:
            policy_kind(name)
        except PolicyError as error:
            raise InputError("the simulation", [Problem(f"policies.{index}", error.what, error.hint)]) from error
    return {}


def scenario_of(question: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a question. Raises InputError for a wrong or too large scenario."""
    values = question["scenario"]
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        raise InputError("the scenario", explain(error, Scenario, {}, values)) from error
    policies = [entry.shown for entry in scenario.policies]
    if unknown := [label for label in question["policies"] if label not in policies]:
        raise InputError(
            "policies", [Problem("policies", f"{unknown[0]!r} is none of the labels {', '.join(policies)}")]
        )
    responses = scenario.steps * scenario.prompts_per_step * scenario.samples_per_prompt
    responses *= scenario.seeds * len(question["policies"] or policies)
    if responses > MOST_RESPONSES:
        what = f"{responses:,} responses in all, more than {MOST_RESPONSES:,}"
        raise InputError("the scenario", [Problem("steps", what, "ask for fewer steps, seeds or policies")])
    return scenario


def simulated(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows by policy. Raises InputError, TraceError or PolicyError."""
    if question.get("trace"):
        return _replayed(question["trace"], question["policies"])
    scenario = scenario_of(question)
    comparison = compare(scenario, question["policies"] or None)
    part = quoted_part(scenario)
    return {"part": part, "rows": [_plain(asdict(row)) for row in comparison.rows(part)]}


def _replayed(folder: str, policies: list[str]) -> dict[str, Any]:
    trace, drawn = read_trace(folder, tokens=False), read_runtime(folder)
    rows = []
    for name in [AS_RECORDED, *policies]:
        again = replay(trace, drawn, None, None if name == AS_RECORDED else run_policy(trace, name))
        keys = ("predicted_s", "measured_s", "error", "error_of_mean", "skill")
        stages = {error.stage: {key: getattr(error, key) for key in keys} for error in again.errors}
        rows.append({"label": name, "steps": len(again.steps), "predicted_usd": again.predicted_usd,
                     "measured_usd": again.measured_usd, "stages": stages})  # fmt: skip
    return {"part": "replay", "rows": rows}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinity become null, other types become strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if isinstance(value, str | int | bool) or value is None else str(value)


def best_static(trace: Trace, drawn: Sequence[RolloutBatch]) -> dict[str, Any]:
    """Return the best fleet of constant size for the steps of a run, as objects.StaticFleet.

    Each number of actors that the run could have had is simulated on the run's own trace, with latencies fitted to it.
    The best is the cheapest that is no slower than the run itself in the same simulation; if all are slower, the
    fastest. Raises TraceError for a trace without complete steps.
    """
    batches = drawn[-STATIC_STEPS:]
    latency = calibrate([trace])
    own = replay(trace, batches, latency)
    most = (trace.meta.spec.get("scaling") or {}).get("generation", {}).get("max_actors", 1)
    run = RunContract(WeightedSpec(), max(len(trace.steps), 1))
    tried = []
    for actors in range(1, int(most) + 1):
        policy = make_policy("static", StaticSpec(actors=actors), run)
        tried.append((actors, replay(trace, batches, latency, ("static", policy))))
    limit_s = SLOWER * _wall_s(own)
    in_time = [pair for pair in tried if _wall_s(pair[1]) <= limit_s]
    if in_time:
        actors, chosen = min(in_time, key=lambda pair: (pair[1].predicted_usd, pair[0]))
    else:
        actors, chosen = min(tried, key=lambda pair: (_wall_s(pair[1]), pair[0]))
    return {
        "actors": actors,
        "cost_usd": chosen.predicted_usd,
        "wall_s": _wall_s(chosen),
        "same_cost_usd": own.predicted_usd,
        "steps": len(chosen.steps),
    }


def _wall_s(again: Replay) -> float:
    return sum(step.predicted_s[WALL] for step in again.steps)


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
