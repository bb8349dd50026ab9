"""How responses are sampled, and the engine that samples them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, HubPath, Processes, SpecModel, Tokens
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import several
from rlhfless.spec.imports import IMPORT_PATH, TargetError, load_target

MOST_SEQUENCES = 65_536
"""Far above what an engine decodes at a time; it allocates its tables for so many."""

MOST_STOPS = 256
"""The engine compares each token with all of them."""


ENGINE_METHODS = ("start", "sample", "abort", "progress", "load", "logprobs", "require_heartbeat", "kill", "stop")


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


USUAL_SEQUENCES = 256
USUAL_BATCH_TOKENS = 8192
"""`max_sequences` where nothing calls for more: vLLM's own default for small devices."""


class EngineSpec(SpecModel):
    """Settings of one engine. Fields that are left out are chosen for the device."""

    type: EngineType = "vllm"
    """The engine: vLLM, or a class of your own (`package.module:Name`) that keeps the promises of
    `rlhfless/functions/generation/engine.py`."""

    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """Memory for the KV cache of a CPU engine (1 GiB by default)."""

    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory that the engine may use. Ignored on CPU."""

    tensor_parallel_size: Processes | Literal["auto"] = "auto"
    """Devices per actor. `auto`: 1 on CPU cores; on GPUs the smallest of 1, 2, 4 and 8 with which the memory plan fits
    and the KV cache holds a batch of sequences."""

    max_sequences: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | Literal["auto"] = "auto"
    """Most sequences decoded at the same time. `auto`: 256; on GPUs up to 1,024 where a step has that many samples for
    each actor and the KV cache holds half of them at their longest."""

    max_batch_tokens: Tokens | Literal["auto"] = "auto"
    """Most tokens in one iteration of the engine, prefill included. `auto`: vLLM's default for the device, 16,384 on
    GPUs of 70 GiB and more (not A100) if the memory plan has room for it, 8,192 elsewhere."""

    eager: bool | None = None
    """Skip CUDA graphs and compilation. On by default on CPU, off on GPU."""

    flashinfer: bool = False
    """Use FlashInfer's kernels on GPUs: norms fused with the sums of tensor parallelism, attention on Blackwell. Every
    node then needs the packages `flashinfer-cubin` and `flashinfer-jit-cache`, of the version of `flashinfer-python`.
    Where it is off engines do not see FlashInfer, whatever compiler a node has."""

    core_process: bool | None = None
    """Run vLLM's scheduler and workers in processes of their own. On by default on GPUs and where an actor has several
    devices, which need it; off for one CPU core, where a single process is faster."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, by vLLM's names. They are passed on unchecked."""

    @property
    def sequence_limit(self) -> int:
        """`max_sequences`; 256 until `auto` is decided."""
        return USUAL_SEQUENCES if self.max_sequences == "auto" else self.max_sequences

    @property
    def batch_tokens(self) -> int:
        """`max_batch_tokens`; 8,192 until `auto` is decided."""
        return USUAL_BATCH_TOKENS if self.max_batch_tokens == "auto" else self.max_batch_tokens

    @property
    def devices_per_actor(self) -> int:
        """`tensor_parallel_size`; 1 until `auto` is decided."""
        return 1 if self.tensor_parallel_size == "auto" else self.tensor_parallel_size


Quantization = Literal["off", "fp8"]

MOST_DRAFTS = 32
"""vLLM verifies up to 128 drafts of a request at once; published acceptance is gone long before 32."""

DEEPEST, USUAL_DEPTH = 8, 4
"""Most drafts with depth `auto`: of responses that repeat others, and of models, whose published acceptance is low
beyond."""

DRAFTERS = ("draft_model", "eagle3")
"""Methods that need a model of their own."""


