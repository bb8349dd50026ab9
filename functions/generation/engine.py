"""An engine as the runtime sees it: its requests, its answers, and the promises that an implementation keeps.

An implementation is one folder beside `vllm/`, or a class of the user's own that the spec names
(`generation.engine.type`). tests/functions/generation/vllm/test_engine_real.py has the contract as tests; vLLM and a
plain loop over transformers pass them.
Nothing of an engine is imported here, so importing this costs callers neither its time nor its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from rlhfless.records import FinishReason, PublishedWeights, SleepTier, Slept, VersionSpan, WeightVersion
from rlhfless.spec import DType, EngineSpec, RunSpec, SpeculationSpec, TimeoutsSpec, Transport
from rlhfless.spec.fleet import KvConnector
from rlhfless.spec.generation import Quantization
from rlhfless.spec.imports import load_target
from rlhfless.weights.address import StoreAddress

BUILT_IN: Mapping[str, str] = {"vllm": "rlhfless.functions.generation.vllm.adapter:VllmEngine"}
"""Import paths of the engines that come with the package, by `generation.engine.type`."""

Device = Literal["cpu", "cuda"]


class EngineError(Exception):
    """The engine could not do what the caller asked for."""


class EngineBusy(EngineError):
    """The call needs an engine without unfinished requests."""


class EngineAsleep(EngineError):
    """The call needs memory that the engine has given up, or weights that it has dropped."""


class EngineDead(EngineError):
    """The engine's process ended, or its state is unknown after a failed load. Start a new one."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine."""

    model: str
    """Folder or hub name."""
    tokenizer: str
    dtype: DType
    max_model_len: int | None
    """Longest prompt + response in tokens; None means the model's own limit."""
    seed: int
    trust_remote_code: bool
    device: Device
    store: StoreAddress
    engine: EngineSpec
    timeouts: TimeoutsSpec
    kv_bytes: int | None = None
    """KV cache on each GPU. None: the engine measures what is free, which is right only where it is alone."""
    batch_invariant: bool = False
    """See GenerationSpec."""
    quantization: Quantization = "off"
    """See GenerationSpec."""
    speculation: SpeculationSpec = field(default_factory=SpeculationSpec)
    kv_connector: KvConnector | None = None
    """How KV of prompts moves between engines; None without prefill actors."""
    sleeps: bool = False
    """It will be asked to sleep, which vLLM wants to know when it takes its memory on a GPU."""

    @classmethod
    def of(
        cls, run: RunSpec, device: Device, store: StoreAddress, max_model_len: int, kv_bytes: int | None = None
    ) -> EngineSettings:
        """The settings that a run asks for; engines take seeds of 32 bits."""
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
            sleeps=run.placement.in_turns,
        )

    @property
    def is_local(self) -> bool:
        """All that it reads is in folders: the engine must not ask the hub."""
        return all(Path(path).is_dir() for path in (self.model, self.tokenizer, self.speculation.model or self.model))


KvTransfer = Mapping[str, Any]
"""What engines say to each other of KV that moves. Opaque, but for OFFER: an engine's answer to it is given to another
engine of its kind."""

OFFER: KvTransfer = {"do_remote_decode": True, "do_remote_prefill": False}
"""As vLLM's connectors write it; an engine without a way to move KV ignores it."""


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
    """How many tokens at the end of `token_ids` an engine has already drawn with this seed: sampling continues
    there."""
    earlier: tuple[tuple[int, ...], ...] = ()
    """Other responses to the prompt, the newest last, which this one may repeat: drafts of an engine that speculates.
    What is drawn does not depend on them. Requests of the same prompt that run at the same time need them once."""
    kv_transfer: KvTransfer | None = None
    """OFFER: the KV of `token_ids` is kept for other engines. An offer of another engine: its KV is taken from
    there."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A response, or the part of it that was drawn before an abort."""

    request_id: str
    token_ids: tuple[int, ...]
    """[response]; without what was drawn before this request."""
    logprobs: tuple[float, ...]  # [response]: of the sampled tokens, at the sampling temperature
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    text: str
    """The text of the whole response, with what was drawn before: its decoded tokens with special tokens and the stop
    text, without the end and padding tokens at its end (see response_text.py)."""
    kv_offer: KvTransfer | None = None
    """With this other engines get the KV of the prompt, if the request was OFFER."""
    drafted: tuple[int, ...] = ()
    """[depth]: how often a draft was verified, by its place in the pass; empty without speculation. An aborted
    response has none."""
    accepted: tuple[int, ...] = ()
    """[depth]: how often it was accepted."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    """See Invocation: of all responses since one has ended, with the first that ends."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A completed load, as counted from what the model consumed."""

    digest: str
    tensors: int
    read_back: int
    """Tensors that were read back from the engine's layers, and equal to the learner's."""
    size_bytes: int
    seconds: float
    transport: Transport | None = None
    """How the tensors came; None if the engine does not say."""


EnginePart = Literal["weights", "kv_cache"]
"""What an engine holds on its device; by vLLM's names."""

ENGINE_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


