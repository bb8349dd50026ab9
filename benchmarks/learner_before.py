"""The learner of this checkout against that of an earlier commit: tokens per second with one rank.

    python benchmarks/learner_before.py [--before 075e509] [--smoke]

Each side is a process of its own on its own checkout (a git worktree in a temporary folder for the earlier one), with
the same model, batch and threads, and one optimiser step per round. The sides take turns (A B, B A, ...), so that both
meet the same state of the machine; each pair of rounds gives a ratio, and the median of the ratios counts, of wall time
and of the processor time of all threads. 075e509 is the commit before the learner was sharded by FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from smoke import parsed
from where import machine

HERE = Path(__file__).resolve().parents[1]

BEFORE_FSDP2 = "075e509"

STEP = "step"


def serve(arguments: argparse.Namespace) -> None:
    """One side: a step for each line of stdin; answers wall and processor seconds."""
    import learner
    from transformers import AutoConfig

    side = learner.Ours(arguments.model, arguments.threads, arguments.micro_batch_tokens)
    vocabulary = AutoConfig.from_pretrained(arguments.model).vocab_size
    batch = learner.ragged_batch(arguments.prompts, arguments.samples, vocabulary)
    print(json.dumps({"tokens": len(batch.tokens)}), flush=True)
    for _ in sys.stdin:
        wall_s, processor_s = time.perf_counter(), time.process_time()
        side.step(batch)
        print(json.dumps([time.perf_counter() - wall_s, time.process_time() - processor_s]), flush=True)


class Side:
    """A process on a checkout."""

    def __init__(self, checkout: Path, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serves", "--model", arguments.model]
        for name in ("threads", "micro_batch_tokens", "prompts", "samples"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        # The checkout's own benchmarks/learner.py, which fits its own API.
        paths = os.pathsep.join([str(checkout), str(checkout / "benchmarks")])
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )
        self.tokens = int(self._answer()["tokens"])

    def step(self) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{STEP}\n")
        self.process.stdin.flush()
        wall_s, processor_s = self._answer()
        return wall_s, processor_s

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("[", "{")):
                return json.loads(line)
        raise RuntimeError(f"a side ended with {self.process.wait(60)}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


def compared(arguments: argparse.Namespace, before: Path) -> dict[str, Any]:
    sides = {"now": Side(HERE, arguments), "before": Side(before, arguments)}
    try:
        rounds: list[dict[str, tuple[float, float]]] = []
        for turn in range(arguments.rounds + 1):
            order = list(sides) if turn % 2 else list(sides)[::-1]
            rounds.append({name: sides[name].step() for name in order})
    finally:
        for side in sides.values():
            side.end()
    counted = rounds[1:]  # the first warms up
    tokens = sides["now"].tokens
    return {
        clock: {
            **{name: round(tokens / statistics.median(each[name][index] for each in counted)) for name in sides},
            "ratio": round(statistics.median(each["before"][index] / each["now"][index] for each in counted), 3),
        }
        for index, clock in enumerate(("wall", "processor"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE_FSDP2, help="a commit")
    parser.add_argument("--model", help="Hugging Face folder of a causal language model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serves", action="store_true", help=argparse.SUPPRESS)
    arguments = parsed(parser, prompts=2, samples=2, rounds=1)
    if arguments.serves:
        serve(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            from learner import random_model

            arguments.model = random_model(str(Path(folder) / "model"))
        before = Path(folder) / "before"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(before), arguments.before], check=True)
        try:
            speed = compared(arguments, before)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    print(json.dumps({"machine": machine(), "before": arguments.before, "tokens_per_s": speed}, indent=2))


if __name__ == "__main__":
    main()
