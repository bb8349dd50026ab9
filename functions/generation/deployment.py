"""The generation function: one vLLM engine behind one Ray Serve application.

There is no traffic without a completed weight load: `generate` is refused unless the engine serves the requested
version, and a load completes only when its checks pass (rlhfless.weights.check). Finished groups are streamed, with
progress heartbeats in between; individual tokens never cross a process boundary.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from uuid import uuid4

from rlhfless.functions.base import CallResult, admitted
from rlhfless.functions.calls import Call, CallUsage, Reply
from rlhfless.functions.generation.engine import (
    OFFER,
    EngineSettings,
    LoadReport,
    Sampled,
    SampleRequest,
)
from rlhfless.functions.generation.engine_function import EngineFunction, EngineFunctionSettings
from rlhfless.functions.generation.episodes import EpisodeRollouter, EpisodeSettings
from rlhfless.functions.generation.messages import (
    GenerateRequest,
    GenerationEvent,
    KvTransfer,
    Loaded,
    PrecomputeRequest,
    SampleKey,
)
from rlhfless.functions.generation.sampling import RequestRun
from rlhfless.functions.launching import Launch, binding, is_shared
from rlhfless.prefixes.evicted import CachedBlocks
from rlhfless.records import PublishedWeights, SleepTier, Slept, WeightVersion
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec.imports import import_paths
from rlhfless.util.tasks import gather_or_cancel
from rlhfless.weights.check import WeightCheckFailed, check_probe, default_tolerance

log = logging.getLogger(__name__)

OF_ROUNDING = 3.0
"""Multiple of the probe tolerance that rounding alone can reach: massive activations and reordered experts were seen
to use up the tolerance itself. Wrong settings, such as another temperature or rotary base, move the probe's logprobs
by nats, which exceeds it in every dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings(EngineFunctionSettings):
    probe_tolerance: float
    """Largest difference between engine and learner in the logprob of a probe token."""
    episodes: EpisodeSettings | None = None
    """None in a run without an environment."""


class WrongVersion(RuntimeError):
    """A request asked for weights that the engine does not serve."""


