"""An engine of one's own: a plain loop over transformers, one response after the other, in a thread of the actor."""

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless.functions.generation.engine import (
    ENGINE_PARTS,
    EngineBusy,
    EngineDead,
    EngineError,
    EnginePart,
    EngineSettings,
    EngineTimeout,
    LoadReport,
    Rest,
    Sampled,
    SampleRequest,
)
from rlhfless.functions.generation.response_text import closing_ids, response_text
from rlhfless.functions.host_offload import HostOffload, held_bytes
from rlhfless.records import FinishReason, PublishedWeights, SleepTier, Slept, VersionSpan, WeightVersion
from rlhfless.weights.check import check_consumed
from rlhfless.weights.digest import Digest


@dataclass
class Running:
    """A response that is being drawn."""

    stopped: threading.Event = field(default_factory=threading.Event)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class PlainEngine:
    """See rlhfless.functions.generation.engine.Engine. It keeps no KV from one response to the next."""

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        self.settings, self.log = settings, log
        self.loaded: WeightVersion | None = None
        self.start_seconds: dict[str, float] = {}
        self.kv_capacity_tokens, self.block_tokens = 0, 1
        self.rest = Rest()
        self._running: dict[str, Running] = {}
        self._failure = ""
        self._heard_s = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(settings.tokenizer)
        self._end_ids = closing_ids(self._tokenizer)
        dtype = getattr(torch, settings.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).to(settings.device).eval()
        self._offload = HostOffload(self._model.parameters())

    @classmethod
    async def start(cls, settings: EngineSettings, log_file: Path | None = None) -> Self:
        """A start is short: a loop's worth of state, and the model."""
        return await asyncio.to_thread(cls, settings, log_file or Path("/dev/null"))

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    @property
    def usable(self) -> bool:
        return not self._failure

    async def sample(self, request: SampleRequest) -> Sampled:
        self._require_usable()
        self.rest.require_awake("generate a sample")
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id!r} is in flight already; ids must differ")
        limit = self._limit()
        if len(request.token_ids) + 1 > limit:
            raise EngineError(f"a prompt of {len(request.token_ids)} tokens; the model takes {limit} with its response")
        running = self._running[request.request_id] = Running()
        try:
            drawing = self._in_thread(self._draw, request, running)
            return await self._bounded(drawing, self.settings.timeouts.generate_s, f"sample {request.request_id}")
        finally:
            running.stopped.set()
            del self._running[request.request_id]

    @torch.no_grad()
    def _draw(self, request: SampleRequest, running: Running) -> Sampled:
        generator = torch.Generator().manual_seed(request.seed or 0)
        for _ in range(request.drawn_tokens):
            torch.rand((), generator=generator, dtype=torch.float64)  # one number for each token
        drawn = list(request.token_ids[len(request.token_ids) - request.drawn_tokens :])
        ends = {self._model.config.eos_token_id, *request.stop_token_ids}
        fed, cache, reason = torch.tensor([request.token_ids]), None, FinishReason.LENGTH
        most = min(request.max_tokens, self._limit() - len(request.token_ids))
        while len(running.tokens) < most:
            if running.stopped.is_set() or self._failure:
                reason = FinishReason.ABORT
                break
            answer = self._model(input_ids=fed.to(self._model.device), past_key_values=cache, use_cache=True)
            token, logprob = chosen(answer.logits[0, -1].float().cpu(), request, generator)
            fed, cache = torch.tensor([[token]]), answer.past_key_values
            running.tokens.append(token)
            running.logprobs.append(logprob)
            self._heard_s = time.monotonic()
            text = self._tokenizer.decode(drawn + running.tokens)
            if token in ends or any(stop in text for stop in request.stop):
                reason = FinishReason.STOP
                break
        label = self.loaded.label if self.loaded else ""
        spans = (VersionSpan(label, 0, len(running.tokens)),)
        tokens, logprobs = tuple(running.tokens), tuple(running.logprobs)
        text = response_text(self._tokenizer, drawn + running.tokens, self._end_ids)
        return Sampled(request.request_id, tokens, logprobs, reason, spans, 0, text)

    def _limit(self) -> int:
        return self.settings.max_model_len or int(self._model.config.max_position_embeddings)

    def progress(self) -> dict[str, int]:
        return {name: len(running.tokens) for name, running in self._running.items()}

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        for name in list(self._running if request_ids is None else request_ids):
            if name in self._running:
                self._running[name].stopped.set()

    async def load(self, published: PublishedWeights) -> LoadReport | None:
        self._require_idle("load weights")
        self.rest.require_weights("load weights")
        if self.loaded == published.version:
            return None
        try:
            report = await self._bounded(self._in_thread(self._load, published), self.settings.timeouts.sync_s, "load")
        except Exception as error:
            self._failure = f"loading {published.version.label} failed: {error}"
            raise
        self.loaded, self.rest.empty = published.version, False
        return report

    async def sleep(self, tier: SleepTier) -> Slept:
        self._require_idle("sleep")
        if self.rest.tier is not None:
            return Slept(self.rest.tier, 0, 0)
        device = self._model.device
        before = held_bytes(device)
        await self._bounded(self._in_thread(self._offload.offload), self.settings.timeouts.sync_s, "sleep")
        self.rest.slept(tier)
        self.loaded = None if self.rest.empty else self.loaded
        return Slept(tier, max(before - held_bytes(device), 0), held_bytes(device))

    async def wake(self, *parts: EnginePart) -> None:
        self._require_usable()
        parts = parts or ENGINE_PARTS  # there is no KV cache to wake
        if "weights" in parts:  # what was dropped comes back as it was, too, and is not used before a load
            await self._bounded(self._in_thread(self._offload.restore), self.settings.timeouts.sync_s, "wake")
        self.rest.woke(parts)

    @torch.no_grad()
    def _load(self, published: PublishedWeights) -> LoadReport:
        began_s, reader = time.monotonic(), self.settings.store.connect()
        consumed = Digest(reader.of_piece)
        parameters = dict(self._model.named_parameters())
        for name, tensor in consumed.passing(reader.read(published.location), reader.hashes(published.location), 0, 1):
            parameters[name].copy_(tensor)
        digest = consumed.hexdigest()
        check_consumed(published.version, published.tensors, digest, len(consumed.hashes))
        return LoadReport(digest, len(consumed.hashes), 0, consumed.size_bytes, time.monotonic() - began_s)

    async def logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self._require_idle("compute logprobs")
        self.rest.require_awake("compute logprobs")
        work = self._in_thread(self._logprobs, token_ids)
        return await self._bounded(work, self.settings.timeouts.sync_s, "logprobs")

    @torch.no_grad()
    def _logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        logits = self._model(torch.tensor([token_ids], device=self._model.device)).logits[0, :-1].float().cpu()
        return tuple(logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist())

    def require_heartbeat(self, limit_s: float) -> None:
        silent_s = time.monotonic() - self._heard_s
        if self._running and silent_s > limit_s:
            self._failure = f"the engine has been silent for {silent_s:.0f} s, with work to do"
            raise EngineDead(self._failure)

    def kill(self) -> None:
        self._failure = self._failure or "the engine was killed"

    async def stop(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _in_thread(self, work: Any, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _bounded(self, work: asyncio.Future[Any], limit_s: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(work, limit_s)
        except TimeoutError:
            self._failure = f"the engine did not finish `{what}` within {limit_s:g} s"
            raise EngineTimeout(self._failure) from None

    def _require_usable(self) -> None:
        if self._failure:
            raise EngineDead(self._failure)

    def _require_idle(self, what: str) -> None:
        self._require_usable()
        if self._running:
            raise EngineBusy(f"cannot {what}: {len(self._running)} unfinished requests")


def chosen(logits: torch.Tensor, request: SampleRequest, generator: torch.Generator) -> tuple[int, float]:
    """A token, and its logprob at the sampling temperature, over all tokens."""
    number = torch.rand((), generator=generator, dtype=torch.float64)
    logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
    if request.temperature == 0:
        token = int(logits.argmax())
    else:
        ordered, ids = logprobs.double().exp().sort(descending=True)
        below = ordered.cumsum(0) - ordered
        kept = (below < request.top_p) & (torch.arange(len(ordered)) < (request.top_k or len(ordered)))
        allowed = ordered * kept
        token = int(ids[int(torch.searchsorted(allowed.cumsum(0), number * allowed.sum(), right=True))])
    return token, float(logprobs[token])
