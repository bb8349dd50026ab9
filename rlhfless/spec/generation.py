"""How responses are sampled, and the engine that samples them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rlhfless.spec.base import MOST_TOKENS, Duration, Processes, SpecModel, Tokens
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import several
from rlhfless.spec.imports import IMPORT_PATH, TargetError, load_target

MOST_SEQUENCES = 65_536
"""Far above what an engine decodes at a time; it allocates its tables for so many."""

MOST_STOPS = 256
"""The engine compares each token with all of them."""


ENGINE_METHODS = ("start", "sample", "abort", "progress", "load", "logprobs", "require_beat", "kill", "stop")


def _engine(name: str) -> str:
    """Raises PydanticCustomError if neither an engine of the package nor a class with an engine's methods."""
    if name == "vllm":
        return name
    try:
        if not IMPORT_PATH.fullmatch(name):
            raise TargetError(f"{name!r} is no engine", "Name `vllm`, or a class as `package.module:Name`")
        lacking = [method for method in ENGINE_METHODS if not hasattr(load_target(name), method)]
        if lacking:
            raise TargetError(f"{name!r} is no engine: it has no `{lacking[0]}`", "See docs/extending.md")
    except TargetError as error:
        raise several([Problem("", error.what, error.hint)]) from error
    return name


EngineType = Annotated[str, AfterValidator(_engine)]


class EngineSpec(SpecModel):
    """Settings of one engine. Fields that are left out are chosen for the device."""

    type: EngineType = "vllm"
    """The engine: vLLM, or a class of your own (`package.module:Name`) that keeps the promises of
    `rlhfless/functions/generation/engine.py`."""

    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """Memory for the KV cache of a CPU engine (1 GiB by default)."""

    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory that the engine may use. Ignored on CPU."""

    tensor_parallel_size: Processes = 1
    """Devices per actor."""

    max_sequences: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] = 256
    """Most sequences decoded at the same time."""

    max_batch_tokens: Tokens = 8192
    """Most tokens in one iteration of the engine, prefill included."""

    eager: bool | None = None
    """Skip CUDA graphs and compilation. On by default on CPU, off on GPU."""

    core_process: bool | None = None
    """Run vLLM's scheduler and workers in processes of their own. On by default on GPUs and where an actor has several
    devices, which need it; off for one CPU core, where a single process is faster."""

    kv_connector: Literal["folder", "nixl"] | None = None
    """How the KV of shared prefixes moves from actor to actor, where that takes less time than to compute it: files in
    the folder of the weights (actors of one node), or NIXL (GPUs; its package must be installed). By default each actor
    computes its own. Models with several kinds of attention layers then hold more KV: vLLM's connectors treat all
    alike."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names. They are passed on unchecked."""


class GenerationSpec(SpecModel):
    """Sampling."""

    max_tokens: Tokens = 1024
    """Longest response."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The learner divides its logits by the same number."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Any value but 1 biases the ratio between learner and engine, and gives a warning."""

    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Sample among the k likeliest tokens; 0 for all. Any value but 0 biases the ratio, and gives a warning."""

    stop: Annotated[tuple[str, ...], Field(max_length=MOST_STOPS)] = ()
    """Texts that end a response, in addition to the end-of-sequence token."""

    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MOST_STOPS)] = ()
    """Tokens that end a response, in addition to the end-of-sequence token."""

    batch_invariant: bool = False
    """On GPUs: kernels whose result for a sequence does not depend on what else is in the batch
    (VLLM_BATCH_INVARIANT), so that a sample has the same tokens on however many actors and after a move. Engines are
    slower with them, and vLLM refuses models and attention kernels that have none. CPU engines draw the same tokens
    without it."""

    progress_interval_s: Duration = 0.5
    """How often an actor reports the tokens produced so far."""

    engine: EngineSpec = EngineSpec()
