"""What a generated token costs in vLLM's Python, with vLLM's scheduler and with ours
(rlhfless/functions/generation/vllm/scheduler.py).

    python benchmarks/logprobs.py [--sequences 128,256,1024] [--iterations 96] [--rounds 3] [--smoke]

vLLM's scheduler, core, messages and front end are real, and synchronous; the model is not there. Each request generates
one token in each iteration. The three rows run in turn; figures are medians over rounds.

vLLM's    vLLM's scheduler and front end
ours      ours
neither   vLLM's, where no logprobs are asked for: the cost of the tokens

core      processor microseconds per token to update requests from an iteration's output and encode the message, without
          schedule()
front     the same to decode the message and process it
outputs   requests in messages, per token
bytes     of messages, per token
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smoke import parsed
from where import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

from fakes.fake_core import encoded, fake_core
from fakes.tiny_models import make_tiny_model
from rlhfless.functions.generation.engine import SampleRequest

WARM = 4
"""Iterations that are not measured: prompts are computed, and caches fill."""


class Timed:
    """Processor seconds in a function that is replaced by a timed one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


ROWS = ("vLLM's", "ours", "neither")


def measured(model: Path, sequences: int, iterations: int, row: str) -> tuple[float, float, float, float]:
    """Core, front, outputs and bytes of a token."""
    own = row == "ours"
    messages: list[tuple[int, int]] = []
    core_time, front_time = Timed(), Timed()
    timers = core_time.wrapped, front_time.wrapped
    with fake_core(model, own=own, sequences=sequences) as core, encoded(core, messages, *timers):
        engine: Any = core._engine
        scheduler = engine.engine_core.engine_core.scheduler
        scheduler.update_from_output = core_time.wrapped(scheduler.update_from_output)
        engine.output_processor.process_outputs = front_time.wrapped(engine.output_processor.process_outputs)
        for number in range(sequences):
            prompt = (5, 6, 3 + number % 90, 3 + number // 90)
            core.submit(SampleRequest(str(number), prompt, number, iterations + 2 * WARM, temperature=1.0))
        if row == "neither":
            executor = engine.engine_core.engine_core.model_executor
            executor.sample_tokens = without_logprobs(executor.sample_tokens)
        if not own:  # its own front end, too
            for state in engine.output_processor.request_states.values():
                state.logprobs_processor = LogprobsProcessor(None, FlatLogprobs(), None, 0.0, 0, None)
        for _ in range(WARM):
            core.step()
        messages.clear()
        core_time.seconds = front_time.seconds = 0.0
        for _ in range(iterations):
            core.step()
        tokens = sequences * iterations
        sums = [sum(column) / tokens for column in zip(*messages, strict=True)]
        return 1e6 * core_time.seconds / tokens, 1e6 * front_time.seconds / tokens, sums[0], sums[1]


def without_logprobs(sample: Callable[..., Any]) -> Callable[..., Any]:
    """The executor's pass, which returns no logprobs."""

    def sampled(grammar: Any) -> Any:
        passed = sample(grammar)
        passed.logprobs = None
        return passed

    return sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="128,256,1024")
    parser.add_argument("--iterations", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parsed(parser, sequences="8", iterations=16, rounds=1)
    print(machine())
    print(f"{'sequences':>9}  {'scheduler':>9}  {'core us':>8}  {'front us':>8}  {'outputs':>8}  {'bytes':>7}")
    with tempfile.TemporaryDirectory(prefix="rlhfless-bench-") as name:
        model = make_tiny_model(Path(name) / "model", tied=True).folder
        for sequences in map(int, arguments.sequences.split(",")):
            rounds: dict[str, list[tuple[float, ...]]] = {row: [] for row in ROWS}
            for _ in range(arguments.rounds):
                for row, figures in rounds.items():
                    figures.append(measured(model, sequences, arguments.iterations, row))
            for row, figures in rounds.items():
                core, front, outputs, size = (statistics.median(column) for column in zip(*figures, strict=True))
                print(f"{sequences:>9}  {row:>9}  {core:>8.2f}  {front:>8.2f}  {outputs:>8.3f}  {size:>7.1f}")


if __name__ == "__main__":
    main()
