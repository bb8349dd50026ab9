"""LoRA runs that share an engine, beside the same runs one after the other.

    python benchmarks/runs_in_a_fleet.py MODEL_FOLDER [--runs 4] [--steps 6] [--pairs 3] [--set KEY=JSON ...] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. Each run trains adapters of a model of 4 M parameters, with its own
seed. All are started through the service: together in one fleet (`placement.share: adapters`), where one engine
generates for all and the learners take turns, or one after the other. A pair's order changes from one to the next.

tokens/s    response tokens of all runs over the time in which at least one of them generated, together over one after
            the other
simulated   the same in the simulator (rlhfless.sim.experiment.fleets), from the lengths and learners of the runs one
            after the other
throughput  steps per second, from the first begin of a step to the last end of one
join        seconds in which a run that is not the first gets its engine, from the ask to the first answer
bill        device-seconds of the engine: the runs' parts, idle, and starts; they add up to what was provisioned
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from api import COMMAND, up
from runs_together import COMMON, digest_of, ended, widened
from smoke import parsed
from where import machine

from rlhfless.records import ReplicaState, StepRecord, Work
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.accounting import length, union
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.sim.experiment.fleets import FleetEngine, FleetStep, share_engines
from rlhfless.sim.samples import RolloutBatch


@dataclass(frozen=True)
class Took:
    """The runs, together or one after the other."""

    tokens: int
    generating_s: float
    steps_s: float
    joins_s: tuple[float, ...]
    digests: tuple[str, ...]
    """Of the last weights, by run."""
    traces: tuple[Trace, ...]


def spec_of(model: Path, number: int, asked: argparse.Namespace) -> dict[str, object]:
    """One run."""
    samples = {"prompts_per_step": 2, "samples_per_prompt": 2} if asked.smoke else {
        "prompts_per_step": 4, "samples_per_prompt": 4}  # fmt: skip
    spec: dict[str, object] = {
        **COMMON,
        **samples,
        "mini_batches": 1,
        "name": f"run-{number}",
        "seed": number,
        "steps": asked.steps,
        "model": {"path": str(model / "model"), "lora": {"rank": 8, "alpha": 16}},
        "optimizer": {"learning_rate": 1e-3},
        "prompts": {"path": str(model / "train.jsonl"), "id_field": "id"},
        "placement": {"share": "adapters", "devices": 2, "learner_devices": 1, "tenants": max(asked.runs, 2)},
    }
    return spec | {key: json.loads(value) for key, _, value in (one.partition("=") for one in asked.set)}


def took(url: str, data: Path, specs: list[dict[str, object]], together: bool) -> Took:
    """Run all of them."""
    runs = []
    with httpx.Client(base_url=url, timeout=30) as client:
        for spec in specs:
            answer = client.post("/v1/runs", json=spec)
            if answer.is_error:
                raise RuntimeError(answer.text)
            runs.append(answer.json()["id"])
            if not together:
                ended(client, runs[-1])
        for run in runs:
            ended(client, run)
    traces = [read_trace(data / "runs" / run / "trace") for run in runs]
    spans = [(trace.steps[0].start_s, trace.steps[-1].end_s) for trace in traces]
    starts = [_start_s(trace) for trace in traces]
    return Took(
        sum(row.response_tokens for trace in traces for row in trace.rollouts if row.step > 0),
        length(union(span for trace in traces for span in generating(trace))),
        length(union(spans)),
        tuple(sorted(starts)[:-1]) if together else (),
        tuple(digest_of(data / "runs" / run) for run in runs),
        tuple(traces),
    )


def generating(trace: Trace, step: int | None = None) -> list[tuple[float, float]]:
    """Return when a run generated, in all steps or in one."""
    return union(
        (call.start_s, call.end_s) for call in trace.invocations
        if call.work is Work.GENERATE and call.step > 0 and step in (None, call.step)
    )  # fmt: skip


def _start_s(trace: Trace) -> float:
    """Seconds until the run's first engine answered."""
    return min(each.end_s - each.start_s for each in trace.holdings
               if each.function == "generation" and each.state is ReplicaState.STARTING)  # fmt: skip


