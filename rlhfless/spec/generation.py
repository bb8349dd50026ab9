"""How responses are sampled, the engine settings, and the order of generation and training.

The *staleness* of a sample is the number of versions the learner has published since the version that generated it,
counted when the learner takes the sample. It is 0 if the sample was generated with the newest weights and is learned
before the next version.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhfless.spec.base import MOST_TOKENS, Duration, HubPath, Processes, SpecModel, Tokens
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import several
from rlhfless.spec.extension import PluginField, PluginSpec
from rlhfless.spec.imports import IMPORT_PATH, TargetError, load_target

MOST_SEQUENCES = 65_536
"""Far above what an engine decodes at a time. The engine allocates tables of this size."""

MOST_STOPS = 256
"""The engine compares each token with all stop tokens."""


ENGINE_METHODS = ("start", "sample", "abort", "progress", "load", "logprobs", "require_heartbeat", "kill", "stop")


def _engine(name: str) -> str:
    """Return the name of a built-in engine or of a class with an engine's methods. Raises PydanticCustomError
    otherwise."""
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
"""Values used until `auto` is decided: vLLM's own defaults for small devices."""


class EngineSpec(SpecModel):
    """Settings of one engine. Omitted keys are chosen for the device."""

    type: EngineType = "vllm"
    """The engine: `vllm`, or your own class (`package.module:Name`) with the interface described in
    `rlhfless/functions/generation/engine.py`."""

    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """KV cache size of a CPU engine, in GiB. `null`: 1 GiB."""

    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of a GPU's memory that the engine may use. Ignored on CPU."""

    tensor_parallel_size: Processes | Literal["auto"] = "auto"
    """Devices per actor. `auto`: on CPU cores, 1; on GPUs, the smallest of 1, 2, 4 and 8 for which the memory plan fits
    and the KV cache holds a batch of sequences."""

    max_sequences: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | Literal["auto"] = "auto"
    """Maximum sequences decoded at the same time. `auto`: 256; on GPUs up to 1,024, if a step has that many samples per
    actor and the KV cache holds half of them at full length."""

    max_batch_tokens: Tokens | Literal["auto"] = "auto"
    """Maximum tokens per engine iteration, including prefill. `auto`: vLLM's default for the device, which is 16,384 on
    GPUs with at least 70 GiB (except A100) if the memory plan has room, and 8,192 elsewhere."""

    eager: bool | None = None
    """Disable CUDA graphs and compilation. `null`: on for CPU, off for GPU."""

    flashinfer: bool = False
    """Use FlashInfer kernels on GPUs: norms fused with the tensor-parallel all-reduce, and attention on Blackwell.
    Every node needs the packages `flashinfer-cubin` and `flashinfer-jit-cache`, in the same version as
    `flashinfer-python`. When off, engines do not use FlashInfer, even if a node has a compiler for it."""

    core_process: bool | None = None
    """Run vLLM's scheduler and workers in separate processes. `null`: on for GPUs and for actors with several devices,
    which require it; off for one CPU core, where a single process is faster."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional vLLM engine arguments, by their vLLM names. Passed through without validation."""

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
"""vLLM verifies up to 128 draft tokens per request, but published acceptance rates drop to zero well before 32."""

DEEPEST, USUAL_DEPTH = 8, 4
"""Maximum draft tokens with depth `auto`: for drafts from other responses, and for draft models, whose published
acceptance is low beyond that."""

DRAFTERS = ("draft_model", "eagle3")
"""Methods that need their own model."""


class SpeculationSpec(SpecModel):
    """Speculative decoding: the engine drafts several tokens and verifies them in one pass. It does not change the
    samples (docs/speculation.md)."""

    method: Literal["off", "auto", "ngram", "suffix", "draft_model", "eagle3", "mtp"] = "off"
    """Source of draft tokens. `off`: no drafts. `ngram`: the text that followed the same last tokens earlier in the
    prompt or response. `suffix`: the text that followed the longest matching suffix in other responses to the same
    prompt, including those of earlier steps. `auto`: `suffix`, used only where it saves time, even with a number as
    `depth`. `draft_model`: a smaller model with the same tokenizer. `eagle3`: a head that reads the model's hidden
    states. `mtp`: the model's own multi-token prediction heads. On GPUs, `suffix` and `auto` use vLLM's older model
    runner, without asynchronous scheduling and with at most 32 sequences per actor."""

    depth: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | Literal["auto"] = "auto"
    """Maximum draft tokens per response and pass. `suffix` uses fewer when drafts are rejected. `auto`: each engine
    measures which depth saves time, possibly none, for each number of concurrent responses. On GPUs, only `suffix` and
    `auto` measure; other methods draft 4."""

    model: Annotated[HubPath, Field(min_length=1)] | None = None
    """Folder or hub name of the draft model or head. Only for methods `draft_model` and `eagle3`, which require it."""

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
        """Maximum draft tokens per response and pass."""
        if not self.on:
            return 0
        if self.depth == "auto":
            return DEEPEST if self.remembers else USUAL_DEPTH
        return self.depth

    @property
    def measured(self) -> bool:
        """Whether engines draft only as deep as they measured to save time."""
        return "auto" in (self.method, self.depth)

    @property
    def remembers(self) -> bool:
        """Whether drafts come from other responses to the prompt."""
        return self.method in ("suffix", "auto")

    @property
    def has_weights(self) -> bool:
        """Whether drafts come from separate weights, which weight updates do not include."""
        return self.method in (*DRAFTERS, "mtp")


