"""Four runs that arrive together and differ in length: sizes that follow them, relative to four static parts.

    python benchmarks/runs_elastic.py MODEL_FOLDER [--steps 10,20,40,80] [--prompts 64] [--share 0.5] [--pairs 1]
        [--sides parts,elastic] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. The runs are supervised, with a model of 4 M parameters, and are
posted at once to a service whose Ray has four devices. A device is a share of a core: each learner rank is limited to
`--share` of one from its first step on, by a control group (cgroup v1; needs root), as a GPU has a speed of its own.
Starts of ranks, drivers, service and Ray are not limited. `parts`: each run has one device from start to end
(`placement.devices: 1`). `elastic`: each has `{min: 1, max: 4}`. The order alternates from pair to pair.

turnaround  mean seconds from the POST to the end of a run, start and changes of size included
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
from api import COMMAND, up
from runs_together import widened
from smoke import parsed
from where import machine

from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.records.traces import read_trace

LIMIT_S = 1800.0
DEVICES = 4
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
SIDES: dict[str, object] = {"parts": 1, "elastic": {"min": 1, "max": DEVICES}}


@contextlib.contextmanager
def ray_with_devices(folder: str) -> Iterator[str]:
    """Start a Ray whose CPUs are the devices, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    options = ["--include-dashboard=false", f"--num-cpus={DEVICES}", f"--temp-dir={folder}"]
    try:
        subprocess.run([*command, *options], check=True, timeout=240, capture_output=True)
        yield address
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if folder in " ".join(process.info["cmdline"] or ()):
                process.kill()


@contextlib.contextmanager
def limited(share: float) -> Iterator[None]:
    """Limit each learner rank to a share of a core, from soon after its first step starts."""
    groups: dict[int, Path] = {}
    ended = threading.Event()

    def limit() -> None:
        while not ended.wait(0.5):
            for process in psutil.process_iter(["cmdline"]):
                title = " ".join(process.info["cmdline"] or ())
                if process.pid in groups or not title.startswith("ray::SupervisedActor.learn"):
                    continue
                groups[process.pid] = GROUPS / f"rlhfless-rank-{process.pid}"
                groups[process.pid].mkdir()
                (groups[process.pid] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (groups[process.pid] / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
                with contextlib.suppress(OSError):  # the rank has ended
                    (groups[process.pid] / "cgroup.procs").write_text(str(process.pid))

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for group in groups.values():
            for pid in (group / "cgroup.procs").read_text().split():
                (GROUPS / "cgroup.procs").write_text(pid)
            group.rmdir()


def spec_of(model: Path, name: str, steps: int, prompts: int, devices: object) -> dict[str, object]:
    return {
        "type": "sft",
        "name": name,
        "model": {"path": str(model / "model")},
        "demonstrations": {"path": str(model / "demonstrations.jsonl")},
        "steps": steps,
        "prompts_per_step": prompts,
        "optimizer": {"learning_rate": 1e-4},
        "learner": {"threads": 1, "micro_batch_tokens": 512},
        "placement": {"devices": devices},
    }


def turnarounds(url: str, data: Path, specs: list[dict[str, object]]) -> list[float]:
    """Run all at once; return each run's seconds to its end. Raises RuntimeError if a run does not succeed."""
    start_s = time.monotonic()
    ended_s: dict[str, float] = {}
    with httpx.Client(base_url=url, timeout=30) as client:
        runs = [client.post("/v1/runs", json=spec).raise_for_status().json()["id"] for spec in specs]
        while len(ended_s) < len(runs):
            for run in runs:
                answer = client.get(f"/v1/runs/{run}").json()
                if answer["status"] in ("failed", "cancelled") or time.monotonic() > start_s + LIMIT_S:
                    raise RuntimeError(f"{run} is {answer['status']}: {answer['status_reason']}; {answer.get('error')}")
                if answer["status"] == "succeeded":
                    ended_s.setdefault(run, time.monotonic() - start_s)
            time.sleep(0.2)
    for run, spec in zip(runs, specs, strict=True):
        trace = read_trace(data / "runs" / run / "trace", tokens=False)
        sizes = [(round(d.at_s), int(d.inputs["devices"])) for d in trace.decisions if d.kind == "size"]
        step_s = statistics.median(step.end_s - step.start_s for step in trace.steps)
        changes = ", ".join(f"{devices} from {at_s} s" for at_s, devices in sizes) or "1"
        print(
            f"  {spec['steps']} steps: {ended_s[run]:.0f} s; median step {step_s:.2f} s; devices {changes}", flush=True
        )
    return [ended_s[run] for run in runs]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--steps", default="10,20,40,80")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--sides", default="parts,elastic", help="only some sides: for a look at one")
    asked = parsed(parser, steps="2,4", prompts=4)
    print(machine())
    steps = [int(count) for count in asked.steps.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        model = widened(asked.model, Path(folder))
        problems = draw_problems(TaskRecipe(), np.random.default_rng(0), 512, held_out=False)
        rows = ({"prompt": problem.prompt, "response": problem.answer} for problem in problems)
        (model / "demonstrations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        with ray_with_devices(f"/tmp/rlhfless-elastic-{os.getpid()}") as address, limited(asked.share):
            try:
                url, _, _ = up(data, model, drivers=len(steps), options=("--ray-address", address))
                compared(url, data, model, asked, steps)
            except (RuntimeError, httpx.HTTPError) as error:
                sys.exit(f"{error}; {[log.read_text()[-2000:] for log in Path(folder).rglob('run.log')][-2:]}")
            finally:
                subprocess.run([COMMAND, "down", "--data", str(data)], check=False, stderr=subprocess.DEVNULL)


def compared(url: str, data: Path, model: Path, asked: argparse.Namespace, steps: list[int]) -> None:
    """Print some pairs."""
    ratios = []
    for number in range(asked.pairs):
        means: dict[str, float] = {}
        for side in asked.sides.split(",") if number % 2 == 0 else reversed(asked.sides.split(",")):
            print(f"pair {number + 1}, {side}:")
            specs = [spec_of(model, f"{side}-{count}", count, asked.prompts, SIDES[side]) for count in steps]
            means[side] = statistics.mean(turnarounds(url, data, specs))
            print(f"  turnaround {means[side]:.0f} s")
        if len(means) == len(SIDES):
            ratios.append(means["parts"] / means["elastic"])
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    if ratios:
        print(f"turnaround parts / elastic {statistics.median(ratios):.2f}x ({each})")


if __name__ == "__main__":
    main()
