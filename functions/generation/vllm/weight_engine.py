"""vLLM's side of a weight load: a `WeightTransferEngine` that pulls from our store.

It runs inside every worker, through vLLM's four phases (init, start, update, finish), on CPU and CUDA alike. It
differs from other weight engines in three ways:

* It hashes the tensors that the model's `load_weights` takes from the iterator, so the digest shows whether a load
  skipped or replaced something. Bytes already hashed on this node are not hashed again; otherwise each worker hashes
  its share of the tensors and reads only what it loads of the others: tensors are views of the mapped file.
* On CPU it repacks tied output heads. There, a linear layer computes with a packed copy of its weight, made in
  `process_weights_after_loading`. vLLM's layerwise reload runs that only for layers that received weights; a tied head
  receives none (its weight *is* the embedding's) and would keep the old packed copy. Fused experts, which vLLM packs
  only once, are repacked too.
* It can report afterwards whether the layers compute with the learner's values (`read_back`).

`StoreWorkerExtension` has what else the engine asks of its workers, such as sleep on CPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhfless.functions.generation.vllm import fp8, lora_repairs, start_times, verification
from rlhfless.functions.generation.vllm.arguments import TRANSFER_BACKEND
from rlhfless.functions.generation.vllm.drafting import DraftingPasses
from rlhfless.functions.generation.vllm.lora_slots import LoraSlots
from rlhfless.functions.generation.vllm.messages import Consumed
from rlhfless.functions.generation.vllm.read_back import TensorIndex, index_tensors, repack_experts
from rlhfless.functions.generation.vllm.routes import RouteRecorder, routed_layers
from rlhfless.functions.host_offload import empty, give_back_free_memory, held_bytes, require_free, storages_of
from rlhfless.functions.loopback import bind_rendezvous_to_loopback
from rlhfless.records import WeightSample
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import Digest
from rlhfless.weights.files import read_ahead
from rlhfless.weights.store import WeightReader

PACKED = "cpu_linear"
"""Attribute of a linear layer with the packed copy of its weight, on CPUs."""


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    """The store to pull from, as the fields of a `StoreAddress`: workers in other processes receive only plain data."""

    address: dict[str, str]


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):
    """The version to pull."""

    location: str
    probe_tokens: tuple[int, ...] = ()
    """Tokens of the version's probe; they select the elements to read back. Empty: read back none."""
    layout: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The shape of each of the version's tensors; needed with probe tokens."""


