"""Generation with drafts, against the same engine without.

    python benchmarks/speculation.py [--rounds 7] [--sequences 1,4,16,32] [--depth auto] [--method auto]
        [--policy FOLDER] [--smoke]

Two engines on one CPU core, of which one speculates, draw the same requests in turn, the order changing from
round to round. Each round has the same prompts and other seeds, as an epoch; what earlier rounds drew is drafted from.

repeats      the bundled policy, trained to count, at temperature 1: responses to a prompt resemble each other. --policy
             names a folder with it (`rlhfless demo` builds one); without, it is trained first (minutes)
misses       a random model at temperature 1: responses do not resemble each other, and few drafts are found

off / on     seconds without drafts over seconds with, median of neighbouring rounds: above 1 is faster
processor    the same of the seconds in which the engine's process ran: a busy machine changes them less
identical    share of the tokens of the engine without drafts that the other drew as well: anything but 1 is a fault
accepted     drafts that were accepted, of those that were verified
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from setting import engine_settings, median_ratio, spread
from smoke import parsed
from transformers import AutoTokenizer
from where import machine

from rlhfless.bundled import build
from rlhfless.bundled.model import build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.functions.generation.engine import Sampled, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records.ledger import added
from rlhfless.spec import EngineSpec, SpeculationSpec

SIBLINGS = 4
"""Samples of a prompt."""

MAX_TOKENS = 96


@dataclass
class Figures:
    """Of one batch size."""

    off_s: list[float] = field(default_factory=list)
    on_s: list[float] = field(default_factory=list)
    off_ran_s: list[float] = field(default_factory=list)
    on_ran_s: list[float] = field(default_factory=list)
    tokens: int = 0
    identical: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def take(self, off: Sequence[Sampled], on: Sequence[Sampled]) -> None:
        """The responses of a round."""
        for plain, drafted in zip(off, on, strict=True):
            self.tokens += len(plain.token_ids)
            same = zip(plain.token_ids, drafted.token_ids, strict=False)
            self.identical += sum(one == other for one, other in same)
            self.drafted = added(self.drafted, drafted.drafted)
            self.accepted = added(self.accepted, drafted.accepted)


async def started(model: Path, speculation: SpeculationSpec) -> VllmEngine:
    return await VllmEngine.start(
        engine_settings(
            model,
            model.parent / "store",
            engine=EngineSpec(kv_cache_gib=0.5, max_sequences=64),
            speculation=speculation,
        )
    )


async def drawn(engine: VllmEngine, requests: Sequence[SampleRequest]) -> tuple[float, float, list[Sampled]]:
    """Seconds, seconds in which the engine ran, and responses."""
    began, ran = time.perf_counter(), ran_s(engine)
    sampled = await asyncio.gather(*map(engine.sample, requests))
    return time.perf_counter() - began, ran_s(engine) - ran, sampled


def ran_s(engine: VllmEngine) -> float:
    """Processor seconds of the engine's process so far, of all its threads."""
    threads = Path(f"/proc/{engine._process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def measure(task: str, model: Path, sizes: Sequence[int], rounds: int, speculation: SpeculationSpec) -> None:
    prompts = prompts_of(model, max(sizes) // SIBLINGS + 1)
    off = await started(model, SpeculationSpec())
    on = await started(model, speculation)
    for sequences in sizes:
        figures = Figures()
        history: dict[int, tuple[tuple[int, ...], ...]] = dict.fromkeys(range(len(prompts)), ())
        for round_ in range(rounds + 1):
            # No batch size has the seeds of another, whose responses would be drafts.
            first = (1000 * sequences + round_) * 100
            requests = [
                SampleRequest(f"{i}", prompts[i // SIBLINGS], first + i, MAX_TOKENS, temperature=1.0,
                              cache_salt=f"{sequences}")
                for i in range(sequences)
            ]  # fmt: skip
            informed = [
                replace(request, earlier=() if i % SIBLINGS else history[i // SIBLINGS][-16:])
                for i, request in enumerate(requests)
            ]
            sides = [(off, requests), (on, informed)]
            results = [await drawn(*side) for side in (sides if round_ % 2 else sides[::-1])]
            (off_s, off_ran_s, plain), (on_s, on_ran_s, drafted) = results if round_ % 2 else results[::-1]
            for i, sampled in enumerate(drafted):
                history[i // SIBLINGS] += (sampled.token_ids,)
            if round_ == 0:  # it warms both up, and has no history
                continue
            figures.off_s.append(off_s)
            figures.on_s.append(on_s)
            figures.off_ran_s.append(off_ran_s)
            figures.on_ran_s.append(on_ran_s)
            figures.take(plain, drafted)
        show(task, sequences, figures)
    await asyncio.gather(off.stop(), on.stop())


def show(task: str, sequences: int, figures: Figures) -> None:
    drafted, accepted = sum(figures.drafted), sum(figures.accepted)
    print(f"{task:8} {sequences:3} sequences: off / on {median_ratio(figures.off_s, figures.on_s):.3f}", end="")
    print(f", processor {median_ratio(figures.off_ran_s, figures.on_ran_s):.3f}", end="")
    print(f"; identical {figures.identical / figures.tokens:.6f} of {figures.tokens:,} tokens", end="")
    print(f"; accepted {accepted / max(drafted, 1):.2f} of {drafted:,} drafts")
    print(f"         off {spread(figures.off_s)} s, on {spread(figures.on_s)} s")


def prompts_of(model: Path, count: int) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = draw_problems(TaskRecipe(), np.random.default_rng(1), count, held_out=False)
    return [tuple(tokenizer(problem.prompt).input_ids) for problem in problems]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", default="1,4,16,32")
    parser.add_argument("--depth", default="auto", type=lambda depth: depth if depth == "auto" else int(depth))
    parser.add_argument("--method", default="auto")
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--tasks", default="repeats,misses")
    arguments = parsed(parser, rounds=1, sequences="4", tasks="misses")
    sizes = [int(size) for size in arguments.sequences.split(",")]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    speculation = SpeculationSpec(method=arguments.method, depth=arguments.depth)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="rlhfless-bench-") as name:
        folder = Path(name)
        build_random(folder / "random", seed=0)
        for task in arguments.tasks.split(","):
            policy = arguments.policy or (build(folder / "bundled").model if task == "repeats" else None)
            model = policy if task == "repeats" and policy else folder / "random"
            asyncio.run(measure(task, model, sizes, arguments.rounds, speculation))


if __name__ == "__main__":
    main()
