"""A KV connector for vLLM that moves the KV of prefixes between engines as files in a folder that both see.

It runs wherever vLLM does, without further libraries: on CPUs the folder is in shared memory. It uses vLLM's
two-request protocol (`kv_transfer_params`), like NixlConnector on GPUs: a request with `do_remote_decode` is
prefilled, and its output carries the parameters for fetching its KV; a request with these parameters and
`do_remote_prefill` fetches it. All other requests are unaffected.

Each engine writes to its own folder and empties it when it loads weights. A file is read once and removed by its
reader. Files have random names, and the parameters carry the cache salt, so KV of other weights is never used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

FOLDER = "folder"
"""Key of `kv_connector_extra_config`: the folder."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Blocks to write to files or to read from them."""

    name: str
    block_ids: list[int]
    first: int = 0
    """The file's first block to read."""


@dataclass
class _Jobs(KVConnectorMetadata):
    """The workers' tasks in one iteration."""

    save: list[_Job] = field(default_factory=list)
    load: list[_Job] = field(default_factory=list)


class KvFiles(KVConnectorBase_V1):
    """One instance belongs to the scheduler, and one to each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._blocks = kv_cache_config.num_blocks
        self._folder = Path(self._kv_transfer_config.get_from_extra_config(FOLDER, ""))
        self._names: dict[str, tuple[str, int]] = {}
        """(files, blocks) of the requests whose KV is to be written."""
        self._held: dict[str, list[int]] = {}
        """Blocks of these requests."""
        self._matched: dict[str, tuple[str, int]] = {}
        """(files, first block) of the requests that fetch KV."""
        self._jobs = _Jobs()
        self._missing: set[int] = set()
        """In a worker: blocks whose file was gone."""
        self._caches: dict[str, torch.Tensor] = {}

    # -- scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        offer = request.kv_transfer_params or {}
        if not offer.get("do_remote_prefill") or offer.get("salt") != request.cache_salt:
            return 0, False
        limit = min(int(offer["tokens"]), request.num_tokens - 1) // self._block_tokens * self._block_tokens
        if limit <= num_computed_tokens or not self._file(str(offer["name"]), 0).exists():
            return 0, False
        self._matched[request.request_id] = str(offer["name"]), num_computed_tokens // self._block_tokens
        return limit - num_computed_tokens, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        name, first = self._matched.pop(request.request_id, ("", 0))
        if num_external_tokens:
            ids = blocks.get_block_ids()[0][first : first + num_external_tokens // self._block_tokens]
            self._jobs.load.append(_Job(name, ids, first))
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            whole = request.num_prompt_tokens // self._block_tokens
            self._names.setdefault(request.request_id, (str(self._folder / uuid4().hex), whole))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        jobs, self._jobs = self._jobs, _Jobs()
        new = scheduler_output.scheduled_new_reqs
        for request in new:
            if request.req_id in self._names:
                self._held[request.req_id] = list(request.block_ids[0])
                tokens = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request.req_id]
                self._save(jobs, request.req_id, tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for name, before, added in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            if name in self._held:
                resumed = name in cached.resumed_req_ids
                self._held[name] = [*([] if resumed else self._held[name]), *(added[0] if added else [])]
                self._save(jobs, name, before + scheduler_output.num_scheduled_tokens[name])
        return jobs

    def _save(self, jobs: _Jobs, request_id: str, computed_tokens: int) -> None:
        """Write all blocks of a request in the iteration that completes its last whole block."""
        name, whole = self._names[request_id]
        if request_id in self._held and computed_tokens >= whole * self._block_tokens:
            jobs.save.append(_Job(name, self._held.pop(request_id)[:whole]))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002 (vLLM's interface)
        self._held.pop(request.request_id, None)
        if request.request_id not in self._names:
            return False, None
        name, whole = self._names.pop(request.request_id)
        tokens = whole * self._block_tokens
        return False, {"do_remote_prefill": True, "name": name, "tokens": tokens, "salt": request.cache_salt}

    # -- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 (vLLM's interface)
        jobs = self._get_connector_metadata()
        assert isinstance(jobs, _Jobs)
        for job in jobs.load:
            path = self._file(job.name, get_tensor_model_parallel_rank())
            try:
                held = load_file(path)
            except FileNotFoundError:  # the engine that wrote it has exited since the scheduler looked
                self._missing.update(job.block_ids)
                continue
            path.unlink(missing_ok=True)  # an offer is taken once
            for layer, cache in self._caches.items():
                part = held[layer][job.first : job.first + len(job.block_ids)]
                self._by_block(cache)[job.block_ids] = part.to(cache.device)

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        jobs = self._get_connector_metadata()
        assert isinstance(jobs, _Jobs)
        for job in jobs.save:
            parts = {layer: self._by_block(cache)[job.block_ids].cpu() for layer, cache in self._caches.items()}
            path = self._file(job.name, get_tensor_model_parallel_rank())
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            save_file({layer: part.contiguous() for layer, part in parts.items()}, partial)
            partial.rename(path)

    def _by_block(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a layer's cache with its blocks in the first dimension."""
        dimension = next(number for number, size in enumerate(cache.shape) if size == self._blocks)
        return cache.movedim(dimension, 0)

    def _file(self, name: str, rank: int) -> Path:
        return Path(f"{name}-{rank}.safetensors")
