"""Whole steps on long prompts, with prefixes shared in reference and learner and without, in pairs; and TRL's.

    python benchmarks/prefix_steps.py [--prefix 1000] [--pairs 3] [--steps 4] [--trl-steps 1] [--demo MODEL_FOLDER]

16 prompts x 8 samples behind one prefix, two actors, GRPO with a reference; a random model of 0.8 M parameters. Each
pair is two runs of `rlhfless run`, one after the other: `learner.share_prefixes` off, then on. Of all steps but the
first: medians of the time of generation, reference, learner and step, and off / on of each pair. Of the runs with it,
for each actor: prompt tokens that it computed (precomputations included) by the floor that KV blocks allow, and for the
fleet by the tokens when each prefix is counted once; and the same for an engine that joins in mid-step, which gets the
prefix and then samples with some tokens drawn elsewhere.

`--demo` runs the demo in pairs, too (MODEL_FOLDER is what `rlhfless models tiny` wrote), each with a seed of its own:
short prompts, which sharing must not make slower. Held-out exact match before and after of both runs, and how many
samples have the same tokens. TRL's GRPOTrainer does the same step on the same prompts and model.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo_run import run_demo
from setting import median_ratio, random_head
from smoke import parsed
from step import trl_step_s
from transformers import AutoTokenizer
from where import machine

from rlhfless.bundled.model import ModelSize, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.functions.generation.engine import EngineSettings, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS, to_precompute
from rlhfless.prefixes.trie import shared_prefixes
from rlhfless.records import FunctionName, Work
from rlhfless.records.traces import Trace, compare_samples, read_trace
from rlhfless.spec import RunSpec
from rlhfless.weights.address import StoreAddress

PROMPTS, SAMPLES = 16, 8
TIMES = ("generation_s", "reference_s", "learn_s", "step_s")
DRAWN_TOKENS = 24
"""Tokens that the samples of an actor that joins have already."""

Tokens = tuple[int, ...]


def long_prompts(folder: Path, prefix_tokens: int, prompts: int) -> dict[str, Tokens]:
    """Writes model/ and train.jsonl, prompts behind one prefix of problems; returns the tokens of the prompts."""
    build_random(folder / "model", seed=0, size=ModelSize(max_positions=prefix_tokens + 512))
    random_head(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    problems = draw_problems(TaskRecipe(), np.random.default_rng(0), 2048, held_out=False)
    prefix, found = "", {}
    for example in problems[::-1]:
        if len(tokenizer(prefix)["input_ids"]) >= prefix_tokens:
            break
        prefix += example.prompt
    with (folder / "train.jsonl").open("w") as file:
        for number, problem in enumerate(problems[:prompts]):
            row = {"id": f"{number:04}", "prompt": prefix + problem.prompt}
            found[row["id"]] = tuple(tokenizer(row["prompt"])["input_ids"])
            file.write(json.dumps(row) + "\n")
    return found


def run_spec(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "name": "prefixes",
        "model": {"path": str(folder / "model")},
        "prompts": {"path": str(folder / "train.jsonl"), "id_field": "id", "shuffle": False},
        "rewards": [{"type": "regex", "pattern": "7"}],
        "algorithm": {"type": "grpo", "kl": {"coefficient": 0.01}},
        "generation": {"max_tokens": 64, "engine": {"kv_cache_gib": 0.5}},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "scaling": {"generation": {"min_actors": 2, "max_actors": 2}},
        "logging": {"console": "off"},
    }


def long_run(folder: Path, steps: int, *, share: bool) -> Trace:
    """One run of `rlhfless run`."""
    output = Path(tempfile.mkdtemp(dir=folder))
    spec = {**run_spec(folder, steps), "output": str(output), "learner": {"share_prefixes": share}}
    path = output.with_suffix(".json")
    path.write_text(json.dumps(spec))
    subprocess.run([str(Path(sys.executable).with_name("rlhfless")), "run", str(path)], check=True)
    return read_trace(next(output.iterdir()) / "trace", tokens=False)


class Demos:
    """Runs of the demo in pairs, and what both had in common."""

    def __init__(self, model: Path, output: Path, *, smoke: bool) -> None:
        self._model, self._output, self._smoke = model, output, smoke
        self._before: tuple[Trace, tuple[float, ...]] | None = None

    def run(self, number: int, share: bool) -> Trace:
        """One run with this seed; its samples and results are compared with those of the run before it."""
        settings = [f"learner.share_prefixes={str(share).lower()}", f"seed={number}", "logging.record_tokens=true"]
        folder = run_demo(self._model, Path(tempfile.mkdtemp(dir=self._output)), settings, self._smoke)
        trace, result = read_trace(folder / "trace"), held_out(folder)
        if share and self._before is not None:
            other, theirs = self._before
            same = compare_samples(other, trace)
            off, on = (" -> ".join(f"{value:.3f}" for value in values) for values in (theirs, result))
            print(
                f"demo, seed {number}: held-out exact match off {off}, on {on}; {same.identical:,} of "
                f"{same.compared:,} samples have the same tokens (first difference: {same.first_difference})",
                flush=True,
            )
        self._before = (trace, result)
        return trace


def held_out(folder: Path) -> tuple[float, ...]:
    """Exact match before and after a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    found = [row["eval/exact_match"] for row in rows if "eval/exact_match" in row]
    return found[0], found[-1]


