"""Checks of an engine on this node's devices, next to the learner whose weights it loads."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rlhfless.functions.generation.engine import EngineSettings, LoadReport, Sampled, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.functions.generation.vllm.arguments import is_eager
from rlhfless.planning.inputs import shared_kv_bytes
from rlhfless.records import PublishedWeights
from rlhfless.selftest import rank_work
from rlhfless.selftest.check import Measured, NotHere, Subject, Wrong, check
from rlhfless.selftest.ranks import RankProcesses, up, visible
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import (
    MEAN_TOLERANCE,
    allowed_difference,
    default_tolerance,
    largest_difference,
    mean_difference,
)

T = TypeVar("T")

BATCHES = (1, 32, 128)
"""Batch sizes that show how the time of an iteration grows: the knots of the fitted engine."""

DRAWN_TOKENS = 64

MOVED, MOVED_AFTER = 8, 9
"""Number of migrated samples, and the tokens generated before each migrates."""

KV_SHARE = 0.9
"""Smallest accepted KV cache, as a share of the planned tokens."""


def settings_of(subject: Subject, tensor_parallel: int = 0) -> EngineSettings:
    """Return the settings of the engine under test. A nonzero `tensor_parallel` replaces the run's."""
    spec = subject.spec
    engine = spec.generation.engine
    if tensor_parallel:
        engine = engine.model_copy(update={"tensor_parallel_size": tensor_parallel})
    settings = EngineSettings.of(
        spec,
        "cuda" if subject.gpus else "cpu",
        StoreAddress("file", str(subject.store.folder)),
        subject.asked.sequence_tokens,
        shared_kv_bytes(spec, subject.asked.shape, subject.kind),
    )
    # Sleep is checked even if the run does not take turns, and on GPUs vLLM must know it at startup. The checks load
    # whole weights; an engine with adapters tries its products of adapters at each start (vllm/lora_slots.py).
    return replace(settings, engine=engine, sleeps=True, adapters=None)


class Engines:
    """The running engine and its event loop."""

    def __init__(self, subject: Subject, tensor_parallel: int = 0) -> None:
        self._settings = settings_of(subject, tensor_parallel)
        self._devices = _devices_of(subject, self._settings.engine.devices_per_actor)
        self._runner = asyncio.Runner()
        self.start()

    def start(self) -> None:
        with _bound(self._devices, on_gpus=self._settings.device == "cuda"):
            self.engine = self.run(VllmEngine.start(self._settings))

    @property
    def kv_bytes(self) -> int:
        """Planned bytes of the KV cache on all devices of the engine.

        0 if unplanned or on a CPU, where pages take memory only once touched.
        """
        settings = self._settings
        if settings.device == "cpu":
            return 0
        return (settings.kv_bytes or 0) * settings.engine.devices_per_actor

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def load(self, published: PublishedWeights) -> tuple[Any, tuple[float, ...]]:
        """Load weights. Return the load report and the probe's logprobs afterwards."""
        report = self.run(self.engine.load(published))
        return report, self.run(self.engine.logprobs(published.probe.token_ids))

    def sample(self, *requests: SampleRequest) -> list[Sampled]:
        """Generate the responses of all requests concurrently."""

        async def sampled() -> list[Sampled]:
            return await asyncio.gather(*map(self.engine.sample, requests))

        return self.run(sampled())

    def draw(self, *requests: SampleRequest) -> list[tuple[int, ...]]:
        """Generate concurrently; return the tokens of each response."""
        return [sampled.token_ids for sampled in self.sample(*requests)]

    def close(self) -> None:
        self.run(self.engine.stop())
        self._runner.close()


def _devices_of(subject: Subject, count: int) -> tuple[str, ...]:
    """Return the engine's devices: the node's first, shared with the learner, if colocated; otherwise its last."""
    colocated = subject.spec.placement.mode == "colocated"
    if not subject.gpus:
        return tuple(map(str, sorted(os.sched_getaffinity(0))))[:count]
    first = 0 if colocated else subject.gpus - count
    return tuple(visible(first + index) for index in range(count))


