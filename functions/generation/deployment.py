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
from rlhfless.functions.generation.episodes import EpisodeSettings
from rlhfless.functions.generation.members import Member, RunTerms
from rlhfless.functions.generation.messages import (
    GenerateRequest,
    GenerationEvent,
    KvTransfer,
    Loaded,
    PrecomputeRequest,
    SampleKey,
    StreamEnd,
)
from rlhfless.functions.generation.sampling import RequestRun
from rlhfless.functions.launching import Launch, binding, is_shared
from rlhfless.records import PublishedWeights, SleepTier, Slept, WeightVersion
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec.imports import import_paths
from rlhfless.util.tasks import gather_or_cancel
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightCheckFailed, check_probe, default_tolerance

log = logging.getLogger(__name__)

OF_ROUNDING = 3.0
"""Multiple of the probe tolerance that rounding alone can reach: massive activations and reordered experts were seen
to use up the tolerance itself. Wrong settings, such as another temperature or rotary base, move the probe's logprobs
by nats, which exceeds it in every dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings(EngineFunctionSettings):
    run: RunTerms


def terms_of(launch: Launch) -> RunTerms:
    """Return what a run sets on its actors."""
    spec = launch.spec
    layers = None if launch.shape is None else launch.shape.layers
    usual = default_tolerance(spec.model.dtype, layers, spec.generation.quantization)
    return RunTerms(
        store=launch.store,
        probe_tolerance=spec.weights.probe_tolerance or usual,
        lease=launch.lease,
        episodes=EpisodeSettings.of(spec),
    )


class WrongVersion(RuntimeError):
    """A request asked for weights that the engine does not serve."""


class GenerationFunction(EngineFunction):
    """A generation actor."""

    _routes = False
    """Whether samples record the experts that computed their tokens."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> GenerationSettings:
        """Return the settings of a replica for an allocation with bound devices."""
        spec, device = launch.spec, allocation.devices[0].kind
        on = binding(allocation.devices, exclusive=True, shared=is_shared(allocation))
        return GenerationSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            engine=EngineSettings.of(
                spec, on.kind, launch.store, launch.max_model_len, launch.kv_bytes(device), launch.routes_folder
            ),
            run=terms_of(launch),
            binding=on,
            run_folder=str(launch.run_folder.absolute()),
            planned=launch.planned(kind, allocation),
            import_paths=import_paths(),
        )

    async def __init__(self, settings: GenerationSettings) -> None:  # type: ignore[misc]
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors
        self._store, self._routes = settings.run.store, bool(settings.engine.routes_folder)
        if self._unfit is None:
            self._alone = Member(self._engine, settings.run)

    def _member(self, call: Call) -> Member:  # noqa: ARG002
        """Return the run that calls."""
        return self._alone

    @admitted
    async def load(self, call: Call, published: PublishedWeights, *, in_flight: bool = False) -> CallResult[Loaded]:
        """Load and check a version; does nothing if it is already loaded.

        With `in_flight`, its samples resume with the new weights (see Engine.load), even while the probe runs: if
        the probe fails, the run stops and learns from none of them. Raises StoreNotShared, and WeightCheckFailed, after
        which the replica serves nothing until a load passes.
        """
        report, member = None, self._member(call)
        async with member.loading:
            await member.end_earlier(call.attempt)
            if member.loaded is None or member.loaded.version != published.version:
                member.loaded = None
                member.terms.store.require_shared()
                with self.engine_faults("a load"):
                    # Wake the weights before KV: a load may need memory that KV uses.
                    await member.engine.wake("weights")
                    report = await self._load_and_check(member, published, in_flight)
                member.loaded = published
            elif member.engine.rest.tier is not None:
                with self.engine_faults("waking up"):
                    await self._wake_and_check(member)
        usage = CallUsage(size_bytes=published.size_bytes, version=published.version.label)
        transport, read_back = (None, published.tensors) if report is None else (report.transport, report.read_back)
        return CallResult(Loaded(published.version.label, transport, read_back), usage)

    async def _load_and_check(self, member: Member, published: PublishedWeights, in_flight: bool) -> LoadReport | None:
        member.cached.clear()
        engine, tokens, tolerance = member.engine, published.probe.token_ids, member.terms.probe_tolerance
        if engine.rest.parts or engine.rest.empty:
            report = await engine.load(published)  # checks what the model consumed
            await engine.wake()
            logprobs = await engine.logprobs(tokens)
        else:  # the engine handles the two messages in the order they are sent
            load = engine.load(published, in_flight=True) if in_flight else engine.load(published)
            report, logprobs = await asyncio.gather(load, engine.logprobs(tokens))
        with _read_back_decides(report, published, logprobs, tolerance):
            check_probe(published.version, published.probe, logprobs, tolerance)
        return report

    async def generate(self, call: Call, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """Generate the samples of a request; yields finished groups, progress heartbeats, and the end.

        Raises WrongVersion, or TimeoutError after `request.timeout_s`.
        """
        self.admit(call)
        member = self._member(call)
        await self._require_version(member, request)
        run = RequestRun(
            member.engine, request, call, self.incarnation, member.cached, member.rollouter, routes=self._routes
        )
        member.requests[run] = call.attempt
        try:
            with self.engine_faults("generation"):
                async for event in run.events():
                    if isinstance(event, StreamEnd):
                        event = replace(event, reply=self.metered(event.reply, call))
                    yield event
        finally:
            del member.requests[run]
            await run.cancel()

    async def precompute(self, call: Call, request: PrecomputeRequest) -> Reply[tuple[KvTransfer | None, ...]]:
        """Put the KV of prefixes into the engine's cache, in order, and return their offers if requested.

        Raises WrongVersion.
        """
        self.admit(call)
        member = self._member(call)
        await self._require_version(member, request)
        start_s = time.time()
        with self.engine_faults("a precomputation"):
            expected = [member.cached.add(prefix) for prefix in request.prefixes]
            offers = request.offers or (None,) * len(request.prefixes)
            transfers = [OFFER if request.offer else offer for offer in offers]
            # Concurrently: an engine admits requests in order, so a prefix hits the prefixes that it starts with.
            done = await gather_or_cancel(
                *(
                    self._prefill(member, prefix, request.version, transfer)
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
        return self.metered(self.reply(tuple(sampled.kv_offer for sampled in done), start_s, usage), call)

    async def _prefill(
        self, member: Member, prefix: tuple[int, ...], version: str, kv_transfer: KvTransfer | None
    ) -> Sampled:
        """Prefill by generating a single token, which is dropped."""
        name = f"{self.incarnation}-prefix-{uuid4().hex}"
        prefill = SampleRequest(name, prefix, seed=None, max_tokens=1, temperature=0.0, cache_salt=version)
        return await member.engine.sample(replace(prefill, kv_transfer=kv_transfer))

    async def _require_version(self, member: Member, request: GenerateRequest | PrecomputeRequest) -> None:
        """Raise WrongVersion unless the engine serves the version; with `or_newer`, first wait for a running load."""
        if request.or_newer:
            async with member.loading:
                pass
        serving = None if member.loaded is None else member.loaded.version
        asked = WeightVersion.parse(request.version)
        if serving != asked and not (request.or_newer and serving is not None and serving.step > asked.step):
            label = None if serving is None else serving.label
            raise WrongVersion(f"{request.actor} was asked for {request.version} and serves {label}")

    @admitted
    async def abort(self, call: Call, keys: Sequence[SampleKey] | None = None) -> CallResult[int]:
        """Stop the samples of `keys`, or all if None; their streams yield the tokens so far. Idempotent."""
        with self.engine_faults("an abort"):
            aborted = sum([await run.abort(keys) for run in list(self._member(call).requests)])
        return CallResult(aborted)

    @admitted
    async def sleep(self, call: Call, tier: SleepTier) -> CallResult[Slept]:
        """Put the drained engine to sleep; see Engine.sleep. Raises EngineBusy."""
        member = self._member(call)
        async with member.loading:
            await member.end_earlier(call.attempt)
            with self.engine_faults("falling asleep"):
                slept = await member.engine.sleep(tier)
            member.cached.clear()
            if member.engine.rest.empty:
                member.loaded = None
        return CallResult(slept)

    @admitted
    async def wake(self, call: Call) -> CallResult[None]:
        """Wake the engine and probe retained weights. Raises WeightCheckFailed if they changed.

        After DROPPED the actor serves nothing until a load, which wakes it implicitly.
        """
        member = self._member(call)
        async with member.loading:
            if member.engine.rest.tier is not None:
                with self.engine_faults("waking up"):
                    await self._wake_and_check(member)
        return CallResult(None)

    @staticmethod
    async def _wake_and_check(member: Member) -> None:
        """Wake the engine and probe the retained weights."""
        await member.engine.wake()
        if member.loaded is not None:
            version, probe = member.loaded.version, member.loaded.probe
            logprobs = await member.engine.logprobs(probe.token_ids)
            check_probe(version, probe, logprobs, OF_ROUNDING * member.terms.probe_tolerance)

    def clean_up(self) -> None:
        """Delete the node's weight cache, which outlives processes.

        The run's other actors on this node are abandoned too.
        """
        remove_cache(self._store)


def remove_cache(store: StoreAddress) -> None:
    """Remove a run's weights from this node, if it has a cache of its own."""
    if store.token:
        shutil.rmtree(store.folder, ignore_errors=True)


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
