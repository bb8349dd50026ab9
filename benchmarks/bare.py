"""A bare vLLM AsyncLLM in a process of its own, as the peer of our generation function.

The peer is what one writes with vLLM's documentation at hand: an engine, one request per sample, the final outputs
gathered. It is asked over a pipe, and reports the seconds between the first request and the last output, measured
inside, so that the pipe costs it nothing.

This file is the main module of that process, and not a function that multiprocessing calls there: spawned processes
(those that vLLM spawns included) import the main module again, a benchmark's imports numba, and vLLM cannot start
beside numba.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rlhfless.util import processes

Request = tuple[tuple[int, ...], int]  # prompt tokens, seed

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


LIMIT_S = 900
"""For a start, or a batch. Three engines that start at once on two cores have taken 120 s."""


@dataclass(frozen=True)
class Batch:
    """What to draw."""

    requests: tuple[Request, ...]
    max_tokens: int


class BareEngine:
    """One AsyncLLM on the given cores, or on all of them with vLLM's own defaults."""

    def __init__(self, model: str, max_model_len: int, cores: tuple[int, ...] | None) -> None:
        self._pipe, theirs = Pipe()
        of_process = [theirs.fileno(), os.getpid(), max_model_len, model, *(cores or ())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, of_process)], pass_fds=(theirs.fileno(),)
            )

    def wait_until_up(self) -> None:
        """Blocks until the engine has answered one request."""
        self._receive("start")

    def begin(self, batch: Batch) -> None:
        self._pipe.send((batch.requests, batch.max_tokens))

    def finish(self) -> tuple[float, int]:
        """Seconds and tokens of the batch begun last."""
        seconds, tokens = self._receive("finish a batch")
        return seconds, tokens

    def _receive(self, what: str) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"the bare engine did not {what} within {LIMIT_S} s")
        try:
            return self._pipe.recv()
        except EOFError:
            code = self._process.wait(LIMIT_S)
            raise RuntimeError(f"the bare engine ended with exit code {code}; its own error is above") from None

    def stop(self) -> None:
        with suppress(OSError):  # its process has ended
            self._pipe.send(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()


@contextmanager
def bare_engines(model: str, max_model_len: int, *cores: tuple[int, ...] | None) -> Iterator[list[BareEngine]]:
    """One for each of `cores`, all up; stopped at the end, also where a benchmark fails."""
    engines = [BareEngine(model, max_model_len, own) for own in cores]
    try:
        for engine in engines:
            engine.wait_until_up()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def together(engines: list[BareEngine], batches: list[Batch]) -> tuple[float, int]:
    """Seconds until the last engine is done, and tokens of all."""
    began = time.perf_counter()
    for engine, batch in zip(engines, batches, strict=True):
        engine.begin(batch)
    tokens = sum(engine.finish()[1] for engine in engines)
    return time.perf_counter() - began, tokens


async def _loop(pipe: Connection, model: str, max_model_len: int) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=max_model_len,
            enforce_eager=True,
            block_size=32,
            disable_log_stats=True,
        )
    )
    await _draw(engine, Batch((((1, 2, 3), 0),), 4), round_number=0)
    pipe.send(None)
    number = 0
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        number += 1
        began = time.perf_counter()
        tokens = await _draw(engine, Batch(*asked), number)
        pipe.send((time.perf_counter() - began, tokens))
    engine.shutdown()


async def _draw(engine: Any, batch: Batch, round_number: int) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(index: int, request: Request) -> int:
        token_ids, seed = request
        parameters = SamplingParams(
            max_tokens=batch.max_tokens,
            temperature=1.0,
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(token_ids)}
        async for output in engine.generate(prompt, parameters, f"{round_number}-{index}"):
            if output.finished:
                return len(output.outputs[0].token_ids)
        raise RuntimeError("the engine ended a request without an output")

    return sum(await asyncio.gather(*(one(i, request) for i, request in enumerate(batch.requests))))


def main() -> None:
    """The engine's process: file descriptor of the pipe, pid of the benchmark, tokens of context, model, cores."""
    pipe, parent, max_model_len = map(int, sys.argv[1:4])
    model, cores = sys.argv[4], set(map(int, sys.argv[5:]))
    processes.die_with(parent)
    os.environ.update(CPU_ENVIRONMENT)
    if cores:
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    asyncio.run(_loop(Connection(pipe), model, max_model_len))


if __name__ == "__main__":
    main()