@dataclass(slots=True)
class Rest:
    """The parts that an engine lacks because it sleeps, or has slept."""

    tier: SleepTier | None = None
    """None while all of its memory is there."""
    parts: set[EnginePart] = field(default_factory=set)
    """Those that are asleep. Weights in HOST are so, too: on a GPU they are not on the device."""
    empty: bool = False
    """The weights were dropped, and no version has been loaded since."""

    def slept(self, tier: SleepTier) -> None:
        """All parts are asleep now."""
        self.tier, self.parts = tier, set(ENGINE_PARTS)
        self.empty = self.empty or tier is SleepTier.DROPPED

    def woke(self, parts: Iterable[EnginePart]) -> None:
        """These parts have memory again."""
        self.parts -= set(parts)
        self.tier = self.tier if self.parts else None

    def require_weights(self, purpose: str) -> None:
        """Raises EngineAsleep without memory for weights."""
        if "weights" in self.parts:
            raise EngineAsleep(f"cannot {purpose}: the engine sleeps ({self.tier}); wake its weights first")

    def require_awake(self, purpose: str) -> None:
        """Raises EngineAsleep while a part is asleep, or weights are missing."""
        if self.parts:
            raise EngineAsleep(f"cannot {purpose}: the engine sleeps ({self.tier}); wake it first")
        if self.empty:
            raise EngineAsleep(f"cannot {purpose}: the engine has dropped its weights; load a version first")


class Engine(Protocol):
    """A running engine, made by `await SomeEngine.start(settings)`.

    The same seed gives the same tokens whatever is drawn beside them or drafted for them, and a response that is
    continued (`SampleRequest.drawn_tokens`) is the one that would have been drawn in one go. Every wait is bounded by
    `settings.timeouts`. After a failed load, a lost process or a call that timed out `usable` is False for ever, and
    every call raises EngineDead. Calls that need what a sleeping engine has given up raise EngineAsleep.
    """

    settings: EngineSettings
    log: Path
    """What the engine prints."""
    loaded: WeightVersion | None
    """The version that serves; None while it is still the model folder's."""
    start_seconds: dict[str, float]
    """The seconds of each phase of the start, by StartPhase, as far as the engine has and reports it."""
    kv_capacity_tokens: int
    """Tokens that the KV cache holds; 0 if the engine does not say."""
    block_tokens: int
    """Tokens of a block of the KV cache: a prefix is shared by whole blocks."""
    rest: Rest

    @classmethod
    async def start(cls, settings: EngineSettings, log_file: Path | None = None) -> Self:
        """Start it and wait until it can serve. What it prints is appended to `log_file`; without one it is kept while
        the engine lives. Raises EngineTimeout, EngineDead."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """The engine's own processes."""
        ...

    @property
    def usable(self) -> bool:
        """The engine can serve."""
        ...

    async def sample(self, request: SampleRequest) -> Sampled:
        """Draw one response. If the caller is cancelled, so is the request.

        Raises:
            ValueError: a request of this id is in flight.
            EngineError: the engine refuses the request, for example because the prompt is too long.
            EngineTimeout: it took longer than `timeouts.generate_s`.
            EngineDead: the engine is lost.
        """
        ...

    def progress(self) -> Mapping[str, int]:
        """Tokens generated so far of each unfinished request; up to a fraction of a second, or some iterations, old."""
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End the given requests, or all. Their `sample` calls return what was drawn, with reason ABORT. Ids that are
        not in flight are ignored: they have just finished."""
        ...

    async def load(self, published: PublishedWeights, *, in_flight: bool = False) -> LoadReport | None:
        """Load a version and drop the prefix cache. Returns None if the version is loaded already. The digest and the
        number of the tensors that the model consumed are checked (`weights.check.check_consumed`).

        With `in_flight`, which it is asked only if its class says `loads_in_flight = True`, unfinished requests keep
        their tokens, and go on with the new weights: from the next token on as if these had read all tokens before it.

        Raises:
            EngineBusy: requests are unfinished, and the load is not in flight; abort them first. Nothing was changed.
            WeightCheckFailed, WeightFileError: the load failed, and the engine is unusable from now on.
            EngineTimeout: it took longer than `timeouts.sync_s`; unusable as well.
        """
        ...

    async def sleep(self, tier: SleepTier) -> Slept:
        """Give up the device's memory; the processes stay. An engine that sleeps already stays in its tier. After
        DROPPED `loaded` is None.

        Raises:
            EngineBusy: requests are unfinished; abort them first. Nothing was changed.
            EngineTimeout: it took longer than `timeouts.sync_s`; unusable from now on, as after any other failure.
        """
        ...

    async def wake(self, *parts: EnginePart) -> None:
        """Get the memory of these parts back, by default of all; those that are awake already are left alone. Weights
        that were dropped have memory then, and no values: wake them, load, and wake the KV cache, whose memory may
        have been needed for the load. An engine that fails to wake is unusable from now on, because its device may be
        full."""
        ...

    async def logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprob of each of `token_ids` [tokens] except the first, given the tokens before it, at temperature 1:
        [tokens - 1]. Raises EngineBusy if it has unfinished requests and cannot do this beside them."""
        ...

    def require_heartbeat(self, limit_s: float) -> None:
        """Raises EngineDead if the engine has work and has given no sign of life for `limit_s`: it hangs."""
        ...

    def kill(self) -> None:
        """End an engine that cannot be talked to any more, with all its processes. Idempotent."""
        ...

    async def stop(self) -> None:
        """End it within `timeouts.drain_s`. Unfinished requests raise EngineDead."""
        ...


def engine_class(settings: EngineSettings) -> type[Engine]:
    """The implementation that the settings name. Raises TargetError."""
    name = settings.engine.type
    engine: type[Engine] = load_target(BUILT_IN.get(name, name))
    return engine