class StoreWeightTransferEngine(WeightTransferEngine[StoreInitInfo, StoreUpdateInfo]):
    """Pulls a version from a `WeightReader` into this worker's model."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader: WeightReader | None = None
        self._damage: str | None = None
        self._expected: set[str] = set()
        self._digest = Digest()
        self.index: TensorIndex | None = None
        """Locations of the elements to read back; created with the first version that is read back."""

    @property
    def reader(self) -> WeightReader:
        assert self._reader is not None, "init_transfer_engine comes first"
        return self._reader

    @property
    def consumed(self) -> Consumed:
        """The tensors consumed so far by the current update, or by the last one."""
        transport = None if self._reader is None else self._reader.transport
        return Consumed(self._digest.hashes, self._digest.size_bytes, transport, self._damage)

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        self._reader = StoreAddress(**init_info.address).connect()  # type: ignore[arg-type]

    def start_weight_update(self) -> None:
        assert self._reader is not None, "init_transfer_engine comes first"
        self._digest, self._damage = Digest(self._reader.of_piece), None
        # Collect names before the reload splits tied weights: they are one parameter now, and two during the reload.
        # Scales of quantised layers are no parameters during the reload.
        names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        self._expected = names & {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        try:
            self._receive(update_info)
        except WeightFileError as error:
            # An exception would reach another process as text only. The caller asks for this before it continues.
            self._damage = str(error)

    def _receive(self, update_info: StoreUpdateInfo) -> None:
        assert self._reader is not None, "init_transfer_engine comes first"
        load_weights: Callable[..., set[str] | None] = self.model.load_weights  # type: ignore[assignment]
        if update_info.probe_tokens and self.index is None:
            tokens, layout = update_info.probe_tokens, update_info.layout
            self.index = index_tensors(self.model, load_weights, layout, tokens, self.device)
        published: Iterable[tuple[str, torch.Tensor]] = self._reader.read(update_info.location)
        workers = get_tensor_model_parallel_world_size()
        # For a mapped tensor, each of several workers copies only its share.
        published = read_ahead(published, self.device) if workers == 1 else published
        known = self._reader.hashes(update_info.location)
        tensors = self._digest.passing(published, known, get_tensor_model_parallel_rank(), workers)
        loaded = load_weights(tensors)
        missing = self._expected - set(loaded or ())
        if loaded is not None and missing:
            raise ValueError(
                f"{update_info.location} holds nothing for {len(missing)} parameters of the model, such as "
                f"{sorted(missing)[:3]}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        if current_platform.is_cpu():
            repack_shared_weights(self.model)
            repack_experts(self.model)
        assert self._reader is not None, "init_transfer_engine comes first"
        torch.accelerator.synchronize()
        self._reader.release()

    def shutdown(self) -> None:
        self._reader = None


def repack_shared_weights(model: torch.nn.Module) -> None:
    """Repack all layers that share their weight with another layer (tied embeddings)."""
    users: defaultdict[int, list[torch.nn.Module]] = defaultdict(list)
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            users[id(parameter)].append(layer)
    for layer in {layer for layers in users.values() if len(layers) > 1 for layer in layers}:
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


class StoreWorkerExtension:
    """Mixin for vLLM's worker, called through `collective_rpc`."""

    def rlhfless_start(self, drafts_measured: bool, routes: bool = False) -> start_times.WorkerStart:
        """Wrap runners that can speculate in DraftingPasses, try adapters, record routes if asked for, and return the
        worker's start times."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.lora_config is not None:
            self.rlhfless_slots = LoraSlots(runner.lora_manager)
            self.rlhfless_readers: dict[str, tuple[StoreAddress, WeightReader]] = {}
            self.rlhfless_slots.try_products()
        if isinstance(runner, GPUModelRunner) and hasattr(runner, "drafter") and not runner.use_async_scheduling:
            self.rlhfless_passes = DraftingPasses(runner, measured=drafts_measured)
        if routes and isinstance(runner, GPUModelRunner):
            self.rlhfless_routes = RouteRecorder(runner)
        return start_times.of_worker(self.vllm_config)  # type: ignore[attr-defined]

    def rlhfless_routed_layers(self) -> list[int]:
        """Return the layers with routers, in order."""
        return sorted(routed_layers(self.model_runner.model))  # type: ignore[attr-defined]

    def rlhfless_write_routes(self, request_id: str, tokens: int, path: str) -> int:
        """Write the routes of a request's generated tokens to a file, on the first worker; see RouteRecorder.write."""
        if get_tensor_model_parallel_rank():
            return 0
        return self.rlhfless_routes.write(request_id, tokens, path)

    def rlhfless_backends(self) -> dict[str, str]:
        """Return the implementations that vLLM chose for this model on this device."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)  # type: ignore[attr-defined,type-abstract]
        older = getattr(runner.sampler, "topk_topp_sampler", None)
        return {
            "runner": "V1" if isinstance(runner, GPUModelRunner) else "V2",
            "attention": ", ".join(sorted({layer.get_attn_backend().get_name() for layer in layers.values()})),
            "sampler": "gumbel" if older is None else older.forward.__name__,
            "flashinfer": "on" if has_flashinfer() else "off",
        }

    def rlhfless_draft_times(self) -> tuple[float, float]:
        """Return DraftingPasses.times; zeros if the runner's passes are vLLM's own."""
        passes: DraftingPasses | None = getattr(self, "rlhfless_passes", None)
        return (0.0, 0.0) if passes is None else passes.times()

    def rlhfless_consumed(self) -> Consumed:
        engine: StoreWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return engine.consumed

    def rlhfless_read_back(self, samples: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[int, int]]:
        engine: StoreWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        assert engine.index is not None, "a version with probe tokens was loaded"
        return engine.index.compare(engine.model, {name: WeightSample(*each) for name, each in samples.items()})

    def rlhfless_fetch_adapter(
        self, location: str, path: str, store: tuple[str, Mapping[str, Any]] | None = None
    ) -> Consumed:
        """Read an adapter into host memory. `store`: a run, and the fields of its StoreAddress, if it has its own."""
        if store is None:
            engine: StoreWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
            return self.rlhfless_slots.fetch(engine.reader, location, path)
        run_id, address = store[0], StoreAddress(**store[1])
        known = self.rlhfless_readers.get(run_id)
        if known is None or known[0] != address:
            known = self.rlhfless_readers[run_id] = address, address.connect()
        return self.rlhfless_slots.fetch(known[1], location, path)

    def rlhfless_leave(self, run_id: str) -> None:
        """Forget the store of a run that has left."""
        self.rlhfless_readers.pop(run_id, None)

    def rlhfless_compare_base(
        self, base: str, samples: Mapping[str, tuple[Any, ...]], tokens: Sequence[int]
    ) -> dict[str, tuple[int, int]]:
        engine: StoreWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        given = {name: WeightSample(*each) for name, each in samples.items()}
        return self.rlhfless_slots.compare_base(
            engine.model, engine.model_config, base, given, tuple(tokens), engine.device
        )

    def rlhfless_add_adapter(
        self, name: str, number: int, path: str, samples: Mapping[str, tuple[Any, ...]], tokens: Sequence[int]
    ) -> dict[str, tuple[int, int]]:
        """Put a fetched adapter into a slot and compare the slot; see LoraSlots."""
        self.rlhfless_slots.add(name, number, path)
        given = {tensor: WeightSample(*each) for tensor, each in samples.items()}
        return self.rlhfless_slots.compare(number, given, tuple(tokens)) if given else {}

    def rlhfless_drop_adapter(self, number: int, path: str) -> None:
        self.rlhfless_slots.drop(number, path)

    def rlhfless_forget_adapters(self) -> None:
        self.rlhfless_slots.clear()

    def rlhfless_reload_base(self) -> None:
        """Read dropped base weights from the model's folder again."""
        self.reload_weights()  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            repack_shared_weights(self.model_runner.model)  # type: ignore[attr-defined]

    def rlhfless_held_bytes(self) -> int:
        return held_bytes(torch.device("cpu") if current_platform.is_cpu() else self.device)  # type: ignore[attr-defined]

    def rlhfless_require_free(self, size_bytes: int) -> None:
        """Raise MemoryError if the worker's GPU has less free memory: another function still holds it."""
        require_free(self.device, size_bytes)  # type: ignore[attr-defined]

    def rlhfless_release_host_memory(self) -> None:
        """Unpin the host memory of sleeping weights, which torch would keep for the process's lifetime."""
        torch._C._host_emptyCache()

    def rlhfless_sleep(self, drop: bool) -> None:
        """Release a CPU worker's memory of the KV cache and, with `drop`, of the weights; vLLM does so only on GPUs.

        It comes back as zeros when touched, so there is nothing to wake. A load fills the tensors that layers compute
        with: vLLM's reload recreates the packed copies of linear layers. Buffers are in no version and stay.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        empty(storages_of(_tensors(runner.kv_caches)))
        if drop:
            for module in runner.model.modules():
                if PACKED in module.__dict__:
                    setattr(module, PACKED, None)
            empty(storages_of(runner.model.parameters()))
        give_back_free_memory()


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of all layers; a layer may have several."""
    for cache in caches:
        yield from cache if isinstance(cache, list | tuple) else (cache,)


# vLLM imports this module in every worker before the worker joins a process group; each of these calls requires that.
start_times.listen()
verification.install()
fp8.install()
lora_repairs.install()
bind_rendezvous_to_loopback()
WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, StoreWeightTransferEngine)
