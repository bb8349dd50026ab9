"""Prompts computed apart, against one pool, on two CPU cores.

    python benchmarks/prefill.py [--rounds 5] [--prompts 16] [--samples 4] [--tokens 576] [--spread 0.8]
        [--connector folder] [--smoke]

Two engines, each on a core of its own, draw the same requests in two ways that take turns. One pool: each engine
computes half of the prompts and draws from them. Apart: one engine computes all prompts in pieces, the other takes the
KV of each piece by --connector (folder: files in shared memory; nixl) and draws all responses. A prompt and its mean
response have --tokens tokens together, at 8 : 1 and at 1 : 8; responses are lognormal with --spread (0: equal lengths),
and the longest begin first.

one / apart  seconds in one pool over seconds apart, median of neighbouring rounds: above 1 is faster apart
plan         the same ratio by `rlhfless plan`: from the data sheet of the device, and from this machine's own figures,
             which are measured before: one prefill, and decode iterations of 1 and of 64 sequences
identical    share of the tokens of one pool that were drawn apart as well: anything but 1 is a fault
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import get_args

import numpy as np
from setting import engine_settings, median_ratio, random_head, spread
from smoke import parsed
from where import machine

from rlhfless.autoscaling.engine_speeds import CALLS_S, prior_of
from rlhfless.bundled.model import ModelSize, build_random
from rlhfless.functions.generation.engine import OFFER, Sampled, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.scaling.capabilities import KV_BYTES_PER_S, kv_token_s
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.plan.prefill_apart import AlikeEngines, StepShape, compare
from rlhfless.scaling.prefill_pool import PIECES
from rlhfless.spec import EngineSpec
from rlhfless.spec.generation import KvConnector
from rlhfless.util.text import parsed_json

VOCABULARY = 64
"""Tokens that prompts are made of; the model knows more."""

RATIOS = (8, 1), (1, 8)
SEQUENCES = 64
"""Of the larger batch that decoding is measured with, and the most that an engine admits."""


@dataclass(frozen=True)
class Work:
    """A step's requests, prompt by prompt, those with the longest responses first."""

    prompts: list[tuple[int, ...]]
    lengths: list[int]
    samples: int

    @classmethod
    def of(cls, count: int, samples: int, prompt_tokens: int, step: StepShape, seed: int) -> Work:
        generator = np.random.default_rng(seed)
        prompts = [tuple(generator.integers(3, VOCABULARY, prompt_tokens).tolist()) for _ in range(count)]
        return cls(prompts, [step.response_tokens[i * PIECES // count] for i in range(count)], samples)

    def requests(self, prompt: int, salt: str) -> list[SampleRequest]:
        return [
            SampleRequest(
                f"{salt}-{prompt}-{sample}",
                self.prompts[prompt],
                seed=self.samples * prompt + sample,
                max_tokens=self.lengths[prompt],
                temperature=1.0,
                cache_salt=salt,
            )
            for sample in range(self.samples)
        ]


async def one_pool(engines: Sequence[VllmEngine], work: Work, salt: str) -> list[list[Sampled]]:
    async def drawn(prompt: int) -> list[Sampled]:
        engine = engines[prompt % len(engines)]
        return await asyncio.gather(*map(engine.sample, work.requests(prompt, salt)))

    return await asyncio.gather(*map(drawn, range(len(work.prompts))))


async def apart(engines: Sequence[VllmEngine], work: Work, salt: str) -> list[list[Sampled]]:
    prefill, decode = engines

    def whole(prompt: int, side: str) -> SampleRequest:
        request = SampleRequest(f"{salt}-{side}-{prompt}", work.prompts[prompt], None, 1, 0.0, cache_salt=salt)
        return replace(request, kv_transfer=OFFER)

    async def drawn(piece: Sequence[int]) -> list[list[Sampled]]:
        offered = await asyncio.gather(*(prefill.sample(whole(prompt, "offer")) for prompt in piece))
        await asyncio.gather(
            *(
                decode.sample(replace(whole(prompt, "take"), kv_transfer=offer.kv_offer))
                for prompt, offer in zip(piece, offered, strict=True)
            )
        )
        requests = [work.requests(prompt, salt) for prompt in piece]
        return [await group for group in [asyncio.gather(*map(decode.sample, of_prompt)) for of_prompt in requests]]

    count, pieces = len(work.prompts), min(PIECES, len(work.prompts))
    parts = [range(count * k // pieces, count * (k + 1) // pieces) for k in range(pieces)]
    return [group for part in await asyncio.gather(*map(drawn, parts)) for group in part]


async def measured_engine(engine: VllmEngine, prompt_tokens: int) -> EngineModel:
    """The engine's own figures: prefill of one prompt, and iterations of 1 and of SEQUENCES sequences, without the
    share of their context, which is small here."""

    async def seconds(sequences: int, prompt: int, tokens: int, salt: str) -> float:
        step = StepShape.of(sequences, 1, prompt, tokens, 0.0, tokens)
        work = Work.of(sequences, 1, prompt, step, seed=7)
        began_s = time.perf_counter()
        await one_pool([engine], work, salt)
        return time.perf_counter() - began_s

    await seconds(4, 32, 8, "warm")
    iterations = 32
    one_s = min([await seconds(1, 8, iterations, f"one {n}") for n in range(3)]) / iterations
    many_s = min([await seconds(SEQUENCES, 8, iterations, f"many {n}") for n in range(3)]) / iterations
    few = min([await seconds(4, prompt_tokens, 1, f"prefill {n}") for n in range(3)]) / 4
    sequence_s = max(many_s - one_s, 0.0) / (SEQUENCES - 1)
    return LinearEngine(one_s - sequence_s, sequence_s, 0.0, max(few - one_s / 4, 0.0) / prompt_tokens, 0.0)


def predicted(step: StepShape, model: EngineModel, shape: ModelShape, connector: KvConnector) -> float:
    token_s = kv_token_s(shape, 1, KV_BYTES_PER_S[connector].value)
    found = compare(step, AlikeEngines(model, 2, SEQUENCES, token_s, CALLS_S))
    return found.together_s / found.apart_s


async def started(model: Path, store: Path, core: int, connector: KvConnector) -> VllmEngine:
    """An engine on one core; its process inherits the core of this one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        spec = EngineSpec(kv_cache_gib=1.0, max_sequences=SEQUENCES, kv_connector=connector)
        return await VllmEngine.start(engine_settings(model, store, engine=spec, max_model_len=2048))
    finally:
        os.sched_setaffinity(0, cores)


async def measure(model: Path, store: Path, arguments: argparse.Namespace) -> None:
    shape = ModelShape.of_config(parsed_json((model / "config.json").read_bytes()))
    cores = sorted(os.sched_getaffinity(0))
    engines = [await started(model, store, core, arguments.connector) for core in (cores[0], cores[-1])]
    own = await measured_engine(engines[0], arguments.tokens)
    for prompt_part, response_part in RATIOS:
        prompt_tokens = arguments.tokens * prompt_part // (prompt_part + response_part)
        mean = arguments.tokens - prompt_tokens
        median = mean / np.exp(arguments.spread**2 / 2)
        step = StepShape.of(
            arguments.prompts, arguments.samples, prompt_tokens, median, arguments.spread, arguments.tokens * 2
        )
        times: tuple[list[float], list[float]] = ([], [])
        tokens = same = 0
        for round_ in range(arguments.rounds + 1):
            work = Work.of(arguments.prompts, arguments.samples, prompt_tokens, step, seed=round_)
            drawn: dict[int, list[list[Sampled]]] = {}
            for way in (0, 1) if round_ % 2 else (1, 0):
                began_s = time.perf_counter()
                draw = (one_pool, apart)[way]
                drawn[way] = await draw(engines, work, f"{prompt_part}-{round_}-{way}")
                if round_:  # the first warms both up
                    times[way].append(time.perf_counter() - began_s)
            for one, other in zip(*map(chain.from_iterable, (drawn[0], drawn[1])), strict=True):
                tokens += len(one.token_ids)
                same += sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=True))
        models = prior_of(CPU_KIND, shape), own
        plan = [predicted(step, model_, shape, arguments.connector) for model_ in models]
        lengths = f"responses of {step.response_tokens[-1]} to {step.response_tokens[0]}"
        print(f"{prompt_part} : {response_part}, prompts of {prompt_tokens}, {lengths}", end="")
        print(f": one / apart {median_ratio(*times):.3f}", end="")
        print(f"; plan {plan[0]:.3f} by the data sheet, {plan[1]:.3f} by this machine's engine", end="")
        print(f"; identical {same / tokens:.6f} of {tokens:,} tokens")
        print(f"       one {spread(times[0])} s, apart {spread(times[1])} s", flush=True)
    await asyncio.gather(*(engine.stop() for engine in engines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=576)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--connector", choices=get_args(KvConnector), default="folder")
    arguments = parsed(parser, rounds=1, prompts=4, samples=2, tokens=99)
    print(machine())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        build_random(Path(folder) / "model", seed=0, size=ModelSize(max_positions=2048))
        random_head(Path(folder) / "model")
        asyncio.run(measure(Path(folder) / "model", Path(folder) / "store", arguments))


if __name__ == "__main__":
    main()