class GenerationSpec(SpecModel):
    """How responses are sampled."""

    max_tokens: Tokens = 1024
    """Maximum response length in tokens. If omitted, half of the context for models whose context is no longer than the
    default."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The learner divides its logits by the same value."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling threshold. A value other than 1 biases the ratio between learner and engine probabilities; a
    warning is issued."""

    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Sample from the k most likely tokens; 0: all tokens. A value other than 0 biases the ratio between learner and
    engine probabilities; a warning is issued."""

    stop: Annotated[tuple[str, ...], Field(max_length=MOST_STOPS)] = ()
    """Strings that end a response, in addition to the end-of-sequence token. The response ends with the token that
    completes the string. Rewards see that token, and the policy learns it."""

    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MOST_STOPS)] = ()
    """Token ids that end a response, in addition to the end-of-sequence token. Rewards see them in the response text,
    unless they close a turn, like `<|im_end|>`."""

    batch_invariant: bool = False
    """On GPUs, use batch-invariant kernels (VLLM_BATCH_INVARIANT), so that a sample has the same tokens on any number
    of actors and after a migration. They make engines slower, and vLLM refuses models and attention backends without
    such kernels. CPU engines generate the same tokens in any case."""

    quantization: Quantization = "off"
    """Format of the weights and products of the engines' linear layers. The learner is not affected; embeddings, output
    head and KV cache stay in `model.dtype`. Each version is quantized as it is loaded, with a scale per layer output
    and per token. Samples are then off-policy, so `algorithm.importance` is required. See docs/accelerators.md for the
    formats that each device supports; CPUs support all of them."""

    lora: Literal["auto", "adapter", "merged"] = "auto"
    """What a version is in a run with `model.lora`. `adapter`: the adapter alone; engines read the frozen weights from
    `model.path` once, and samples in progress keep their version while the next one loads. `merged`: all weights, with
    the adapter merged into them. `auto`: `adapter` where engines can serve it, see docs/lora.md."""

    progress_interval_s: Duration = 0.5
    """Interval in seconds at which an actor reports the tokens generated so far."""

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
            what = f"{quantization} has not been tried with draft weights of {self.speculation.method}"
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


MOST_STALENESS = 16
"""A version occupies memory in the store until no step generates with it, and no published run goes beyond 8."""


class SyncSpec(SpecModel):
    """One step at a time: each step generates with the weights published by the previous step."""

    type: Literal["sync"] = "sync"

    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0
    """Maximum steps that are generated while an earlier step is not yet learned."""

    @property
    def max_staleness(self) -> int:
        """Maximum staleness of a sample, in versions."""
        return 0


class PartialSpec(SpecModel):
    """One step at a time, with partial rollouts: a step stops generating when `prompts_per_step` groups are complete,
    and learns from these. Unfinished groups keep their tokens and continue in the next step with its weights. Each step
    learns from the same number of groups, and every started group is learned before the run ends; groups with long
    responses are learned a few steps after they were started."""

    type: Literal["partial"] = "partial"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0

    ahead: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Additional groups in progress, as a fraction of `prompts_per_step`. This many groups are unfinished when a step
    stops generating. The first step starts them; the last steps start fewer."""

    max_staleness: Annotated[int, Field(ge=1, le=MOST_STALENESS)] = 2
    """Maximum staleness of a token, in versions. A step waits for groups that were started this many steps ago."""


class OneStepOffSpec(SpecModel):
    """Short for `async` with `max_staleness: 1` and `in_flight: false`: while the learner trains on a step, the next
    one is generated with the weights from before that step. All steps except the first learn from samples that are one
    version old."""

    type: Literal["one_step_off"] = "one_step_off"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 1

    @property
    def max_staleness(self) -> int:
        """See SyncSpec."""
        return 1


class AsyncSpec(SpecModel):
    """Generate several steps at once, ahead of the learner, which processes them in order. No sample is dropped: a step
    starts only if it cannot exceed `max_staleness`."""

    type: Literal["async"] = "async"

    max_staleness: Annotated[int, Field(ge=1, le=MOST_STALENESS)] = 2
    """Maximum staleness of a sample, in versions. This many steps are generated ahead of the learner."""

    in_flight: bool = True
    """`true`: actors load each version as soon as it is published, during generation. Samples keep their tokens, their
    KV cache is recomputed, and they continue with the new weights. `false`: engines load weights only between rollouts,
    so that each sample comes from a single version; rollouts of later steps wait for the oldest."""

    @property
    def steps_ahead(self) -> int:
        """See SyncSpec."""
        return self.max_staleness


IN_TURN = frozenset({"sync", "partial"})
"""Types without overlap: a step is generated, then learned."""


class OwnScheduleSpec(PluginSpec):
    """Base class for the settings of your own schedule; see docs/extending.md."""

    in_flight: ClassVar[bool] = False
    """See AsyncSpec."""

    @property
    def max_staleness(self) -> int:
        """Maximum staleness of a sample, in versions; the learner keeps old versions for late actors accordingly.
        Override it if your schedule generates more than one step ahead, or none."""
        return 1

    @property
    def steps_ahead(self) -> int:
        """See SyncSpec."""
        return self.max_staleness


ScheduleSpec = Annotated[
    SyncSpec | PartialSpec | OneStepOffSpec | AsyncSpec | OwnScheduleSpec,
    PluginField(
        "schedule",
        built_in=(SyncSpec, PartialSpec, OneStepOffSpec, AsyncSpec),
        methods=("drive",),
        settings=OwnScheduleSpec,
    ),
]
