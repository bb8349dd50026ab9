"""What functions that take turns on one CPU core hold there, beside the memory plan, and what their turns cost a step.

    python benchmarks/turns.py [--models 25M,100M] [--steps 6] [--smoke]

A live run (`placement.turns`) with an engine, a learner, a reference and a reward model on one core. Meanwhile
RssAnon of /proc is read of each of their processes, every 20 ms.

asleep       what the processes hold when each of them holds the least: libraries, and what allocators keep. The plan
             counts none of it on CPUs
on the core  the most that they held together beyond that, beside the plan's figure (`rlhfless plan`); `side by side`:
             the plan's figure without turns
step         its time over that in which a function did its work (loads and publications included); the rest is
             sleep, wake, and the driver. The first step, before which functions start, is left out
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from ranks import status_of
from setting import live_run, random_head, spec_of, spread
from smoke import parsed
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from where import machine

from rlhfless.bundled.model import SMALLEST, ModelSize, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems, write_jsonl
from rlhfless.loop.run import Run
from rlhfless.loop.step import rollout, train
from rlhfless.planning.inputs import question_of
from rlhfless.records import FunctionName, Invocation, StepRecord, Work
from rlhfless.records.traces import read_trace
from rlhfless.scaling.intervals import clip, length, union
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec

SIZES = {
    "tiny": SMALLEST,
    "25M": ModelSize(hidden=384, layers=12, heads=6, key_value_heads=3, head_dim=64, mlp=1536),
    "100M": ModelSize(hidden=640, layers=15, heads=10, key_value_heads=5, head_dim=64, mlp=2560),
}
KV_GIB = 0.25
EVERY_S = 0.02
MIB = 2**20
TURNS = (Work.SLEEP, Work.WAKE)


def made(folder: Path, size: ModelSize) -> RunSpec:
    """A run on models of a size, all of them random."""
    model = folder / "model"
    build_random(model, seed=0, size=size)
    random_head(model)
    problems = draw_problems(TaskRecipe(), np.random.default_rng(0), 64, held_out=False)
    write_jsonl(folder / "train.jsonl", problems)
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=tokenizer.eos_token_id)
    judge: Any = AutoModelForSequenceClassification
    judge.from_config(config, dtype=torch.float32).save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    return spec_of(
        folder,
        prompts_per_step=8,
        samples_per_prompt=4,
        mini_batches=1,
        rewards=[{"type": "reward_model", "path": str(folder / "judge"), "dtype": "float32"}],
        algorithm={"kl": {"coefficient": 0.01}},
        generation={"max_tokens": 64, "engine": {"kv_cache_gib": KV_GIB}},
        learner={"micro_batch_tokens": 1024},
        scaling={
            "generation": {"min_actors": 1, "max_actors": 1},
            "hold_scoring": "always",
            "hold_reference": "always",
        },
        placement={"turns": True, "devices": 1},
    )


def processes(run: Run) -> list[tuple[str, psutil.Process]]:
    """Those in which functions hold memory of the core: engines and ranks, with their functions."""
    found = []
    for name, pool in run.pools.items():
        for info in (replica.info for replica in pool.replicas() if replica.info):
            found += [(name, process) for process in map(psutil.Process, info.pids)]
    return found


@contextmanager
def watched(run: Run) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Within the block the processes' RssAnon is read; yields their functions, and a row of bytes for each reading."""
    names, ids = zip(*((name, process.pid) for name, process in processes(run)), strict=True)
    ended, rows = threading.Event(), []

    def read() -> None:
        while not ended.wait(EVERY_S):
            rows.append([status_of(pid)["RssAnon"] for pid in ids])

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        yield list(names), rows
    finally:
        ended.set()
        reading.join()


def shares(record: StepRecord, calls: list[Invocation]) -> tuple[float, float, float]:
    """Seconds of a step, of those in which a function worked, and of its changes of turn."""

    def within(of: list[Invocation]) -> float:
        spans = union((call.start_s, call.end_s) for call in of)
        return length(clip(spans, record.start_s, record.end_s))

    turns = within([call for call in calls if call.work in TURNS])
    return record.end_s - record.start_s, within([call for call in calls if call.work not in TURNS]), turns


async def measure(name: str, folder: Path, steps: int) -> None:
    spec = made(folder, SIZES[name])
    plan, beside = (
        question_of(spec.model_copy(update={"placement": placement}), CPU_KIND, 1).plan()
        for placement in (spec.placement, spec.placement.model_copy(update={"turns": False}))
    )
    records = []
    async with live_run(spec, folder) as run:
        for step in range(1, steps + 2):
            context = run.begin(step)
            if step == 1:
                await train(run, context, await rollout(run, context))
                continue
            with watched(run) as (functions, rows):
                records.append(await train(run, context, await rollout(run, context)))
            report_memory(
                name, step, functions, np.array(rows), plan.devices[0].size_bytes, beside.devices[0].size_bytes
            )
        run.ledger.write(run.pools.values())
    calls = read_trace(folder / "run" / "trace").invocations
    times = [shares(record, [call for call in calls if call.function != FunctionName.SCORING]) for record in records]
    for what, values in zip(("step", "functions at work", "sleep and wake"), zip(*times, strict=True), strict=True):
        print(f"  {what:18} {spread(values)} s")
    ratios = [step_s / work_s for step_s, work_s, _ in times]
    print(
        f"  step / functions at work {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})",
        flush=True,
    )


def report_memory(name: str, step: int, functions: list[str], rows: Any, planned: int, beside: int) -> None:
    least = rows.min(axis=0)
    most = (rows - least).sum(axis=1).max()
    each = ", ".join(
        f"{function} {size / MIB:.0f}" for function, size in zip(functions, (rows - least).max(axis=0), strict=True)
    )
    print(
        f"{name}, step {step}: on the core {most / MIB:.0f} MiB, plan {planned / MIB:.0f}, ratio {most / planned:.2f}; "
        f"side by side {beside / MIB:.0f}; asleep {least.sum() / MIB:.0f}; each at most: {each}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="25M,100M")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parsed(parser, models="tiny", steps=2)
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory(prefix="rlhfless-turns-") as folder:
            asyncio.run(measure(name, Path(folder), arguments.steps))


if __name__ == "__main__":
    main()
