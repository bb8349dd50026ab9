"""The engine interface: its requests, its answers, and the guarantees that an implementation gives.

An implementation is a folder next to `vllm/`, or a user-defined class that the spec names
(`generation.engine.type`). tests/functions/generation/vllm/test_engine_real.py contains the contract as tests; vLLM
and a plain loop over transformers pass them.

This module imports no engine, so importing it is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

from rlhfless.functions.generation.messages import KvTransfer
from rlhfless.records import FinishReason, PublishedWeights, RouteSpan, SleepTier, Slept, VersionSpan, WeightVersion
from rlhfless.scaling.fleets import shared_rank
from rlhfless.scaling.memory import stored_versions
from rlhfless.spec import DType, EngineSpec, RunSpec, SpeculationSpec, TimeoutsSpec, Transport
from rlhfless.spec.fleet import KvConnector
from rlhfless.spec.generation import Quantization
from rlhfless.spec.imports import load_target
from rlhfless.weights.address import StoreAddress

BUILT_IN: Mapping[str, str] = {"vllm": "rlhfless.functions.generation.vllm.adapter:VllmEngine"}
"""Import paths of the built-in engines, by `generation.engine.type`."""

Device = Literal["cpu", "cuda"]


class EngineError(Exception):
    """The engine cannot do the requested work."""


class EngineBusy(EngineError):
    """The call needs an engine without unfinished requests."""


class EngineAsleep(EngineError):
    """The call needs memory that the engine has released, or weights that it has dropped."""


class EngineDead(EngineError):
    """The engine's process exited, or its state is unknown after a failed load. Start a new engine."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapters of an engine whose versions are adapters (LoRA) on base weights that it reads from `model`."""

    rank: int
    slots: int
    """Versions that can be in use at the same time."""
    targets: tuple[str, ...]
    """Patterns of the names of the linear layers with an adapter."""
    runs: int = 1
    """Most runs whose versions it has; each may use an equal part of the slots."""

    @property
    def per_run(self) -> int:
        return self.slots // self.runs

    @classmethod
    def of(cls, run: RunSpec) -> AdapterSlots | None:
        """Return the slots of a run; None if its versions have all weights.

        While a sample of a step is in progress, the newest version is of the step before, and the sample's is at most
        `steps_ahead` older. So slots for the versions in the learner's store are enough. An engine that several runs
        share has so many for each.
        """
        if not run.publishes_adapters or run.model.lora is None:
            return None
        rank, versions, patterns = run.model.lora.rank, stored_versions(run), run.model.lora.patterns
        if run.placement.share is None:
            return cls(rank, versions, patterns)
        runs = run.placement.tenants
        return cls(shared_rank(rank), versions * runs, patterns, runs)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model: str
    """Folder or hub name."""
    tokenizer: str
    dtype: DType
    max_model_len: int | None
    """Longest prompt + response in tokens; None for the model's own limit."""
    seed: int
    trust_remote_code: bool
    device: Device
    store: StoreAddress
    engine: EngineSpec
    timeouts: TimeoutsSpec
    kv_bytes: int | None = None
    """KV cache on each GPU, in bytes. None: the engine measures free memory, which is right only if it is alone
    there."""
    batch_invariant: bool = False
    """See GenerationSpec."""
    quantization: Quantization = "off"
    """See GenerationSpec."""
    speculation: SpeculationSpec = field(default_factory=SpeculationSpec)
    kv_connector: KvConnector | None = None
    """How KV of prompts moves between engines; None without prefill actors."""
    sleeps: bool = False
    """The engine will be asked to sleep; vLLM must know this when it allocates GPU memory."""
    adapters: AdapterSlots | None = None
    """Its versions are adapters; None: all weights."""
    routes_folder: str = ""
    """Folder for files of routes (rlhfless.records.routes); empty: the engine records none."""

    @classmethod
    def of(
        cls,
        run: RunSpec,
        device: Device,
        store: StoreAddress,
        max_model_len: int,
        kv_bytes: int | None = None,
        routes_folder: str = "",
    ) -> EngineSettings:
        """Build the engine settings of a run; the seed is reduced to 31 bits because engines take 32-bit seeds."""
        return cls(
            model=run.model.path,
            tokenizer=run.model.tokenizer or run.model.path,
            dtype=run.model.dtype,
            max_model_len=max_model_len,
            seed=run.seed % 2**31,
            trust_remote_code=run.model.trust_remote_code,
            device=device,
            store=store,
            engine=run.generation.engine,
            timeouts=run.timeouts,
            kv_bytes=kv_bytes,
            batch_invariant=run.generation.batch_invariant,
            quantization=run.generation.quantization,
            speculation=run.generation.speculation,
            kv_connector=run.scaling.prefill.connector,
            sleeps=run.placement.engines_in_turns,
            adapters=AdapterSlots.of(run),
            routes_folder=routes_folder if run.replays_engine_routes else "",
        )

    @property
    def is_local(self) -> bool:
        """Whether everything it reads is in local folders, so that the engine must not contact the hub."""
        return all(Path(path).is_dir() for path in (self.model, self.tokenizer, self.speculation.model or self.model))