@contextmanager
def _bound(devices: tuple[str, ...], *, on_gpus: bool) -> Iterator[None]:
    """Restrict processes started by this thread within the block to these devices."""
    name, cores = "CUDA_VISIBLE_DEVICES", os.sched_getaffinity(0)
    before = os.environ.get(name)
    os.environ[name] = ",".join(devices) if on_gpus else ""
    if not on_gpus:
        os.sched_setaffinity(0, set(map(int, devices)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def running(subject: Subject) -> Engines:
    """Return the engine started by the check `engine`."""
    assert isinstance(subject.engines, Engines)
    return subject.engines


def publish(subject: Subject, step: int) -> tuple[PublishedWeights, float]:
    """Publish the learner's weights as the version of `step`; return it and the seconds."""
    work = up(subject).do(rank_work.publish, str(subject.store.folder), step, subject.probe)
    return next((weights, seconds) for weights, seconds in work if weights is not None)


@check(
    "engine",
    "see the trace; lower generation.engine.gpu_memory_fraction, or try generation.engine.eager: true",
    needs=("learner",),
)
def start(subject: Subject) -> Measured:
    """Start an engine next to the running learner. Measures the seconds of each phase, the KV cache against the plan,
    and the model runner, attention and sampler that vLLM chose."""
    engines = subject.engines = Engines(subject)
    engine, planned = engines.engine, subject.asked.plan().kv_tokens or 0
    seconds = {f"{name}_s": value for name, value in engine.start_seconds.items()}
    subject.results["start"] = dict(engine.start_seconds)
    measured = {
        **seconds,
        **engine.backends,
        "kv_tokens": engine.kv_capacity_tokens,
        "planned_kv_tokens": planned,
        "graphs": not is_eager(engine.settings),
    }
    if engine.kv_capacity_tokens and engine.kv_capacity_tokens < KV_SHARE * planned:
        raise Wrong(f"the KV cache has {engine.kv_capacity_tokens:,} tokens, and {planned:,} are planned", **measured)
    return measured


@check(
    "probe",
    "raise weights.probe_tolerance if all tensors were read back, and report it with this file",
    needs=("engine",),
)
def probe(subject: Subject) -> Measured:
    """Load the learner's weights. Measures the rate, and the share of the probe's tolerance that rounding takes."""
    weights, publish_s = publish(subject, 1)
    subject.results |= {"published": weights, "publish_s": publish_s}
    began_s = time.perf_counter()
    measured = loaded(subject, running(subject))
    load_s = subject.results["load_s"] = time.perf_counter() - began_s
    size = weights.size_bytes / 1e9
    return measured | {"publish_gb_per_s": size / publish_s, "load_gb_per_s": size / load_s}


def loaded(subject: Subject, engines: Engines) -> dict[str, Any]:
    """Load the published weights and compare the probe."""
    return check_probe(subject, *engines.load(subject.results["published"]))


def check_probe(subject: Subject, report: LoadReport, logprobs: tuple[float, ...]) -> dict[str, Any]:
    """Compare the probe's logprobs after a load with the learner's. Raises Wrong if they differ too much."""
    weights, spec = subject.results["published"], subject.spec
    layers, quantization = subject.asked.shape.layers, spec.generation.quantization
    tolerance = spec.weights.probe_tolerance or default_tolerance(spec.model.dtype, layers, quantization)
    allowed = allowed_difference(weights.probe, tolerance)
    measured = {
        "largest_share": largest_difference(logprobs, weights.probe.logprobs) / allowed,
        "mean_share": mean_difference(logprobs, weights.probe.logprobs) / (MEAN_TOLERANCE * allowed),
        "read_back_tensors": report.read_back,
        "tensors": weights.tensors,
    }
    if not max(measured["largest_share"], measured["mean_share"]) <= 1:
        raise Wrong("engine and learner compute different logprobs", **measured)
    return measured


def _request(subject: Subject, number: int, most: int = DRAWN_TOKENS, prompt: int = 8) -> SampleRequest:
    tokens = subject.tokens(prompt, 31 * number)
    room = subject.asked.sequence_tokens - prompt
    return SampleRequest(f"r{number}", tokens, seed=number, max_tokens=min(most, room), temperature=1.0)


@check("speed", "see the trace", needs=("probe",))
def speed(subject: Subject) -> Measured:
    """Generate several batches and run a prefill. Measures tokens per second, hence the seconds of an iteration."""
    engines, spec = running(subject), subject.spec.generation.engine
    engines.draw(_request(subject, 0))  # excludes compilation at the first request
    points: list[tuple[float, float]] = []
    for number in sorted({min(batch, spec.sequence_limit) for batch in BATCHES}):
        began_s = time.perf_counter()
        lengths = [len(tokens) for tokens in engines.draw(*(_request(subject, index) for index in range(number)))]
        elapsed_s = time.perf_counter() - began_s
        points.append((sum(lengths) / max(lengths), elapsed_s / max(lengths)))
    long = min(subject.asked.sequence_tokens - 1, spec.batch_tokens)
    began_s = time.perf_counter()
    engines.draw(_request(subject, 1001, most=1, prompt=long))
    prefill_s = max(time.perf_counter() - began_s - points[0][1], 0.0)
    sequences, iteration_s = points[-1]
    subject.results["iterations"] = points
    subject.results["prefill_token_s"] = prefill_s / long
    return {
        "iteration_s": {f"{count:.0f}": seconds for count, seconds in points},
        "tokens_per_s": sequences / iteration_s,
        "prefill_tokens_per_s": long / max(prefill_s, 1e-9),
    }


@check(
    "moved sample",
    "set generation.batch_invariant: true on GPUs, and report it with this file",
    needs=("probe",),
)
def moved(subject: Subject) -> Measured:
    """Resume samples after some tokens, as on another actor, and compare them with uninterrupted generation."""
    engines = running(subject)
    whole = [_request(subject, number, most=4 * MOVED_AFTER) for number in range(MOVED)]
    expected = engines.draw(*whole)
    long = [pair for pair in zip(whole, expected, strict=True) if len(pair[1]) > MOVED_AFTER]
    if not long:
        raise NotHere("every sample ended before it could be moved")
    rest = [
        replace(
            request,
            token_ids=request.token_ids + tokens[:MOVED_AFTER],
            max_tokens=request.max_tokens - MOVED_AFTER,
            drawn_tokens=MOVED_AFTER,
        )
        for request, tokens in long
    ]
    same = sum(
        tokens[:MOVED_AFTER] + more == tokens for (_, tokens), more in zip(long, engines.draw(*rest), strict=True)
    )
    exact = not subject.gpus or subject.spec.generation.batch_invariant
    measured = {"samples": len(long), "with_the_same_tokens": same, "promised": exact}
    if same < (len(long) if exact else 1):
        raise Wrong(f"{len(long) - same} of {len(long)} moved samples have other tokens", **measured)
    return measured


@check(
    "restart", "look for processes that hold the device (`nvidia-smi`), and report it with this file", needs=("probe",)
)
def restart(subject: Subject) -> Measured:
    """Kill the engine while the learner trains, then start a new engine and load the weights."""
    engines = running(subject)
    up(subject).ask(rank_work.learn, rank_work.batch(subject))
    began_s = time.monotonic()
    engines.engine.kill()
    with contextlib.suppress(Exception):
        engines.run(engines.engine.stop())  # its processes have ended after this
    gone_s = time.monotonic() - began_s
    engines.start()
    seconds = time.monotonic() - began_s
    metrics = up(subject).answers()[0][0]
    measured = {"gone_s": gone_s, "restart_s": seconds, **loaded(subject, engines)}
    if not math.isfinite(metrics["gradient_norm"]):
        raise Wrong("the learner's gradient was not finite", **measured)
    return measured


@check("learner after engine", "lower generation.engine.gpu_memory_fraction", needs=("restart",))
def other_order(subject: Subject) -> Measured:
    """Start a learner next to a running engine; in a run the learner starts first."""
    engines = running(subject)
    count = len(up(subject).about)
    up(subject).close()
    began_s = time.monotonic()
    subject.ranks = RankProcesses(subject, count)
    measured = {"learner_start_s": time.monotonic() - began_s}
    subject.results["published"] = publish(subject, 2)[0]
    return measured | loaded(subject, engines)


@check(
    "engine over two GPUs",
    "see the trace; try NCCL_P2P_DISABLE=1 to tell NCCL's part",
    needs=("learner after engine",),
    gpus=2,
)
def two_devices(subject: Subject) -> Measured:
    """Replace the running engine with an engine over two GPUs."""
    running(subject).close()
    subject.engines = None
    both = Engines(subject, tensor_parallel=2)
    try:
        seconds = {f"{name}_s": value for name, value in both.engine.start_seconds.items()}
        return seconds | {"graphs": not is_eager(both.engine.settings)} | loaded(subject, both)
    finally:
        both.close()