class GenerationFunction(EngineFunction):
    """A generation actor."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> GenerationSettings:
        """Return the settings of a replica for an allocation with bound devices."""
        spec, device = launch.spec, allocation.devices[0].kind
        layers = None if launch.shape is None else launch.shape.layers
        on = binding(allocation.devices, exclusive=True, shared=is_shared(allocation))
        return GenerationSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            engine=EngineSettings.of(
                spec, on.kind, launch.store, launch.max_model_len, launch.kv_bytes(device), launch.routes_folder
            ),
            probe_tolerance=spec.weights.probe_tolerance
            or default_tolerance(spec.model.dtype, layers, spec.generation.quantization),
            binding=on,
            run_folder=str(launch.run_folder.absolute()),
            planned=launch.planned(kind, allocation),
            import_paths=import_paths(),
            episodes=EpisodeSettings.of(spec),
        )

    async def __init__(self, settings: GenerationSettings) -> None:  # type: ignore[misc]
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors
        if self._unfit is not None:
            return
        self._settings: GenerationSettings = settings
        self._loaded: PublishedWeights | None = None
        self._loading = asyncio.Lock()
        self._runs: dict[RequestRun, int] = {}
        """Running requests, each with the attempt that asked."""
        self._cached = CachedBlocks(self._engine.block_tokens)
        episodes = settings.episodes
        self._rollouter = None if episodes is None else EpisodeRollouter(episodes, episodes.chat_format())

    @admitted
    async def load(self, call: Call, published: PublishedWeights, *, in_flight: bool = False) -> CallResult[Loaded]:
        """Load and check a version; does nothing if it is already loaded.

        With `in_flight`, its samples resume with the new weights (see Engine.load), even while the probe runs: if
        the probe fails, the run stops and learns from none of them. Raises StoreNotShared, and WeightCheckFailed, after
        which the replica serves nothing until a load passes.
        """
        report = None
        async with self._loading:
            await self._end_earlier(call)
            if self._loaded is None or self._loaded.version != published.version:
                self._loaded = None
                self._settings.engine.store.require_shared()
                with self.engine_faults("a load"):
                    # Wake the weights before KV: a load may need memory that KV uses.
                    await self._engine.wake("weights")
                    report = await self._load_and_check(published, in_flight)
                self._loaded = published
            elif self._engine.rest.tier is not None:
                with self.engine_faults("waking up"):
                    await self._wake_and_check()
        usage = CallUsage(size_bytes=published.size_bytes, version=published.version.label)
        transport, read_back = (None, published.tensors) if report is None else (report.transport, report.read_back)
        return CallResult(Loaded(published.version.label, transport, read_back), usage)

    async def _end_earlier(self, call: Call) -> None:
        """Drop the samples of earlier attempts.

        A killed driver's stream ends only at its next yield, and the resuming driver may arrive before that.
        """
        for run, attempt in list(self._runs.items()):
            if attempt < call.attempt:
                await run.cancel()

    async def _load_and_check(self, published: PublishedWeights, in_flight: bool) -> LoadReport | None:
        self._cached.clear()
        engine, tokens = self._engine, published.probe.token_ids
        if engine.rest.parts or engine.rest.empty:
            report = await engine.load(published)  # checks what the model consumed
            await engine.wake()
            logprobs = await engine.logprobs(tokens)
        else:  # the engine handles the two messages in the order they are sent
            load = engine.load(published, in_flight=True) if in_flight else engine.load(published)
            report, logprobs = await asyncio.gather(load, engine.logprobs(tokens))
        with _read_back_decides(report, published, logprobs, self._settings.probe_tolerance):
            check_probe(published.version, published.probe, logprobs, self._settings.probe_tolerance)
        return report

    async def generate(self, call: Call, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """Generate the samples of a request; yields finished groups, progress heartbeats, and the end.

        Raises WrongVersion, or TimeoutError after `request.timeout_s`.
        """
        self.admit(call)
        await self._require_version(request)
        routes = bool(self._settings.engine.routes_folder)
        run = RequestRun(self._engine, request, call, self.incarnation, self._cached, self._rollouter, routes=routes)
        self._runs[run] = call.attempt
        try:
            with self.engine_faults("generation"):
                async for event in run.events():
                    yield event
        finally:
            del self._runs[run]
            await run.cancel()

    async def precompute(self, call: Call, request: PrecomputeRequest) -> Reply[tuple[KvTransfer | None, ...]]:
        """Put the KV of prefixes into the engine's cache, in order, and return their offers if requested.

        Raises WrongVersion.
        """
        self.admit(call)
        await self._require_version(request)
        start_s = time.time()
        with self.engine_faults("a precomputation"):
            expected = [self._cached.add(prefix) for prefix in request.prefixes]
            offers = request.offers or (None,) * len(request.prefixes)
            transfers = [OFFER if request.offer else offer for offer in offers]
            # Concurrently: an engine admits requests in order, so a prefix hits the prefixes that it starts with.
            done = await gather_or_cancel(
                *(
                    self._prefill(prefix, request.version, transfer)
                    for prefix, transfer in zip(request.prefixes, transfers, strict=True)
                )
            )
        cached = [sampled.cached_tokens for sampled in done]
        usage = CallUsage(
            input_tokens=sum(map(len, request.prefixes)),
            cached_tokens=sum(cached),
            evicted_tokens=sum(max(before - after, 0) for before, after in zip(expected, cached, strict=True)),
            sequences=len(request.prefixes),
            version=request.version,
        )
        return self.reply(tuple(sampled.kv_offer for sampled in done), start_s, usage)

    async def _prefill(self, prefix: tuple[int, ...], version: str, kv_transfer: KvTransfer | None) -> Sampled:
        """Prefill by generating a single token, which is dropped."""
        name = f"{self.incarnation}-prefix-{uuid4().hex}"
        prefill = SampleRequest(name, prefix, seed=None, max_tokens=1, temperature=0.0, cache_salt=version)
        return await self._engine.sample(replace(prefill, kv_transfer=kv_transfer))

    async def _require_version(self, request: GenerateRequest | PrecomputeRequest) -> None:
        """Raise WrongVersion unless the engine serves the version; with `or_newer`, first wait for a running load."""
        if request.or_newer:
            async with self._loading:
                pass
        serving = None if self._loaded is None else self._loaded.version
        asked = WeightVersion.parse(request.version)
        if serving != asked and not (request.or_newer and serving is not None and serving.step > asked.step):
            label = None if serving is None else serving.label
            raise WrongVersion(f"{request.actor} was asked for {request.version} and serves {label}")

    @admitted
    async def abort(self, _: Call, keys: Sequence[SampleKey] | None = None) -> CallResult[int]:
        """Stop the samples of `keys`, or all if None; their streams yield the tokens so far. Idempotent."""
        with self.engine_faults("an abort"):
            aborted = sum([await run.abort(keys) for run in list(self._runs)])
        return CallResult(aborted)

    @admitted
    async def sleep(self, call: Call, tier: SleepTier) -> CallResult[Slept]:
        """Put the drained engine to sleep; see Engine.sleep. Raises EngineBusy."""
        async with self._loading:
            await self._end_earlier(call)
            with self.engine_faults("falling asleep"):
                slept = await self._engine.sleep(tier)
            self._cached.clear()
            if self._engine.rest.empty:
                self._loaded = None
        return CallResult(slept)

    @admitted
    async def wake(self, _: Call) -> CallResult[None]:
        """Wake the engine and probe retained weights. Raises WeightCheckFailed if they changed.

        After DROPPED the actor serves nothing until a load, which wakes it implicitly.
        """
        async with self._loading:
            if self._engine.rest.tier is not None:
                with self.engine_faults("waking up"):
                    await self._wake_and_check()
        return CallResult(None)

    async def _wake_and_check(self) -> None:
        """Wake the engine and probe the retained weights."""
        await self._engine.wake()
        if self._loaded is not None:
            version, probe = self._loaded.version, self._loaded.probe
            logprobs = await self._engine.logprobs(probe.token_ids)
            check_probe(version, probe, logprobs, OF_ROUNDING * self._settings.probe_tolerance)

    def clean_up(self) -> None:
        """Delete the node's weight cache, which outlives processes.

        The run's other actors on this node are abandoned too.
        """
        if self._settings.engine.store.token:
            shutil.rmtree(self._settings.engine.store.folder, ignore_errors=True)


@contextmanager
def _read_back_decides(
    report: LoadReport | None, published: PublishedWeights, logprobs: Sequence[float], tolerance: float
) -> Iterator[None]:
    """Downgrade a failed probe to a warning if the weights were read back and are right.

    This requires that every tensor was read back and that the probe is within OF_ROUNDING times the tolerance: the
    rounding of this model's kernels is then large. Raises WeightCheckFailed for larger differences, which indicate
    another computation, such as mismatched settings, and whenever some tensor was not read back.
    """
    try:
        yield
    except WeightCheckFailed as error:
        if error.check != "probe" or report is None or report.read_back < published.tensors:
            raise
        check_probe(published.version, published.probe, logprobs, OF_ROUNDING * tolerance)
        log.warning("%s. Every tensor was read back and is the learner's, so the engine serves", error)