class SpeculationSpec(SpecModel):
    """Drafts: tokens that the engine guesses, and verifies several of in one pass. Samples are the same with and
    without them (docs/speculation.md)."""

    method: Literal["off", "auto", "ngram", "suffix", "draft_model", "eagle3", "mtp"] = "off"
    """`auto`: `suffix`, and with a number as `depth`, too, only where that saves time. `ngram`: what followed the same
    last tokens earlier in the prompt or the response. `suffix`: what followed the longest equal end in other responses
    to the prompt, those of earlier steps too. `draft_model`: a smaller model with the same tokenizer. `eagle3`: a head
    that reads the model's hidden states. `mtp`: the heads that the model itself has for that. On GPUs `suffix` and
    `auto` take vLLM's older model runner, without asynchronous scheduling, and at most 32 sequences per actor."""

    depth: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | Literal["auto"] = "auto"
    """Most drafts of a response in one pass; `suffix` takes fewer where they are rejected. `auto`: as many as save
    time, or none, which each engine measures for each number of responses side by side. On GPUs only `suffix` and
    `auto` measure it, and the other methods draft 4."""

    model: Annotated[HubPath, Field(min_length=1)] | None = None
    """Folder or hub name of the draft model or of the head."""

    @model_validator(mode="after")
    def _has_the_model_that_its_method_needs(self) -> SpeculationSpec:
        if self.method in DRAFTERS and self.model is None:
            problem = Problem("model", f"method {self.method} needs a model", "name its folder, or its name on the hub")
            raise several([problem])
        if self.method not in DRAFTERS and self.model is not None:
            what = f"{self.model!r} would not be used: method {self.method} has no model of its own"
            raise several([Problem("model", what, "leave it out, or set method to draft_model or eagle3")])
        return self

    @property
    def on(self) -> bool:
        return self.method != "off"

    @property
    def most(self) -> int:
        """Most drafts of a response in one pass."""
        if not self.on:
            return 0
        if self.depth == "auto":
            return DEEPEST if self.remembers else USUAL_DEPTH
        return self.depth

    @property
    def measured(self) -> bool:
        """Whether engines draft only as deep as they have measured to save time."""
        return "auto" in (self.method, self.depth)

    @property
    def remembers(self) -> bool:
        """Whether drafts come from other responses to the prompt."""
        return self.method in ("suffix", "auto")

    @property
    def has_weights(self) -> bool:
        """Whether drafts come from weights beside the model's own, which no version holds."""
        return self.method in (*DRAFTERS, "mtp")


class GenerationSpec(SpecModel):
    """Sampling."""

    max_tokens: Tokens = 1024
    """Longest response. By default at most half of the model's context."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The learner divides its logits by the same number."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Any value but 1 biases the ratio between learner and engine, and gives a warning."""

    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Sample among the k likeliest tokens; 0 for all. Any value but 0 biases the ratio, and gives a warning."""

    stop: Annotated[tuple[str, ...], Field(max_length=MOST_STOPS)] = ()
    """Texts that end a response, in addition to the end-of-sequence token. The response ends with the token that
    completes the text, which rewards see and the policy learns."""

    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MOST_STOPS)] = ()
    """Tokens that end a response, in addition to the end-of-sequence token. Rewards see them in the response's text,
    unless they close a turn, as `<|im_end|>` does."""

    batch_invariant: bool = False
    """On GPUs: kernels whose result for a sequence does not depend on what else is in the batch
    (VLLM_BATCH_INVARIANT), so that a sample has the same tokens on however many actors and after a move. Engines are
    slower with them, and vLLM refuses models and attention kernels that have none. CPU engines draw the same tokens
    without it."""

    quantization: Quantization = "off"
    """Format of the weights and products of the engines' linear layers; the learner keeps its own, and embeddings,
    output head and KV that of `model.dtype`. Each version is quantised as it is loaded, with a scale for each output of
    a layer and for each token. Samples are then off policy, so `algorithm.importance` is needed. Which devices have
    which format is in docs/accelerators.md; CPUs have both."""

    progress_interval_s: Duration = 0.5
    """How often an actor reports the tokens produced so far."""

    speculation: SpeculationSpec = SpeculationSpec()

    engine: EngineSpec = EngineSpec()

    @model_validator(mode="after")
    def _the_engine_can_quantise(self) -> GenerationSpec:
        quantization, engine = self.quantization, self.engine
        problems = []
        if quantization != "off" and engine.type != "vllm":
            what = f"{quantization} is for vLLM, and generation.engine.type is {engine.type}"
            problems.append(Problem("quantization", what, "set it to off"))
        if quantization != "off" and self.speculation.has_weights:
            what = f"{quantization} was not tried beside the weights of drafts of {self.speculation.method}"
            problems.append(Problem("quantization", what, "set it to off, or speculation.method to ngram or suffix"))
        if problems:
            raise several(problems)
        return self

    @model_validator(mode="after")
    def _the_engine_can_speculate(self) -> GenerationSpec:
        method, engine = self.speculation.method, self.engine
        problems = []
        if self.speculation.on and engine.type != "vllm":
            what = f"{method} is for vLLM, and generation.engine.type is {engine.type}"
            problems.append(Problem("speculation.method", what, "set it to off"))
        if problems:
            raise several(problems)
        return self