def simulated_gain(traces: Sequence[Trace]) -> float:
    """Return the tokens/s together over one after the other in the simulator, from the runs' own lengths and learners.

    The engine's iteration of B sequences takes a + b B, fitted to the steps of the runs one after the other.
    """
    steps = [[_step(trace, record) for record in trace.steps] for trace in traces]
    rows = [(each.batch.response_tokens.max(), each.batch.response_tokens.sum()) for run in steps for each in run]
    took_s = [
        sum(end_s - start_s for start_s, end_s in generating(trace, record.step))
        for trace in traces
        for record in trace.steps
    ]
    (fixed_s, sequence_s), *_ = np.linalg.lstsq(np.array(rows, float), np.array(took_s), rcond=None)
    model = LinearEngine(max(float(fixed_s), 0.0), max(float(sequence_s), 0.0), 0.0, 0.0, 0.0)
    engine = FleetEngine(model, max_sequences=256, kv_tokens=10**9)
    alone_s = sum(share_engines([run], [engine]).engines_busy_s[0] for run in steps)
    return alone_s / share_engines(steps, [engine]).engines_busy_s[0]


def _step(trace: Trace, record: StepRecord) -> FleetStep:
    """Return a step of a run as it was."""
    rollouts = [row for row in trace.rollouts if row.step == record.step]
    names = sorted({row.prompt_id for row in rollouts})
    rollouts.sort(key=lambda row: names.index(row.prompt_id))
    batch = RolloutBatch(
        record.step,
        tuple(names),
        np.ones(len(names), np.int64),
        np.array([names.index(row.prompt_id) for row in rollouts]),
        np.array([row.response_tokens for row in rollouts]),
    )
    learn_s = sum(call.duration_s for call in trace.invocations
                  if call.step == record.step and call.function == "learner")  # fmt: skip
    generated_s = sum(end_s - start_s for start_s, end_s in generating(trace, record.step))
    return FleetStep(batch, learn_s, max(record.end_s - record.start_s - learn_s - generated_s, 0.0))


def print_bill(url: str) -> None:
    """Print the device-seconds of the fleet."""
    (fleet,) = httpx.get(f"{url}/v1/fleets").json()["data"]
    runs = sum(run["busy_device_s"] for run in fleet["runs"])
    whole, idle, cold = fleet["provisioned_device_s"], fleet["idle_device_s"], fleet["cold_device_s"]
    print(
        f"bill: {whole:.1f} device-seconds = runs {runs:.1f} + idle {idle:.1f} + starts {cold:.1f} "
        f"({runs + idle + cold - whole:+.3f})"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    asked = parsed(parser, runs=2, steps=2, pairs=1)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        try:
            model = widened(asked.model, Path(folder))
            url, _, _ = up(data, model, drivers=asked.runs)
            measured(url, data, asked, model)
        except (RuntimeError, httpx.HTTPError) as error:
            sys.exit(f"{error}; {[log.read_text()[-2000:] for log in Path(folder).rglob('run.log')][-2:]}")
        finally:
            subprocess.run([COMMAND, "down", "--data", str(data)], check=False, stderr=subprocess.DEVNULL)


def measured(url: str, data: Path, asked: argparse.Namespace, model: Path) -> None:
    """Print some pairs."""
    specs = [spec_of(model, number, asked) for number in range(asked.runs)]
    ratios: dict[str, list[float]] = {"tokens/s": [], "simulated": [], "throughput": []}
    joins: list[float] = []
    for number in range(asked.pairs):
        sides = {side: took(url, data, specs, side) for side in ((False, True) if number % 2 == 0 else (True, False))}
        alone, both = sides[False], sides[True]
        for name, its in (("one after the other", alone), ("together", both)):
            print(
                f"pair {number + 1}, {name}: {its.tokens} tokens in {its.generating_s:.1f} s of generation "
                f"({its.tokens / its.generating_s:.0f} tokens/s); steps {its.steps_s:.1f} s"
            )
        print(f"last weights {'equal' if alone.digests == both.digests else 'NOT EQUAL'}", flush=True)
        ratios["tokens/s"].append(both.tokens / both.generating_s / (alone.tokens / alone.generating_s))
        ratios["throughput"].append(alone.steps_s / both.steps_s)
        joins += both.joins_s
        ratios["simulated"].append(simulated_gain(alone.traces))
    for name, values in ratios.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        print(f"{asked.runs} runs, {name:<10} together / one after the other {statistics.median(values):.2f}x ({each})")
    print(f"join {statistics.median(joins):.2f} s at the median, {max(joins):.2f} s at most")
    print_bill(url)


if __name__ == "__main__":
    main()
