"""The engine in the process shape of GPUs beside one process, and a node that joins in mid-run.

    python benchmarks/shapes.py MODEL_FOLDER [--rounds N] [--steps N] [--parts shapes,node] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. Every figure is of a whole run of examples/demo.yaml, by its trace.

shapes   the demo with each engine in one process, and with its core and worker apart, in turn for each round; then one
         actor of two devices (tensor parallelism). Printed are the median step, the start of an engine, the wait for
         devices at the start (the price of the holders), and the share of samples with the same tokens.
node     a Ray of two devices, one for the learner and one for an actor; the run has two actors. The node with the third
         device is started when all others are up. Printed is the time from `ray start` on the node to its return, to
         the device's being held, and to its actor's serving.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from demo_run import demo_command, run_demo
from smoke import parsed
from where import machine

from rlhfless.records import FunctionName, Holding, ReplicaState
from rlhfless.records.compare import compare_samples
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.acquisition import Acquired

SHAPES: dict[str, Sequence[str]] = {
    "one process": ("generation.engine.core_process=false",),
    "core apart": ("generation.engine.core_process=true",),
}
TENSOR_PARALLEL = (
    "generation.engine.tensor_parallel_size=2",
    "scaling.generation={min_actors: 1, max_actors: 1}",
)
OTHERS_S = 60.0
"""What the other replicas get to start in, before the node joins."""

LONGEST_S = 600.0
"""For a run of a few steps to come as far as is waited for; on a crowded machine a start takes two minutes."""


@dataclass(frozen=True)
class Figures:
    """What one run's trace says."""

    trace: Trace
    step_s: float
    """Median; the first step, in which nothing is warm, is left out where there are others."""
    start_s: float
    """Median over generation replicas: from its demand for a replica until it is up, without weights."""
    devices_s: float
    """Longest wait for devices."""


def figures(trace: Trace) -> Figures:
    steps = [step.end_s - step.start_s for step in trace.steps]
    starts = [row.duration_s for row in _generation(trace, ReplicaState.STARTING)]
    lags = [acquired.lag_s for acquired in Acquired.of(trace.decisions)]
    return Figures(trace, statistics.median(steps[1:] or steps), statistics.median(starts), max(lags))


def _generation(trace: Trace, state: ReplicaState) -> list[Holding]:
    return [row for row in trace.holdings if row.function == FunctionName.GENERATION and row.state is state]


def recorded(model: Path, settings: Sequence[str], steps: int, smoke: bool) -> Figures:
    """A run to its end."""
    told = (f"steps={steps}", "logging.record_tokens=true", "evaluation.samples_per_prompt=1", *settings)
    with tempfile.TemporaryDirectory() as output:
        return figures(read_trace(run_demo(model, Path(output), told, smoke) / "trace"))


def shapes(model: Path, rounds: int, steps: int, smoke: bool) -> None:
    runs: dict[str, list[Figures]] = {name: [] for name in SHAPES}
    for number in range(rounds):
        order = list(SHAPES.items())
        for name, settings in order if number % 2 == 0 else reversed(order):
            runs[name].append(recorded(model, settings, steps, smoke))
    if not smoke:
        runs["two devices"] = [recorded(model, TENSOR_PARALLEL, steps, smoke)]
    print("shape          step s   engine start s   wait for devices s")
    for name, found in runs.items():
        medians = (statistics.median(getattr(run, key) for run in found) for key in ("step_s", "start_s", "devices_s"))
        print("{:13} {:7.3f} {:16.1f} {:20.2f}".format(name, *medians))
    one, *others = runs
    for other in others:
        ratio = statistics.median(b.step_s / a.step_s for a, b in zip(runs[one], runs[other], strict=False))
        same = compare_samples(runs[one][0].trace, runs[other][0].trace)
        print(f"{other} / {one}: step {ratio:.3f}; samples with the same tokens {same.identical} of {same.compared}")


# -- a node that joins


def node(model: Path, steps: int) -> None:
    with _ray() as (address, join), tempfile.TemporaryDirectory() as output:
        settings = (
            f"placement={{ray_address: '{address}', kind: cpu-core, devices: 3, mode: disaggregated}}",
            f"steps={steps}",
            "learner.ranks=1",
            "evaluation.samples_per_prompt=1",
            "scaling.generation={min_actors: 2, max_actors: 2}",
            "recovery.lease_s=20",
        )
        command = demo_command(model, Path(output), settings)
        run = subprocess.Popen(command)
        try:
            _until(
                lambda: any("waiting for devices" in file.read_text() for file in Path(output).glob("*/run.log")), run
            )
            time.sleep(OTHERS_S)
            began_s = time.time()
            join()
            joined_s = time.time()
            if run.wait(LONGEST_S):
                raise subprocess.CalledProcessError(run.returncode, command)
        finally:
            run.kill()
        trace = read_trace(next(Path(output).iterdir()) / "trace")
    held_s = min(row.held_s for row in Acquired.of(trace.decisions) if row.held_s > began_s)
    serving_s = min(row.start_s for row in _generation(trace, ReplicaState.SERVING) if row.start_s > held_s)
    print(f"`ray start` on the node -> it has joined {joined_s - began_s:.1f} s")
    print(f"`ray start` on the node -> its device is held {held_s - began_s:.1f} s")
    print(f"`ray start` on the node -> its actor serves {serving_s - began_s:.1f} s")


def _until(reached: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + LONGEST_S
    while not reached():
        if run.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"the run ended with {run.poll()}, or took {LONGEST_S:.0f} s to its first step")
        time.sleep(0.2)


@contextlib.contextmanager
def _ray() -> Iterator[tuple[str, Callable[[], None]]]:
    """A Ray with two cores; its address, and what adds a node with another one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, address = f"/tmp/rlhfless-ray-{port}", f"127.0.0.1:{port}"
    program = str(Path(sys.executable).with_name("ray"))
    common = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.update(common)

    def start(*options: str) -> None:
        subprocess.run([program, "start", *options], check=True, timeout=240, capture_output=True)

    try:
        head = ("--head", "--num-cpus=2", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false")
        start(*head, f"--temp-dir={folder}")
        yield address, lambda: start(f"--address={address}", "--num-cpus=1", "--node-ip-address=127.0.0.2")
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if folder in " ".join(process.info["cmdline"] or ()):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a run")
    parser.add_argument("--parts", default="shapes,node")
    options = parsed(parser, rounds=1, steps=1, parts="shapes")
    print(machine())
    if "shapes" in options.parts.split(","):
        shapes(options.model, options.rounds, options.steps, options.smoke)
    if "node" in options.parts.split(","):
        node(options.model, options.steps)


if __name__ == "__main__":
    main()
