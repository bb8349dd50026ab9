"""Runs that share devices in turns, beside the same runs one after the other.

    python benchmarks/runs_together.py MODEL_FOLDER [--cases half,demo] [--runs 2,3] [--steps 12] [--pairs 3]
        [--set KEY=JSON ...] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. `half`: a model of 4 M parameters, so that a step is
half generation and half learning and the driver costs little; `demo`: the tiny model with many samples, where drivers
take as much of the two cores as they need. Each run has two devices, one for its generation actor and one for
its learner, and all are started at once through the service. In the other half of a pair the same runs follow each
other, each alone on both devices. A pair's order changes from one to the next.

throughput  steps per second together over one after the other, from the first begin of a step to the last end of one:
            what starts and ends the runs is left out of both
            (the ideal is 2: all phases of all runs on two devices, with nothing lost)
duty        share of the two devices' time in which a run generated or learned on them. Where phases that run at the
            same time slow each other down (memory, caches, drivers), throughput stays below the growth of the duty
command     from the first POST to the last end of a run, starts included
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from api import COMMAND, up
from smoke import parsed
from transformers import Qwen3Config, Qwen3ForCausalLM
from where import machine

from rlhfless.records import Work
from rlhfless.records.traces import Trace, read_trace

LIMIT_S = 1200.0
COMMON = {
    "optimizer": {"learning_rate": 1e-4},
    "generation": {"max_tokens": 200, "engine": {"kv_cache_gib": 0.25}},
    "learner": {"micro_batch_tokens": 2048},
    "scaling": {"generation": {"min_actors": 1, "max_actors": 1}, "hold_scoring": "always"},
    "rewards": [{"type": "exact_match"}],
}

CASES = {
    "half": {"prompts_per_step": 16, "samples_per_prompt": 4, "mini_batches": 1},
    "demo": {"prompts_per_step": 32, "samples_per_prompt": 8, "mini_batches": 2},
}
SMALLEST = {"prompts_per_step": 2, "samples_per_prompt": 2, "mini_batches": 1}


@dataclass(frozen=True)
class Took:
    """Some runs, together or one after the other."""

    steps_s: float
    command_s: float
    generating_s: float
    learning_s: float
    turning_s: float
    digests: tuple[str, ...]
    """Of the last weights, a run each."""


def widened(model: Path, folder: Path) -> Path:
    """A model of 4 M parameters with the tokenizer and prompts of the tiny one, drawn at random."""
    wide = folder / "wide"
    shutil.copytree(model, wide)
    config = Qwen3Config.from_pretrained(model / "model")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 1024, 4
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.layer_types = ["full_attention"] * 4
    made: Any = Qwen3ForCausalLM
    made(config).save_pretrained(wide / "model")
    return wide


def spec_of(model: Path, case: str, tenants: int, asked: argparse.Namespace) -> dict[str, object]:
    """One run."""
    spec: dict[str, object] = {
        **COMMON,
        **CASES[case],
        **(SMALLEST if asked.smoke else {}),
        "name": f"{case}-of-{tenants}",
        "steps": asked.steps,
        "model": {"path": str(model / "model")},
        "prompts": {"path": str(model / "train.jsonl"), "id_field": "id"},
        "placement": {"mode": "disaggregated", "devices": 2, "learner_devices": 1, "tenants": tenants},
    }
    return spec | {key: json.loads(value) for key, _, value in (one.partition("=") for one in asked.set)}


def ended(client: httpx.Client, run: str) -> None:
    """Returns when a run has ended. Raises RuntimeError if that was badly."""
    limit_s = time.monotonic() + LIMIT_S
    while time.monotonic() < limit_s:
        answer = client.get(f"/v1/runs/{run}").json()
        if answer["status"] in ("succeeded", "failed", "cancelled"):
            break
        time.sleep(0.2)
    if answer["status"] != "succeeded":
        raise RuntimeError(f"{run} is {answer['status']}: {answer['status_reason']}; {answer.get('error')}")


def took(url: str, data: Path, specs: list[dict[str, object]], together: bool) -> Took:
    """Run all of them."""
    began_s, runs = time.monotonic(), []
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
    command_s = time.monotonic() - began_s
    traces = [read_trace(data / "runs" / run / "trace", tokens=False) for run in runs]
    if together:
        spans = [(min(t.steps[0].start_s for t in traces), max(t.steps[-1].end_s for t in traces))]
    else:
        spans = [(trace.steps[0].start_s, trace.steps[-1].end_s) for trace in traces]
    return Took(
        sum(end_s - start_s for start_s, end_s in spans),
        command_s,
        sum(phase_s(trace, Work.GENERATE, Work.LOAD_WEIGHTS) for trace in traces),
        sum(phase_s(trace, Work.LEARN, Work.PUBLISH, Work.EVALUATE) for trace in traces),
        sum(phase_s(trace, Work.SLEEP, Work.WAKE) for trace in traces),
        tuple(digest_of(data / "runs" / run) for run in runs),
    )


def phase_s(trace: Trace, *works: Work) -> float:
    """Seconds of a run in which a call of these was under way, over all steps."""
    spans = sorted((call.start_s, call.end_s) for call in trace.invocations if call.work in works and call.step > 0)
    total_s, until_s = 0.0, 0.0
    for start_s, end_s in spans:
        total_s += max(end_s - max(start_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return total_s


def digest_of(folder: Path) -> str:
    """The digest of a run's last weights."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return str(json.loads((newest / "run.json").read_text())["digest"])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--cases", default="half,demo")
    parser.add_argument("--runs", default="2,3")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    asked = parsed(parser, cases="demo", runs="2", steps=2, pairs=1)
    print(machine())
    counts = [int(count) for count in asked.runs.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        try:
            cases = asked.cases.split(",")
            models = {case: widened(asked.model, Path(folder)) if case == "half" else asked.model for case in cases}
            url, _, _ = up(data, *models.values(), drivers=max(counts))
            for case, count in itertools.product(cases, counts):
                measured(url, data, asked, case, models[case], count)
        except (RuntimeError, httpx.HTTPError) as error:
            sys.exit(f"{error}; {[log.read_text()[-2000:] for log in Path(folder).rglob('run.log')][-2:]}")
        finally:
            subprocess.run([COMMAND, "down", "--data", str(data)], check=False, stderr=subprocess.DEVNULL)


def measured(url: str, data: Path, asked: argparse.Namespace, case: str, model: Path, count: int) -> None:
    """Some pairs of so many runs."""
    steps, commands = [], []
    for number in range(asked.pairs):
        sides: dict[bool, Took] = {}
        for together in (False, True) if number % 2 == 0 else (True, False):
            specs = [spec_of(model, case, count if together else 1, asked)] * count
            sides[together] = took(url, data, specs, together)
        alone, both = sides[False], sides[True]
        steps.append(alone.steps_s / both.steps_s)
        commands.append(alone.command_s / both.command_s)
        same = len({*alone.digests, *both.digests}) == 1
        for side, its in (("one after the other", alone), ("together", both)):
            print(
                f"{case}, {count} runs, pair {number + 1}, {side}: steps {its.steps_s:.1f} s, command "
                f"{its.command_s:.0f} s; phases of all runs: generation {its.generating_s:.1f}, learning "
                f"{its.learning_s:.1f}, sleep and wake {its.turning_s:.1f} s; duty "
                f"{(its.generating_s + its.learning_s) / 2 / its.steps_s:.0%}"
            )
        print(
            f"last weights {'equal' if same else 'NOT EQUAL'}",
            flush=True,
        )
    for name, ratios in (("throughput", steps), ("command", commands)):
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{case}, {count} runs, {name:<10} together / one after the other {statistics.median(ratios):.2f}x ({each})"
        )


if __name__ == "__main__":
    main()
