"""Random kills in one run, with real vLLM, against the same run in which nothing dies.

    python benchmarks/chaos.py MODEL_FOLDER [--kills 30] [--seed 0] [--victims driver ...] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote; the run is examples/demo.yaml. Kills are SIGKILLs of a generation
actor, a vLLM engine, scoring, the learner's front or its rank, or the whole driver (which is then resumed), at random
moments, about equally many of each, spread over the run. Both runs end with the exact match on held-out prompts, which
must be the same, as must every sampled token; the overhead is the difference in wall time. With `--kills 1 --victims
driver` it is the price of a resume, beside the time of a start and of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from demo_run import demo_command
from smoke import parsed
from where import machine

from rlhfless.records.traces import Trace, compare_samples, read_trace
from rlhfless.scaling.accounting import check_holdings

VICTIMS = ("generation", "engine", "scoring", "learner", "rank", "driver")

# What the command line of a victim holds.
MARKS = {
    "generation": "-generation-",
    "engine": "vllm.loop",
    "scoring": "-scoring-",
    "learner": "-learner-",
    "rank": "ray::RankActor",
}


@dataclass
class Ended:
    """A run that has ended."""

    wall_s: float
    start_s: float
    """From the command to the first step's begin: Ray, engines, learner, the evaluation before training."""
    evaluation: dict[str, float]
    trace: Trace
    kills: list[str]


def command(model: Path, output: Path, seed: int, steps: int, smoke: bool) -> list[str]:
    settings = {
        "seed": seed,
        "logging.record_tokens": "true",
        "checkpoint.every_steps": 5,
        "steps": steps,
        "recovery": '{"lease_s": 20, "heartbeat_s": 10, "per_step": 10}',
        "timeouts.drain_s": 5,
    }
    return demo_command(model, output, [f"{key}={value}" for key, value in settings.items()], smoke)


def steps_done(output: Path) -> int:
    """Training steps that the run's metrics have."""
    return sum('"step_s"' in line for file in output.glob("*/metrics.jsonl") for line in file.open())


def strike(process: subprocess.Popen[bytes], victim: str, chance: random.Random) -> bool:
    """Kill one process of the run; False if there is none of the kind at the moment."""
    if victim == "driver":
        process.kill()
        return True
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if MARKS[victim] in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    if not found:
        return False
    chance.choice(found).send_signal(signal.SIGKILL)
    return True


def run(arguments: argparse.Namespace, output: Path, victims: Sequence[str], step_s: float) -> Ended:
    """One run; each victim falls at a random moment of a random step, not before the first. A step takes `step_s`."""
    chance = random.Random(arguments.seed)
    plan = sorted((chance.randrange(1, arguments.steps - 1), victim) for victim in victims)
    begin = command(arguments.model, output, arguments.seed, arguments.steps, arguments.smoke)
    began, began_at_s = time.monotonic(), time.time()
    done: list[str] = []
    process = subprocess.Popen(begin)
    while process.poll() != 0:
        if process.returncode is not None:
            assert done[-1:] == ["driver"], f"the run ended with {process.returncode}, and no kill was sent to it"
            folder = next(output.iterdir())
            process = subprocess.Popen([*begin[:1], "run", "--resume", str(folder)])
        if plan and steps_done(output) >= plan[0][0]:
            time.sleep(chance.uniform(0, step_s))
            if process.poll() is None and strike(process, plan[0][1], chance):
                done.append(plan.pop(0)[1])
                print(f"{time.monotonic() - began:6.0f} s  step {steps_done(output):3}  killed {done[-1]}", flush=True)
                if done[-1] == "driver":
                    process.wait()
        time.sleep(0.2)
    folder = next(output.iterdir())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval/exact_match" in row]
    trace = read_trace(folder / "trace")
    return Ended(time.monotonic() - began, trace.steps[0].start_s - began_at_s, evaluations[-1], trace, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=70, help="steps of the demo")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    arguments = parsed(parser, kills=1, steps=20, victims=["scoring"])
    victims = [arguments.victims[i % len(arguments.victims)] for i in range(arguments.kills)]
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        quiet = run(arguments, Path(name) / "quiet", (), step_s=0)
        step_s = statistics.median(step.end_s - step.start_s for step in quiet.trace.steps)
        print(f"without kills: {quiet.wall_s:.0f} s, of which the start {quiet.start_s:.0f} s; a step {step_s:.2f} s")
        chaos = run(arguments, Path(name) / "chaos", victims, step_s)
    check_holdings(chaos.trace.holdings)
    same = compare_samples(quiet.trace, chaos.trace)
    for metric in ("eval/exact_match", "eval/exact_match_greedy"):
        print(f"{metric:26} without kills {quiet.evaluation[metric]:.3f}   with kills {chaos.evaluation[metric]:.3f}")
    print(f"token-identical samples    {same.identical:,} of {same.compared:,} ({same.fraction:.4f})")
    print(f"kills                      {len(chaos.kills)}")
    overhead_s = chaos.wall_s - quiet.wall_s
    print(
        f"wall time                  {quiet.wall_s:.0f} s -> {chaos.wall_s:.0f} s: {chaos.wall_s / quiet.wall_s:.2f}x, "
    )
    print(f"overhead                   {overhead_s / max(1, len(chaos.kills)):.1f} s a kill")


if __name__ == "__main__":
    main()