def pairs(runs: Callable[[int, bool], Trace], count: int) -> tuple[dict[bool, dict[str, list[float]]], list[Trace]]:
    """By whether prefixes are shared: medians of each run. And the traces of the runs that share them."""
    medians: dict[bool, dict[str, list[float]]] = {share: defaultdict(list) for share in (False, True)}
    traces = []
    for number in range(count):
        for share in (False, True):
            trace = runs(number, share)
            steps = trace.steps[1:] or trace.steps
            for name in TIMES:
                medians[share][name].append(statistics.median(step.metrics[name] for step in steps))
            if share:
                traces.append(trace)
    return medians, traces


def show(title: str, medians: Mapping[bool, Mapping[str, Sequence[float]]]) -> None:
    for name in TIMES:
        off, on = medians[False][name], medians[True][name]
        ratio = median_ratio(off, on) if all(on) else math.nan
        print(
            f"{title:5} {name:13} off {statistics.median(off):8.3f} s  on {statistics.median(on):8.3f} s  {ratio:6.2f}x"
        )


def computed_by_actor(trace: Trace, prompts: Mapping[str, Tokens]) -> tuple[list[float], float]:
    """Prompt tokens computed by the floor: of each actor in each step, and of the fleet over all of them."""
    ratios, computed_in_all, unique_in_all = [], 0, 0
    for record in trace.steps:
        rows = [row for row in trace.rollouts if row.step == record.step]
        for actor in sorted({row.actor for row in rows}):
            calls = [
                call
                for call in trace.invocations
                if (call.step, call.replica) == (record.step, actor) and call.work in (Work.GENERATE, Work.PRECOMPUTE)
            ]
            mine = [prompts[row.prompt_id] for row in rows if row.actor == actor]
            computed = sum(call.input_tokens - call.cached_tokens for call in calls)
            ratios.append(computed / shared_prefixes(mine, block_tokens=CPU_BLOCK_TOKENS).unique_tokens)
            computed_in_all += computed
        unique_in_all += int(record.metrics[f"prompt_tokens_unique/{FunctionName.GENERATION}"])
    return ratios, computed_in_all / unique_in_all


async def joining(folder: Path, prompts: Sequence[Tokens]) -> float:
    """Tokens that an engine computes, by the floor, which joins in mid-step and takes samples of these prompts over."""
    spec = RunSpec.model_validate(run_spec(folder, 1))
    settings = EngineSettings.of(spec, "cpu", StoreAddress("file", str(folder)), len(prompts[0]) + 256)
    engine = await VllmEngine.start(settings)
    try:
        random = np.random.default_rng(0)
        tails = [
            (*prompt, *random.integers(3, 20, DRAWN_TOKENS).tolist()) for prompt in prompts for _ in range(SAMPLES)
        ]
        computed = 0
        for number, prefix in enumerate(to_precompute(prompts)):
            done = await engine.sample(SampleRequest(f"prefix {number}", prefix, None, 1, 0.0, cache_salt="v"))
            computed += len(prefix) - done.cached_tokens
        asked = [
            SampleRequest(str(number), tail, number, 16, 1.0, cache_salt="v", drawn_tokens=DRAWN_TOKENS)
            for number, tail in enumerate(tails)
        ]
        drawn = await asyncio.gather(*map(engine.sample, asked))
        computed += sum(len(tail) - one.cached_tokens for tail, one in zip(tails, drawn, strict=True))
    finally:
        await engine.stop()
    floor = shared_prefixes(tails, block_tokens=CPU_BLOCK_TOKENS).unique_tokens
    return computed / floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that all prompts have in common")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trl-steps", type=int, default=1)
    parser.add_argument("--demo", type=lambda text: Path(text).absolute(), help="model folder of the demo")
    arguments = parsed(parser, prefix=300, pairs=1, steps=1, trl_steps=0)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="rlhfless-bench-") as name:
        folder = Path(name)
        prompts = long_prompts(folder, arguments.prefix, PROMPTS * max(arguments.steps, 1))
        medians, traces = pairs(lambda _, share: long_run(folder, arguments.steps, share=share), arguments.pairs)
        show("long", medians)
        for trace in traces:
            ratios, in_all = computed_by_actor(trace, prompts)
            print(f"computed / floor of an actor: at most {max(ratios):.3f}; of the fleet / counted once {in_all:.3f}")
        joined = asyncio.run(joining(folder, list(prompts.values())[: PROMPTS // 2]))
        print(f"computed / floor of an actor that joins in mid-step {joined:.3f}")
        if arguments.trl_steps and importlib.util.find_spec("trl") is None:
            print("TRL step  skipped: trl is not installed (extra `test`)")
        elif arguments.trl_steps:
            theirs = statistics.median(trl_step_s(folder, arguments.trl_steps))
            print(f"TRL step {theirs:.2f} s; TRL / our step {theirs / statistics.median(medians[True]['step_s']):.1f}x")
        if arguments.demo is not None:
            output = folder / "demo"
            output.mkdir()
            show("demo", pairs(Demos(arguments.demo, output, smoke=arguments.smoke).run, arguments.pairs)[0])


if __name__ == "__main__":
    main()