OFFER: KvTransfer = {"do_remote_decode": True, "do_remote_prefill": False}
"""Asks an engine for its part of a transfer, in the format of vLLM's connectors. An engine that cannot move KV ignores
it."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to one prompt (n = 1)."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: tuple[int, ...]  # [prompt]
    seed: int | None
    max_tokens: int
    temperature: float
    """0 for greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the tokenizer's end-of-sequence token."""
    cache_salt: str | None = None
    """Only requests with the same salt share KV blocks."""
    drawn_tokens: int = 0
    """Number of tokens at the end of `token_ids` already generated with this seed: sampling resumes after them."""
    earlier: tuple[tuple[int, ...], ...] = ()
    """Other responses to the prompt, newest last, as drafts for a speculating engine; they do not affect the output.
    Concurrent requests for the same prompt need them only once."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at the first position (`Sampled.first`)."""
    routes: str = ""
    """File for the routes of the generated tokens, in EngineSettings.routes_folder; empty: record none."""
    run_id: str = ""
    """The run whose newest adapter generates it, in an engine that several runs share."""
    kv_transfer: KvTransfer | None = None
    """OFFER: keep the KV of `token_ids` for other engines. An offer of another engine: fetch the KV from there."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A response, or the part of it generated before an abort."""

    request_id: str
    token_ids: tuple[int, ...]
    """[response]; without the tokens generated before this request."""
    logprobs: tuple[float, ...]  # [response]: of the sampled tokens, at the sampling temperature
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    text: str
    """Text of the whole response, including previously generated tokens: the decoded tokens with special tokens and
    the stop text, without trailing end and padding tokens (see response_text.py)."""
    kv_offer: KvTransfer | None = None
    """Parameters with which other engines fetch the prompt's KV, if the request was OFFER."""
    drafted: tuple[int, ...] = ()
    """[depth]: number of verified drafts, by their position in the pass; empty without speculation or after an
    abort."""
    accepted: tuple[int, ...] = ()
    """[depth]: number of accepted drafts."""
    routes: tuple[RouteSpan, ...] = ()
    """Where the routes of the response's tokens are, if the request asks for them. The last token has none."""
    first: tuple[tuple[str, float], ...] = ()
    """The most likely first tokens and their logprobs, if the request asks for `top_logprobs`."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    """See Invocation: time of all responses since the last one finished, reported with the first that finishes."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A completed load, as counted from the tensors that the model consumed."""

    digest: str
    tensors: int
    read_back: int
    """Tensors read back from the engine's layers and equal to the learner's."""
    size_bytes: int
    seconds: float
    transport: Transport | None = None
    """How the tensors arrived; None if the engine does not report it."""


EnginePart = Literal["weights", "kv_cache"]
"""The parts of an engine on its device, by vLLM's names."""

ENGINE_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


@dataclass(slots=True)
class Rest:
    """The parts that an engine lacks because it sleeps or has slept."""

    tier: SleepTier | None = None
    """None while all parts are awake."""
    parts: set[EnginePart] = field(default_factory=set)
    """The sleeping parts. Weights in HOST count as asleep: on a GPU they are not on the device."""
    empty: bool = False
    """The weights were dropped, and no version has been loaded since."""

    def slept(self, tier: SleepTier) -> None:
        """Record that all parts sleep."""
        self.tier, self.parts = tier, set(ENGINE_PARTS)
        self.empty = self.empty or tier is SleepTier.DROPPED

    def woke(self, parts: Iterable[EnginePart]) -> None:
        """Record that these parts have memory again."""
        self.parts -= set(parts)
        self.tier = self.tier if self.parts else None

    def require_weights(self, purpose: str) -> None:
        """Raise EngineAsleep if the weights have no memory."""
        if "weights" in self.parts:
            raise EngineAsleep(f"cannot {purpose}: the engine sleeps ({self.tier}); wake its weights first")

    def require_awake(self, purpose: str) -> None:
        """Raise EngineAsleep while a part sleeps or weights are missing."""
        if self.parts:
            raise EngineAsleep(f"cannot {purpose}: the engine sleeps ({self.tier}); wake it first")
        if self.empty:
            raise EngineAsleep(f"cannot {purpose}: the engine has dropped its weights; load a version first")


