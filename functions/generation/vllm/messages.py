"""Requests and results of the adapter, and the messages between the adapter and the engine's process.

Plain frozen dataclasses; nothing of vLLM is imported, so importing this costs callers neither the time nor the memory
of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhfless.records import FinishReason, VersionSpan
from rlhfless.spec import DType, EngineSpec, RunSpec, TimeoutsSpec
from rlhfless.weights.address import StoreAddress

Device = Literal["cpu", "cuda"]


class EngineError(Exception):
    """The engine could not do what it was asked for."""


class EngineBusy(EngineError):
    """The call needs an engine without unfinished requests."""


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
    """KV cache on each GPU. None: vLLM measures what is free, which is right only where the engine is alone."""
    batch_invariant: bool = False
    """See GenerationSpec."""

    @classmethod
    def of(
        cls, run: RunSpec, device: Device, store: StoreAddress, max_model_len: int, kv_bytes: int | None = None
    ) -> EngineSettings:
        """The settings that a run asks for; vLLM takes seeds of 32 bits."""
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
        )

    @property
    def is_local(self) -> bool:
        """Model and tokenizer are folders: the engine must not ask the hub."""
        return Path(self.model).is_dir() and Path(self.tokenizer).is_dir()


KvTransfer = Mapping[str, Any]
"""Parameters of vLLM's KV connectors. Opaque, but for OFFER: an engine's answer to it is given to another engine."""

OFFER: KvTransfer = {"do_remote_decode": True, "do_remote_prefill": False}


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
    """Of the whole response, with what was drawn before; without special tokens and without the stop text."""
    kv_offer: KvTransfer | None = None
    """With this other engines get the KV of the prompt, if the request was OFFER."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A completed load, as counted from what the model consumed."""

    digest: str
    tensors: int
    read_back: int
    """Tensors that were read back from the engine's layers, and equal to the learner's."""
    size_bytes: int
    seconds: float
    chart_s: float = 0.0
    """Of `seconds`: finding where the layers hold what is read back; 0 if that was known."""


CORE_DIED = 71
"""Exit code of the engine's process when one that vLLM started has ended; EX_OSERR of sysexits.h."""


# --- adapter -> engine process


@dataclass(frozen=True, slots=True)
class Submit:
    request: SampleRequest


@dataclass(frozen=True, slots=True)
class Call:
    """Run a method of `loop.CALLS` and answer with `Returned`."""

    call_id: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# --- engine process -> adapter


@dataclass(frozen=True, slots=True)
class Started:
    seconds: dict[str, float]
    """Duration of each phase of the start, by StartPhase."""
    kv_capacity_tokens: int = 0
    """Tokens that the KV cache holds; 0 where the engine does not say."""
    block_tokens: int = 16
    """Tokens of a block of the KV cache."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Responses that ended in one iteration, or that were aborted together."""

    ended: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Progress:
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Returned:
    call_id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """The last message of a process that cannot go on."""

    trace: str


Answer = Started | Finished | Refused | Progress | Returned | Crashed
"""Messages that the engine's process sends."""
