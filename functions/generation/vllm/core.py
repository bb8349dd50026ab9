"""vLLM, synchronous: one iteration per `step`.

Its front end runs in this process; scheduler and workers do too, or run in separate processes (`has_core_process`).
They receive plain data, because it may travel as messages. Only `loop` uses this module. Only this module and
`weight_engine` touch vLLM internals (request states, engine core).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, cast

from vllm import EngineArgs, LLMEngine, ModelRegistry, RequestOutput, SamplingParams
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient, SyncMPClient
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from rlhfless.functions.generation.engine import (
    AdapterSlots,
    EngineBusy,
    EngineDead,
    EngineError,
    EnginePart,
    EngineSettings,
    LoadReport,
    Sampled,
    SampleRequest,
)
from rlhfless.functions.generation.response_text import closing_ids, closing_stops, with_text
from rlhfless.functions.generation.vllm import fp8, start_times
from rlhfless.functions.generation.vllm.arguments import engine_arguments, kv_folder
from rlhfless.functions.generation.vllm.iteration_shares import SHARES, shares_of
from rlhfless.functions.generation.vllm.messages import CORE_DIED, Consumed
from rlhfless.functions.generation.vllm.route_output import RouteOutput
from rlhfless.functions.generation.vllm.scheduler import SampledLogprobs, scheduler_class
from rlhfless.functions.generation.vllm.verification import DRAWN, EARLIER, packed
from rlhfless.records import FinishReason, PublishedWeights, SleepTier, Slept, StartPhase, VersionSpan
from rlhfless.weights.check import WeightCheckFailed, WeightFileError, check_consumed, check_read_back
from rlhfless.weights.digest import merged

CLOSE_S = 0.5
"""Seconds for vLLM's core to exit before it is killed. An idle core has nothing to save, and it and its workers
would wait for each other for four seconds, while the device is paid for."""

PROBE = "logprobs"
"""ID of the request that computes logprobs; other IDs are numbers."""

FIRST = -1
"""Priority of the probe: ahead of all other requests, which have 0 and are served first come, first served."""


@dataclass(slots=True)
class _Adapter:
    """A version that is an adapter, in a slot of every worker."""

    request: LoRARequest
    version: str
    run_id: str
    requests: int = 0
    """Unfinished requests that use it."""


class Core:
    """One vLLM engine. Not thread-safe: its process has a single loop."""

    def __init__(self, settings: EngineSettings) -> None:
        started = time.monotonic()
        _register_model_class(settings)
        fp8.install()
        self._kv_folder = kv_folder(settings)
        config = EngineArgs(**engine_arguments(settings)).create_engine_config()
        config.scheduler_config.scheduler_cls = scheduler_class(config.scheduler_config)
        configured = time.monotonic()
        cores = os.sched_getaffinity(0)
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        os.sched_setaffinity(0, cores)  # on CPUs vLLM's NixlConnector bound this thread to the machine's last core
        self._closing = False
        if isinstance(self._engine.engine_core, SyncMPClient):
            threading.Thread(target=self._end_with_core, name="core-watch", daemon=True).start()
        address = {"address": asdict(settings.store)}
        self._engine.collective_rpc("init_weight_transfer_engine", args=(address,))
        of_workers: list[start_times.WorkerStart] = self._engine.collective_rpc(
            "rlhfless_start", args=(settings.speculation.measured, bool(settings.routes_folder))
        )
        self._routes = RouteOutput(self._engine, settings)
        self.backends: dict[str, str] = self._engine.collective_rpc("rlhfless_backends")[0]
        size_bytes = start_times.weights_bytes(settings.model)
        built = start_times.phases(time.monotonic() - configured, of_workers, size_bytes)
        self.seconds = {str(StartPhase.CONFIGURE): configured - started} | built
        self.kv_capacity_tokens: int = config.cache_config.kv_cache_size_tokens or 0
        self.block_tokens: int = config.cache_config.block_size
        self._vocabulary_tokens = config.model_config.get_vocab_size()
        self._internal_ids: dict[str, str] = {}
        self._ended: list[Sampled] = []
        """Responses that finished during another call."""
        self._requests: dict[str, SampleRequest] = {}
        """Unfinished requests, by ID."""
        self._logprobs: dict[str, SampledLogprobs] = {}
        self._room = settings.adapters or AdapterSlots(0, 0, ())
        self._numbers = itertools.count(self._room.slots + 1)  # vLLM tries its slots with the numbers up to theirs
        self._adapters: list[_Adapter] = []
        """The adapters with a slot, oldest first. New requests use the last one of their run."""
        self._left: set[str] = set()
        """Runs that have left: their adapters go once no request uses them."""
        self._used: dict[str, _Adapter] = {}
        """Adapters of unfinished requests, by ID."""
        self._base: str | None = None
        """Digest of the base weights under the adapters, once they were compared with the learner's."""
        self._base_dropped = False
        self._tokenizer: Any = self._engine.get_tokenizer()
        eos: int | list[int] | None = config.model_config.try_get_generation_config().get("eos_token_id")
        self._end_ids = closing_ids(self._tokenizer, [eos] if isinstance(eos, int) else eos or ())
        self._usable = True
        self._speculation = settings.speculation
        self._on_gpu = settings.device != "cpu"
        self._workers = settings.engine.devices_per_actor
        self._freed_bytes = 0
        """Bytes that the last sleep freed on each device."""

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished or its response was not taken yet."""
        return bool(self._ended) or self._engine.has_unfinished_requests()

    def submit(self, request: SampleRequest) -> None:
        """Queue a request; `step` returns its result."""
        self._require_usable()
        parameters = SamplingParams(
            seed=request.seed,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=list(request.stop),
            stop_token_ids=list(request.stop_token_ids),
            logprobs=request.top_logprobs,  # besides the sampled token's
            # Only stop texts need the text while sampling. The response's own text is decoded once, at the end.
            detokenize=bool(request.stop),
            skip_special_tokens=False,  # a stop text may be, or contain, a special token
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=self._extra(request),
            **self._routes.parameters(request),
        )
        prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_salt)
        adapter = self._newest(request.run_id)
        if adapter is None and self._room.runs > 1:
            raise EngineError(f"run {request.run_id} has no adapter here; load one first")
        if adapter is not None and not self._requests:
            self._require_slot(adapter)
        internal = self._engine.add_request(
            request.request_id, prompt, parameters, lora_request=None if adapter is None else adapter.request
        )
        if adapter is not None:
            self._used[request.request_id] = adapter
            adapter.requests += 1
        logprobs = self._logprobs[request.request_id] = SampledLogprobs()
        self._engine.output_processor.request_states[internal].logprobs_processor = logprobs
        self._internal_ids[request.request_id] = internal
        self._requests[request.request_id] = request

    def _newest(self, run_id: str) -> _Adapter | None:
        """Return the newest adapter of a run, or of all if `run_id` is empty."""
        return next((each for each in reversed(self._adapters) if run_id in ("", each.run_id)), None)

    def _extra(self, request: SampleRequest) -> dict[str, Any] | None:
        extra: dict[str, Any] = {}
        if request.drawn_tokens:
            extra[DRAWN] = (request.drawn_tokens, self._vocabulary_tokens)
        if request.earlier and self._speculation.remembers:
            extra[EARLIER] = [packed(response) for response in request.earlier]
        if request.kv_transfer is not None:
            # With this key vLLM reports the tokens cached where the prefill ran, not those cached here.
            kept = {key: value for key, value in request.kv_transfer.items() if key != "remote_prefill_cached_tokens"}
            extra["kv_transfer_params"] = kept
        return extra or None

    def step(self) -> list[Sampled]:
        """Run one iteration and return the responses that finished in it."""
        ended, self._ended = self._ended, []
        return ended or self._iterate()

    def _iterate(self) -> list[Sampled]:
        ended = [self._take(cast(RequestOutput, output)) for output in self._engine.step()]
        if ended and (len(self._adapters) > 1 or self._left):
            self._free_slots()
        if ended and self._speculation.on:
            draft_s, verify_s = self._engine.collective_rpc("rlhfless_draft_times")[0]
            ended[0] = replace(ended[0], draft_s=draft_s, verify_s=verify_s)
        return ended

    def abort(self, request_ids: tuple[str, ...] | None) -> list[Sampled]:
        """End the given requests, or all; return their tokens so far, and responses that finish meanwhile.

        Unknown IDs are ignored.
        """
        chosen = self._internal_ids if request_ids is None else request_ids
        internal = [self._internal_ids[name] for name in chosen if name in self._internal_ids]
        # Not LLMEngine.abort_request: it forgets the requests here while the core still has tokens of them.
        self._engine.engine_core.abort_requests(internal)
        states, ended = self._engine.output_processor.request_states, list[Sampled]()
        while any(name in states for name in internal):
            ended += self._iterate()
        return ended

    def progress(self) -> dict[str, int]:
        """Return the generated tokens so far, by request."""
        states = self._engine.output_processor.request_states
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in states.values()
            if state.detokenizer is not None
        }

    def load(
        self, published: PublishedWeights, in_flight: bool = False, store: dict[str, Any] | None = None
    ) -> LoadReport:
        """Load a version and drop all KV of the previous one.

        In flight, unfinished requests wait, keep their tokens, and have their KV recomputed with the new weights; with
        adapters, they continue with their own version, and nothing waits or is recomputed. A failed load of an adapter
        changes nothing. `store`: the fields of the StoreAddress of an adapter's run, by default the engine's own store.

        Raises:
            EngineBusy: requests are unfinished, and the load is not in flight; or they use all slots.
            WeightCheckFailed: the model did not consume exactly the version's tensors; unless the version is an
                adapter, the engine is now unusable.
        """
        self._require_usable()
        if published.base is not None:
            return self._load_adapter(published, in_flight, store)
        if not in_flight:
            self._require_idle("load weights")
        self._usable = False  # until the last line: half-loaded weights must never serve
        report = self._load(published, in_flight)
        self._usable = True
        return report

    def _load(self, published: PublishedWeights, in_flight: bool) -> LoadReport:
        started = time.monotonic()
        with self._paused(in_flight):
            consumed = self._update(published)
            read_back = self._read_back(published) if published.probe.samples else 0
            shutil.rmtree(self._kv_folder, ignore_errors=True)
            if not self._engine.reset_prefix_cache(reset_running_requests=in_flight):
                raise EngineDead("the prefix cache could not be cleared: blocks of the old weights are still in use")
            self._engine.set_weight_version(published.version.label)
        return replace(consumed, read_back=read_back, seconds=time.monotonic() - started)

    def _load_adapter(self, published: PublishedWeights, in_flight: bool, store: dict[str, Any] | None) -> LoadReport:
        """Give an adapter a slot that no request uses. Its name, number and path are new."""
        run_id = published.version.run_id
        used = [each for each in self._adapters if each.run_id == run_id]
        unfinished = sum(each.requests for each in used)
        if unfinished and not in_flight:
            raise EngineBusy(f"cannot load weights with {unfinished} unfinished requests; abort them first")
        if len(used) >= self._room.per_run:
            slots = self._room.per_run
            raise EngineBusy(f"requests use all {slots} slots of adapters; abort those of the oldest version")
        number = next(self._numbers)
        adapter = _Adapter(LoRARequest(published.version.label, number, f"rlhfless:{number}"),
                           published.version.label, run_id)  # fmt: skip
        try:
            report = self._add_adapter(published, adapter, store)
        except BaseException:
            self._engine.collective_rpc("rlhfless_drop_adapter", args=(number, adapter.request.lora_path))
            raise
        self._left.discard(run_id)
        self._adapters.append(adapter)
        self._free_slots()
        return report

    def _add_adapter(self, published: PublishedWeights, adapter: _Adapter, store: dict[str, Any] | None) -> LoadReport:
        """Read an adapter into a slot of each worker, with all checks but the probe."""
        started = time.monotonic()
        engine, version, probe = self._engine, published.version, published.probe
        self._check_base(published)
        number, path = adapter.request.lora_int_id, adapter.request.lora_path
        address = None if store is None else (adapter.run_id, store)
        answers = engine.collective_rpc("rlhfless_fetch_adapter", args=(published.location, path, address))
        report = self._checked(published, answers)
        samples = {name: tuple(each) for name, each in probe.samples.items()}
        added = engine.collective_rpc(
            "rlhfless_add_adapter", args=(version.label, number, path, samples, probe.token_ids)
        )
        self._require_slot(adapter)
        read_back = self._same(published, added)
        return replace(report, read_back=read_back, seconds=time.monotonic() - started)

    def leave(self, run_id: str) -> None:
        """Drop a run's adapters, now or when their last requests have ended."""
        self._left.add(run_id)
        self._free_slots()
        self._engine.collective_rpc("rlhfless_leave", args=(run_id,))

    def shares(self) -> dict[str, float] | None:
        """Return the seconds of iterations by run; None if one run has the engine."""
        if self._room.runs == 1:
            return None
        client = self._engine.engine_core
        if isinstance(client, InprocClient):
            return shares_of(client.engine_core)
        of_runs: dict[str, float] = cast(SyncMPClient, client).call_utility(SHARES)
        return of_runs

    def _check_base(self, published: PublishedWeights) -> None:
        """Compare the base weights with the learner's, unless they have been already."""
        base = published.base
        assert base is not None, "the version is an adapter"
        if self._base_dropped:
            self._engine.collective_rpc("rlhfless_reload_base")
            self._base_dropped = False
        if self._base == base.digest:
            return
        if self._base is not None:
            what = f"it belongs to base weights {base.digest}, and the engine has {self._base} for other runs"
            raise WeightCheckFailed("consumed", published.version, what)
        samples = {name: tuple(each) for name, each in base.samples.items()}
        arguments = base.digest, samples, published.probe.token_ids
        self._same(published, self._engine.collective_rpc("rlhfless_compare_base", args=arguments))
        self._base = base.digest

    def _free_slots(self) -> None:
        """Drop the adapters that no request uses, except the newest of each run that has not left."""
        newest = {id(each) for each in {each.run_id: each for each in self._adapters}.values()
                  if each.run_id not in self._left}  # fmt: skip
        for adapter in [each for each in self._adapters if not each.requests and id(each) not in newest]:
            number, path = adapter.request.lora_int_id, adapter.request.lora_path
            self._engine.collective_rpc("rlhfless_drop_adapter", args=(number, path))
            self._adapters.remove(adapter)

    def _require_slot(self, adapter: _Adapter) -> None:
        """Raise EngineDead if vLLM has lost an adapter."""
        if adapter.request.lora_int_id not in self._engine.list_loras():
            raise EngineDead(f"vLLM has no adapter {adapter.version} any more, which its requests name")

    def _update(self, published: PublishedWeights) -> LoadReport:
        """Run vLLM's phases of a weight update and return the report of the consumed tensors."""
        engine, probe = self._engine, published.probe
        engine.collective_rpc("start_weight_update")
        update: dict[str, Any] = {"location": published.location}
        if probe.samples:
            update["probe_tokens"] = probe.token_ids
            update["layout"] = {name: sample.shape for name, sample in probe.samples.items()}
        engine.collective_rpc("update_weights", args=(update,))
        report = self._checked(published, engine.collective_rpc("rlhfless_consumed"))
        engine.collective_rpc("finish_weight_update")
        return report

    @staticmethod
    def _checked(published: PublishedWeights, answers: list[Any]) -> LoadReport:
        """Return the report of what the workers consumed. Raises WeightFileError and WeightCheckFailed."""
        consumed = [Consumed(*worker) for worker in answers]
        for worker in consumed:
            if worker.damage is not None:
                raise WeightFileError(worker.damage)
        digest = merged(worker.hashes for worker in consumed).hexdigest()
        fewest = min(len(worker.hashes) for worker in consumed)
        check_consumed(published.version, published.tensors, digest, fewest)
        return LoadReport(digest, fewest, 0, consumed[0].size_bytes, 0.0, consumed[0].transport)

    def _read_back(self, published: PublishedWeights) -> int:
        """Compare the layers' values in use with the learner's samples and return the number of compared tensors."""
        samples = {name: tuple(each) for name, each in published.probe.samples.items()}
        return self._same(published, self._engine.collective_rpc("rlhfless_read_back", args=(samples,)))

    @staticmethod
    def _same(published: PublishedWeights, answers: list[dict[str, tuple[int, int]]]) -> int:
        """Return the number of tensors that the workers compared. Raises WeightCheckFailed if one differs."""
        for worker in answers:
            check_read_back(published.version, worker)
        return len({name for worker in answers for name, (count, _) in worker.items() if count})

    @contextmanager
    def _paused(self, keep: bool = False) -> Iterator[None]:
        """Pause until no forward pass is in flight and no aborted request remains.

        All KV is then free; with `keep`, unfinished requests retain theirs.
        """
        client = self._engine.engine_core
        mode: Literal["keep", "abort"] = "keep" if keep else "abort"
        if isinstance(client, InprocClient):
            core: EngineCore = client.engine_core
            if keep:
                core.pause_scheduler(mode, False)
            while core.batch_queue or core.scheduler.has_requests():
                self._ended += self._iterate()
            yield
            if keep:
                core.resume_scheduler()
            return
        apart = cast(SyncMPClient, client)
        apart.call_utility("pause_scheduler", mode, False)
        try:
            yield
        finally:  # while paused, the core queues requests and sends nothing
            apart.call_utility("resume_scheduler")

    def sleep(self, tier: SleepTier) -> Slept:
        """Release the memory of the KV cache and the weights.

        HOST keeps the weights in host memory, where they already are on a CPU. Raises EngineBusy. A sleep that fails
        halfway leaves the engine unusable.
        """
        self._require_usable()
        self._require_idle("sleep")
        self._usable = False
        engine, dropped = self._engine, tier is SleepTier.DROPPED
        with self._paused():
            shutil.rmtree(self._kv_folder, ignore_errors=True)
            if not engine.reset_prefix_cache():
                raise EngineDead("the prefix cache could not be cleared: blocks of the KV cache are still in use")
        before = self._held_bytes()
        if self._on_gpu:
            engine.sleep(level=2 if dropped else 1)
        else:
            engine.collective_rpc("rlhfless_sleep", args=(dropped,))
        if dropped and self._room.slots:
            engine.collective_rpc("rlhfless_forget_adapters")
            self._adapters, self._base, self._base_dropped = [], None, True
        held = self._held_bytes()
        self._freed_bytes = max(before - held, 0) // self._workers
        self._usable = True
        return Slept(tier, max(before - held, 0), held)

    def wake(self, parts: tuple[EnginePart, ...]) -> None:
        """Restore memory. Dropped parts come back empty and are valid after a load."""
        self._require_usable()
        self._usable = False
        if self._on_gpu:  # on a CPU the system returns memory when it is touched
            if "weights" in parts:
                self._engine.collective_rpc("rlhfless_require_free", args=(self._freed_bytes,))
            self._engine.wake_up(list(parts))
            if "weights" in parts:
                self._engine.collective_rpc("rlhfless_release_host_memory")
        self._usable = True

    def _held_bytes(self) -> int:
        """Return the bytes held on the devices of all workers."""
        return sum(self._engine.collective_rpc("rlhfless_held_bytes"))

    def logprobs(self, token_ids: tuple[int, ...], run_id: str = "") -> tuple[float, ...]:
        """Return the logprobs of a text; see Engine.logprobs. Unfinished requests continue meanwhile."""
        self._require_usable()
        parameters = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # of the prompt's own tokens only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        adapter, prompt = self._newest(run_id), tokens_input(list(token_ids))
        request = None if adapter is None else adapter.request
        self._engine.add_request(PROBE, prompt, parameters, lora_request=request, priority=FIRST)
        while True:
            outputs = {output.request_id: output for output in self._engine.step()}
            probe: Any = outputs.pop(PROBE, None)
            self._ended += [self._take(cast(RequestOutput, output)) for output in outputs.values()]
            if probe is not None:
                return tuple(probe.prompt_logprobs.logprobs)

    def close(self) -> None:
        """End vLLM's processes, or leave the process groups, so that their sockets and files are removed."""
        self._closing = True
        shutil.rmtree(self._kv_folder, ignore_errors=True)
        if isinstance(self._engine.engine_core, SyncMPClient):
            self._engine.engine_core.shutdown(CLOSE_S)
            return
        destroy_model_parallel()  # type: ignore[no-untyped-call]
        destroy_distributed_environment()  # type: ignore[no-untyped-call]

    def _end_with_core(self) -> None:
        """Exit this process once vLLM's core exits.

        A killed core answers no call, and vLLM's synchronous client would wait forever.
        """
        manager: Any = cast(SyncMPClient, self._engine.engine_core).resources.engine_manager
        connection.wait([process.sentinel for process in manager.processes])
        if not self._closing:
            print("the process of vLLM's core has ended", file=sys.stderr, flush=True)
            os._exit(CORE_DIED)

    def _take(self, output: RequestOutput) -> Sampled:
        internal = self._internal_ids.pop(output.request_id)
        request, completion = self._requests.pop(output.request_id), output.outputs[0]
        first = self._logprobs.pop(output.request_id).first
        token_ids = tuple(completion.token_ids)
        assert completion.finish_reason is not None
        spans = tuple(VersionSpan(span.version, span.start, span.end) for span in completion.weight_versions or ())
        if (adapter := self._used.pop(output.request_id, None)) is not None:
            spans = (VersionSpan(adapter.version, 0, len(token_ids)),) if token_ids else ()
            adapter.requests -= 1
        sampled = Sampled(
            request_id=output.request_id,
            token_ids=token_ids,
            # A pass that ended in a stop text may have gone beyond it.
            logprobs=tuple(cast(list[float], completion.logprobs)[: len(token_ids)]),
            first=tuple((str(self._tokenizer.decode([token])), value) for token, value in first),
            finish_reason=FinishReason(completion.finish_reason),
            version_spans=spans,
            cached_tokens=output.num_cached_tokens or 0,
            kv_offer=output.kv_transfer_params,
            text="",
            routes=self._routes.written(internal, request, completion),
            **_speculated(completion.spec_decode_metrics),
        )
        end_ids = self._end_ids | closing_stops(self._tokenizer, request.stop_token_ids)
        return with_text(sampled, request, self._tokenizer, end_ids)

    def _require_idle(self, purpose: str) -> None:
        if self.busy:
            raise EngineBusy(f"cannot {purpose} with {len(self._internal_ids)} unfinished requests; abort them first")

    def _require_usable(self) -> None:
        if not self._usable:
            raise EngineDead("an earlier weight load failed half-way; start a new engine")


def _speculated(metrics: RequestSpecDecodeMetrics | None) -> dict[str, Any]:
    """Return Sampled's `drafted` and `accepted`: drafts of a response by position in a pass, [depth]."""
    if metrics is None:
        return {}
    passes = {"drafted": metrics.per_step_drafted, "accepted": metrics.per_step_accepted}
    places = range(metrics.num_spec_tokens)
    return {name: tuple(sum(n > place for n in counts) for place in places) for name, counts in passes.items()}


def _register_model_class(settings: EngineSettings) -> None:
    """Import the model's class in this process.

    vLLM would start a second Python to inspect it (16 s on one core), because importing might initialise CUDA before
    workers are forked. Our workers are spawned, not forked.
    """
    config = Path(settings.model) / "config.json"
    if not config.is_file():
        return
    for architecture in json.loads(config.read_text()).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())