class RunEngine(Protocol):
    """An engine as a run uses it.

    The same seed generates the same tokens regardless of concurrent requests and drafts, and a continued response
    (`SampleRequest.drawn_tokens`) equals the uninterrupted one. Every wait is bounded by `settings.timeouts`. After
    a failed load, a lost process or a timed-out call, `usable` stays False and every call raises EngineDead. Calls
    that need released memory or dropped weights of a sleeping engine raise EngineAsleep.
    """

    block_tokens: int
    """Tokens per KV cache block: prefixes are shared in whole blocks."""
    rest: Rest

    async def sample(self, request: SampleRequest) -> Sampled:
        """Generate one response. Cancelling the caller cancels the request.

        Raises:
            ValueError: a request with this ID is in flight.
            EngineError: the engine refuses the request, for example because the prompt is too long.
            EngineTimeout: it took longer than `timeouts.generate_s`.
            EngineDead: the engine is lost.
        """
        ...

    def progress(self) -> Mapping[str, int]:
        """Return the generated tokens of each unfinished request; may lag by a fraction of a second."""
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End the given requests, or all. Their `sample` calls return their tokens so far, with reason ABORT.

        IDs that are not in flight are ignored: those requests just finished.
        """
        ...

    async def load(self, published: PublishedWeights, *, in_flight: bool = False) -> LoadReport | None:
        """Load a version and drop the prefix cache; returns None if the version is already loaded.

        The digest and number of the consumed tensors are checked (`weights.check.check_consumed`). With `in_flight`,
        used only if the class sets `loads_in_flight = True`, unfinished requests keep their tokens and resume with
        the new weights, as if these had processed all earlier tokens. If versions are adapters, they continue
        undisturbed with the version that they began with.

        Raises:
            EngineBusy: requests are unfinished, and the load is not in flight; abort them first. Nothing was changed.
            WeightCheckFailed, WeightFileError: the load failed, and the engine is now unusable.
            EngineTimeout: it took longer than `timeouts.sync_s`; the engine is now unusable.
        """
        ...

    async def sleep(self, tier: SleepTier) -> Slept:
        """Release the device's memory; processes stay, and a sleeping engine keeps its tier.

        After DROPPED, `loaded` is None.

        Raises:
            EngineBusy: requests are unfinished; abort them first. Nothing was changed.
            EngineTimeout: it took longer than `timeouts.sync_s`; the engine is now unusable, as after other failures.
        """
        ...

    async def wake(self, *parts: EnginePart) -> None:
        """Restore the memory of these parts, by default all; awake parts are left alone.

        Dropped weights get memory but no values: wake them, load, then wake the KV cache, whose memory the load may
        need. An engine that fails to wake is unusable, because its device may be full.
        """
        ...

    async def logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return the logprob of each of `token_ids` [tokens] except the first, at temperature 1: [tokens - 1].

        Raises EngineBusy if the engine has unfinished requests and cannot run this concurrently.
        """
        ...

    def require_heartbeat(self, limit_s: float) -> None:
        """Raise EngineDead if the engine has work but was silent for `limit_s`, that is, hangs."""
        ...


class Engine(RunEngine, Protocol):
    """A running engine, created by `await SomeEngine.start(settings)`."""

    settings: EngineSettings
    log: Path
    """The engine's output."""
    loaded: WeightVersion | None
    """The version being served; None while it is still the model folder's."""
    start_seconds: dict[str, float]
    """Seconds of each start phase (StartPhase) that the engine has and reports."""
    kv_capacity_tokens: int
    """Capacity of the KV cache in tokens; 0 if the engine does not report it."""

    @classmethod
    async def start(cls, settings: EngineSettings, log_file: Path | None = None) -> Self:
        """Start the engine and wait until it can serve. Raises EngineTimeout, EngineDead.

        Output is appended to `log_file`; without one, it is kept while the engine lives.
        """
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine's own processes."""
        ...

    @property
    def usable(self) -> bool:
        """Whether the engine can serve."""
        ...

    def kill(self) -> None:
        """End an unresponsive engine and all its processes. Idempotent."""
        ...

    async def stop(self) -> None:
        """End the engine within `timeouts.drain_s`. Unfinished requests raise EngineDead."""
        ...


class SharedEngine(Engine, Protocol):
    """An engine with adapters of several runs. A run's failed load leaves it usable, and the others' adapters alone."""

    shares: Mapping[str, float]
    """Seconds of the engine's iterations so far, by run. They add up to the time in which it worked."""

    async def load(
        self, published: PublishedWeights, *, in_flight: bool = False, store: StoreAddress | None = None
    ) -> LoadReport | None:
        """Load a run's adapter from the run's store; see Engine.load. Only that run's requests must have ended."""
        ...

    async def logprobs(self, token_ids: tuple[int, ...], run_id: str = "") -> tuple[float, ...]:
        """See Engine.logprobs; with the newest adapter of a run."""
        ...

    async def leave(self, run_id: str) -> None:
        """Drop a run's adapters, once their requests have ended."""
        ...


def engine_class(settings: EngineSettings) -> type[Engine]:
    """Return the implementation that the settings name. Raises TargetError."""
    name = settings.engine.type
    engine: type[Engine] = load_target(BUILT_IN.get(name, name))
    return engine
