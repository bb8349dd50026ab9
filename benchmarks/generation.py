"""Tokens per second through our generation function, against bare vLLM on the same prompts.

    python benchmarks/generation.py [--rounds N] [--smoke]

(a) One actor, pinned to a core, against one bare AsyncLLM pinned to the same core: what Ray Serve, the streaming of
    groups and the version checks cost.
(b) Two actors, a core each, against one bare AsyncLLM with vLLM's defaults over both cores: what a fleet gains.

Rounds of all sides alternate in one run; ratios are of neighbouring rounds, their median is reported. 64 requests an
actor, 64 tokens each. Weights are loaded and the prefix cache is empty before each of our rounds, as in a step.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from bare import BareEngine, Batch, bare_engines, together
from setting import assets, live_run, median_ratio, spec_of, spread
from smoke import parsed
from where import machine

from rlhfless.fleet.replica import Replica
from rlhfless.functions.generation.messages import GenerateRequest, SampleItem, StreamEnd
from rlhfless.loop.rollout_request import sampling_of
from rlhfless.loop.run import Run
from rlhfless.records import Work, sample_seed

MAX_MODEL_LEN = 128


def items_of(run: Run, number: int) -> tuple[SampleItem, ...]:
    """All samples of a step."""
    draw = run.begin(number).request
    return tuple(item for prompt in draw.prompts for item in draw.items(prompt))


async def draw(run: Run, actor: Replica, items: tuple[SampleItem, ...]) -> int:
    """Tokens drawn by one actor."""
    request = GenerateRequest(items, sampling_of(run.spec), run.published.version.label, actor.name, 0.5, 60, 600)
    tokens = 0
    async for event in actor.stream(Work.GENERATE, "generate", run.call(1), request, timeout_s=600):
        if not isinstance(event, StreamEnd):
            tokens += sum(len(rollout.token_ids) for rollout in getattr(event, "rollouts", ()))
    return tokens


async def ours(run: Run, actors: list[Replica], parts: list[tuple[SampleItem, ...]]) -> float:
    """Tokens per second of these actors, each with its part."""
    began = time.perf_counter()
    tokens = await asyncio.gather(*(draw(run, actor, part) for actor, part in zip(actors, parts, strict=True)))
    return sum(tokens) / (time.perf_counter() - began)


def bare(engines: list[BareEngine], parts: list[tuple[SampleItem, ...]], seed: int) -> float:
    """Tokens per second of bare engines, each with its part; seeds differ from ours, so nothing is cached."""
    batches = [
        Batch(tuple((i.prompt_token_ids, sample_seed(seed, 0, i.prompt_id, i.sample_index)) for i in part), 64)
        for part in parts
    ]
    seconds, tokens = together(engines, batches)
    return tokens / seconds


async def measure(folder: Path, rounds: int) -> None:
    model = str(folder / "model")
    figures: dict[str, list[float]] = {name: [] for name in ("one", "one bare", "two", "default bare")}
    with bare_engines(model, MAX_MODEL_LEN, (0,), None) as (pinned, default):
        async with live_run(spec_of(folder), folder) as run:
            first, second = run.generation.serving()
            for number in range(1, rounds + 2):
                items = items_of(run, number)
                half = len(items) // 2
                halves = [items[:half], items[half:]]
                row = {
                    "one": await ours(run, [first], halves[:1]),
                    "one bare": bare([pinned], halves[:1], number),
                    "two": await ours(run, [first, second], halves),
                    "default bare": bare([default], [items], number),
                }
                if number > 1:  # the first round warms all sides up
                    for name, value in row.items():
                        figures[name].append(value)
    print(machine())
    for name, values in figures.items():
        print(f"{name:14} tokens/s {spread(values)}")
    print(f"one actor / bare AsyncLLM on the same core    {median_ratio(figures['one'], figures['one bare']):.3f}")
    print(f"two actors / one default vLLM over both cores {median_ratio(figures['two'], figures['default bare']):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parsed(parser, rounds=1)
    with assets(prompts=2048) as folder:
        asyncio.run(measure(folder, arguments.rounds))


if __name__ == "__main__":
    main()
