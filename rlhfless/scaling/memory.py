"""Memory in bytes of each part of a run, from the sizes of its model. Pure. The docstring of each function gives its
formula.

Symbols: P parameters, L layers, h hidden size, q and k the widths of queries and keys, I the width of the gated MLPs
that a token passes through (with experts: all experts it is routed to), V the vocabulary, T tokens, b bytes per number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import DType, ModelSpec, RunSpec, TrainingSpec

GIB = 2**30

PUBLISH = "publish"
"""The learner phase that publishes weights."""

PROCESS = "process"
"""The part of a phase that every process holds."""

PUBLISHED = "weights on their way"
"""Published weights in transit, only with `cuda_ipc`: the weights that a rank gathers and the bucket from which engines
copy them. Stays on the device while the learner sleeps."""

NCCL = "NCCL"
"""The part that a rank's communicators hold, even while it sleeps."""

STAYS = frozenset({PROCESS, PUBLISHED, NCCL})
"""The parts of a phase that stay on the device while the function sleeps."""

PROCESS_BYTES = int(0.8 * GIB)
"""Bytes of each process on a GPU outside torch's own accounting: the CUDA context with its kernels (0.5 GiB on
data-centre GPUs) and cuBLAS workspaces. Measured with one rank on an H100 (docs/gpus.md)."""

COMMUNICATOR_BYTES = int(0.76 * GIB)
"""NCCL buffers of a communicator of several ranks: the middle of 0.56 to 0.96 GiB over eight GPUs (sglang#30908,
vllm#46234)."""

TENSOR_PARALLEL_BYTES = GIB
"""NCCL buffers of all communicators of an engine on several devices (vllm#51485, with four); released during sleep
(`enable_nccl_comm_suspend`)."""

GRAPH_BYTES = int(0.6 * GIB)
"""CUDA graphs of an engine. vLLM logs 0.3 to 1 GiB at capture for models of 0.5 B to 8 B parameters. An assumption
until measured on a GPU."""

LOGITS_CHUNK_ELEMENTS = 2**25
"""Default size of the largest `[positions, vocabulary]` block of logits (`learner.logits_mib`): 128 MiB in float32.
With a vocabulary of 150,000 that is 220 rows; all logits of 8192 tokens at once would take 5 GB."""

CPU_KV_GIB = 1.0
"""Default KV cache of an engine on CPU cores; vLLM would reserve nearly all memory of the machine."""

LOGITS_COPIES = 5
"""Blocks of logits alive at once in a backward pass of the head: logits, scaled logits, log-probabilities, and the
gradients of two of them (rlhfless/functions/lm_head.py)."""

SAMPLER_COPIES = 3
"""Float32 blocks `[sequences, V]` of vLLM's sampler: logits, log-probabilities, probabilities."""

IN_FLIGHT_BATCHES = 2
"""Batches that an engine may have scheduled but not finished: vLLM schedules one ahead."""


def kept_versions(steps_ahead: int) -> int:
    """Return how many versions the learner keeps for engines.

    These are the versions that steps may still generate with, and at least the newest two, since a slow reader may
    still be opening the older one.
    """
    return max(2, steps_ahead + 1)


def stored_versions(spec: RunSpec) -> int:
    """Return the maximum number of versions in the learner's store.

    These are the kept ones, the one being written, and the moving average of the weights if enabled.
    """
    return kept_versions(spec.schedule.steps_ahead) + 1 + (spec.learner.average_decay is not None)


CACHED_VERSIONS = 3
"""Maximum number of versions in a node's cache of an HTTP store: the newest two, and the one being read."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of a function's memory on one device."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """The memory of a function on one device during one kind of work."""

    name: str
    parts: tuple[MemoryPart, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def on_device(
    phases: Sequence[MemoryPhase], kind: str, ranks: int = 1, copies: int = 1, expert_ranks: int = 1
) -> tuple[MemoryPhase, ...]:
    """Return the phases of a separate process on a device of a kind.

    On a GPU it also holds PROCESS_BYTES and the communicators of its ranks: one, or with copies (HSDP) one within a
    copy and one across copies. `expert_ranks` that divide experts have one more, and so have ranks with equal experts.
    """
    on_gpu = kind != CPU_KIND
    communicators = 0 if ranks == 1 else 1 if copies == 1 else 2
    if expert_ranks > 1:
        communicators += 1 if ranks == copies * expert_ranks else 2
    process = MemoryPart(PROCESS, PROCESS_BYTES * on_gpu), MemoryPart(NCCL, COMMUNICATOR_BYTES * communicators * on_gpu)
    return tuple(MemoryPhase(phase.name, (*phase.parts, *process)) for phase in phases)


def mlp_width(shape: ModelShape) -> int:
    """Return I: the width of the MLPs that one token passes through in a layer, averaged over the layers.

    A gated MLP of width I has 3 h I parameters.
    """
    active = shape.dense_mlp + shape.experts_per_token * shape.expert_mlp
    return round(active / (3 * shape.hidden * shape.layers))


def layer_token_bytes(shape: ModelShape, dtype: DType) -> int:
    """Return the bytes that one layer keeps per token for the backward pass.

        float32   24 h + 16 q + 16 k + 16 I + 8 e h
        16 bit    16 h + 10 q + 10 k +  8 I + 4 e h

    Counted with torch's saved-tensor hooks on Llama, Qwen2 and Qwen3 of transformers 5 with SDPA; the formulas fit to 2
    % (tests/prepare). Models without a norm of queries and keys keep 8 (q + k) less in float32. Attention keeps no
    matrix (Korthikanti et al., arXiv 2205.05198, section 4, counts 34 h + 5 a s for GPT with one). Linear attention
    layers are counted like the others; this has not been measured. A token's e experts, averaged over the layers, keep
    its hidden state and their outputs, whether they are divided over ranks or not.
    """
    queries, keys = shape.query_width, shape.key_width
    routed = routed_copies(shape) * 2 * DTYPE_BYTES[dtype] * shape.hidden
    if dtype == "float32":
        return 24 * shape.hidden + 16 * (queries + keys) + 16 * mlp_width(shape) + round(routed)
    return 16 * shape.hidden + 10 * (queries + keys) + 8 * mlp_width(shape) + round(routed)


def routed_copies(shape: ModelShape) -> float:
    """Return the experts that a token passes in a layer, averaged over the layers."""
    return shape.experts_per_token * shape.expert_layers / shape.layers


def sharing_token_bytes(shape: ModelShape, dtype: DType, *, backward: bool, on_gpu: bool = False) -> int:
    """Return the temporary bytes per token of one layer's attention while it computes shared prefixes once.

    The tensors kept for the backward pass are the same as those of torch's own attention.

        forward     q (4 + 8 b)      the output in float32; queries, keys and values by segments, and their output, each
                                     up to 3/2 long with padding; keys and values for all heads
        backward    q (12 + 14 b)    three gradients in float32; five tensors by segments, and their three gradients;
                                     keys and values for all heads
        on a GPU, in 16 bits         FlashAttention of rows without padding or copies (computed, not measured):
        forward     2 b q            the outputs of own segments and of prefixes, before they are joined
        backward    q (4 + 5 b)      a gradient in float32 inside the kernel; the output's gradient, two of the queries,
                                     and those of keys and values for all heads
    """
    queries, b = shape.query_width, DTYPE_BYTES[dtype]
    if on_gpu and dtype != "float32":
        return queries * (4 + 5 * b if backward else 2 * b)
    return queries * (12 + 14 * b if backward else 4 + 8 * b)


def activation_bytes(shape: ModelShape, tokens: int, dtype: DType, *, checkpointing: bool) -> int:
    """Return the bytes that the decoder keeps for the backward pass of T tokens, in a format of b bytes.

    all layers       L T layer_token_bytes
    checkpointing    L T b h               (the layers' inputs; each layer is recomputed when its gradient is due)
    """
    if checkpointing:
        return shape.layers * tokens * DTYPE_BYTES[dtype] * shape.hidden
    return shape.layers * tokens * layer_token_bytes(shape, dtype)


def with_scores(
    phases: Sequence[MemoryPhase], shape: ModelShape, tokens: int, longest: int, dtype: DType, kept_layers: int
) -> tuple[MemoryPhase, ...]:
    """Add the scores of eager attention to all phases that process T tokens in sequences of W.

    They are added if the model uses eager attention or may use it. Bytes per score, for H T W scores in a format of b
    bytes:

        forward     4 + 3 b                         products, masked, softmax in float32, and cast
        learn       (4 + b) layers + 8 + 2 b        the last two are kept for each layer, or for one (checkpointing);
                                                    their gradients in the backward pass
    """
    if shape.attention_form == "fused":
        return tuple(phases)
    scores, b = shape.heads * max(tokens, longest) * longest, DTYPE_BYTES[dtype]
    number = {"learn": (4 + b) * kept_layers + 8 + 2 * b, "values": 4 + 3 * b, "logprobs": 4 + 3 * b}
    name = "attention scores" if shape.attention_form == "eager" else "attention scores (at most; decided at load)"
    return tuple(
        replace(phase, parts=(*phase.parts, MemoryPart(name, scores * number[phase.name])))
        if phase.name in number
        else phase
        for phase in phases
    )


def logits_bytes(shape: ModelShape, tokens: int, chunk_elements: int, copies: int) -> int:
    """Return the bytes of the output head.

    These are `copies` blocks of 4 min(T V, chunk) bytes, and the hidden states of the tokens with their gradient, 8 T
    h.
    """
    return copies * 4 * min(tokens * shape.vocabulary, chunk_elements) + 8 * tokens * shape.hidden


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """A frozen model with adapters (rlhfless.functions.lora)."""

    parameters: int
    """Parameters of the adapters."""
    dtype: DType
    """Number format of the layers' frozen weights."""
    started: bool = False
    """Training starts from an adapter, which is kept as the reference."""

    @classmethod
    def of(cls, shape: ModelShape, model: ModelSpec) -> FrozenBase | None:
        """Return the base and adapters of a model; None if all weights are trained.

        An adapter of rank r on a layer [out, in] has r (in + out) parameters. With q, k, v, o and a gated MLP as
        targets, that is r L (4 h + 2 q + 2 k + 3 (h + I)). All layers count, even if `targets` names fewer. Routed
        experts have no adapters.
        """
        if model.lora is None:
            return None
        dense = shape.dense_mlp // (3 * shape.hidden * shape.layers)
        mlp = 3 * (shape.hidden + dense) if dense else 0
        of_layer = 4 * shape.hidden + 2 * shape.query_width + 2 * shape.key_width + mlp
        return cls(model.lora.rank * shape.layers * of_layer, model.dtype, model.lora.path is not None)


@dataclass(frozen=True, slots=True)
class Sharded:
    """How a trained model is split over ranks."""

    ranks: int = 1
    """Ranks that the states are sharded over."""
    dtype: DType = "float32"
    """Number format of the layers' matrix products."""
    checkpointing: bool = False
    offload: bool = False
    """Master weights, gradients and optimiser states are in host memory."""
    exact_head: bool = False
    """Parameters outside layers are gathered in float32."""
    sharing: bool = False
    """Shared prefixes may be computed once (rlhfless.functions.prefix_attention)."""
    on_gpu: bool = False
    """Rows are computed by FlashAttention."""
    copies: int = 1
    """Number of replicated sets of `ranks` ranks (HSDP)."""
    values: bool = False
    """The head outputs a single value, as a critic's does: no logits, and no gradient of a head."""
    averaged: bool = False
    """A moving average of the weights is kept."""
    adapter: FrozenBase | None = None
    """Only adapters are trained."""
    expert_ranks: int = 1
    """Ranks that divide the experts (expert parallelism)."""

    @property
    def alone(self) -> bool:
        """Return whether a single rank keeps gathered weights and a step's gradients whole
        (rlhfless.functions.sharding)."""
        return self.ranks * self.copies == 1 and not self.offload


def sharded(
    training: TrainingSpec, kind: str = CPU_KIND, adapter: FrozenBase | None = None, experts: int = 0
) -> Sharded:
    """Return how a trained model is split, from its section of the spec. `experts`: ModelShape.divisible_experts."""
    return Sharded(
        training.split_over(training.world_size),
        training.dtype,
        training.recomputes,
        training.offload,
        sharing=training.share_prefixes,
        on_gpu=kind != CPU_KIND,
        copies=training.copies,
        averaged=training.average_decay is not None,
        adapter=adapter,
        expert_ranks=training.experts_over(training.world_size, experts),
    )


def kept_bytes(weights_bytes: int, *, averaged: bool) -> int:
    """Return the bytes that a checkpoint copies: float32 master weights, AdamW's two moments, any moving average."""
    return weights_bytes * (4 if averaged else 3)


def learner_states_bytes(
    shape: ModelShape, ranks: int = 1, *, averaged: bool = False, adapter: FrozenBase | None = None
) -> tuple[MemoryPart, ...]:
    """Return the states of one of N ranks: float32 master weights, gradients, and AdamW's two moments, 16 P / N.

    Rajbhandari et al. (ZeRO, arXiv 1910.02054, section 3.1) count the same 16 and shard them the same way in stage 3. A
    moving average of the weights adds 4 P / N.

    With adapters of A parameters, which each rank holds whole, these are 16 A (20 A), and the frozen base has no
    gradients or moments: (4 R + b (P - R)) / N.
    """
    if adapter is not None:
        root = root_parameters(shape)
        base = 4 * root + DTYPE_BYTES[adapter.dtype] * (shape.parameters - root)
        frozen: tuple[MemoryPart, ...] = (MemoryPart("frozen weights", math.ceil(base / ranks)),)
        p = adapter.parameters
        if adapter.started:
            frozen = (*frozen, MemoryPart("adapter of the reference", 4 * p))
    else:
        frozen = ()
        p = math.ceil(shape.parameters / ranks)
    moments = MemoryPart("AdamW", 8 * p)
    average = (MemoryPart("average of the weights", 4 * p),) if averaged else ()
    return *frozen, MemoryPart("master weights", 4 * p), MemoryPart("gradients", 4 * p), moments, *average


def layer_parameters(shape: ModelShape, expert_ranks: int = 1) -> int:
    """Return G: the parameters of one decoder layer, which is gathered as a whole.

    Of experts that ranks divide, each gathers its own.
    """
    return (shape.attention + shape.dense_mlp + shape.experts * shape.expert_mlp // expert_ranks) // shape.layers


def root_parameters(shape: ModelShape) -> int:
    """Return R: the parameters outside layers, i.e. embeddings and head."""
    return shape.head * (1 if shape.tied else 2)


def learn_phases(shape: ModelShape, tokens: int, how: Sharded, chunk_elements: int) -> tuple[MemoryPhase, ...]:
    """Return the phases of one of N learner ranks that shard the states, for micro-batches of T tokens.

    b and r are the bytes per number of gathered layers and of gathered parameters outside layers; A are the
    activations. The states are on the device unless they are offloaded. In addition, `learn` holds the largest of three
    moments:

        head       r R + b G + A + (r + 4) h V + logits             the head's gradient, and its sum in float32 if the
                                                                    logits take several chunks
        layer      r R + 2 b G + r h V + 8 G + A + T layer_token_bytes    its weights and the next one's, gathered; the
                                                                    head's gradient; its own, during and after the
                                                                    reduction; and T sharing_token_bytes
        root       (r + 4) R                                        after all layers, the last gradient to be reduced

    A frozen base has no gradients: its last moment is `gather`, 2 (r R + b G), while parameters are copied out of the
    messages of several ranks. A single rank has b P gathered in all three moments, and its last moment takes r h V
    + 4 R: a copy of R's gradients. `publish` holds no gradients, but the probe's exact weights: 4 (R + G + h V).
    `restore` holds no gradients. Checked against the learner's own code (rlhfless.functions.memory_dry_run) in
    tests/prepare.
    """
    frozen = how.adapter is not None
    states = learner_states_bytes(shape, how.ranks, averaged=how.averaged, adapter=how.adapter)
    if how.offload:  # adapters stay on the device
        states = tuple(part for part in states if part.name != "frozen weights") if frozen else ()
    resting = tuple(part for part in states if part.name != "gradients")
    b, r = DTYPE_BYTES[how.dtype], 4 if how.exact_head else DTYPE_BYTES[how.dtype]
    layer, root, head = (
        layer_parameters(shape, how.expert_ranks),
        root_parameters(shape),
        0 if how.values else shape.head,
    )
    kept = activation_bytes(shape, tokens, how.dtype, checkpointing=how.checkpointing)
    recomputed = tokens * layer_token_bytes(shape, how.dtype) if how.checkpointing else 0
    sharing = sharing_token_bytes(shape, how.dtype, backward=True, on_gpu=how.on_gpu) * tokens * how.sharing
    logits = 8 * tokens * shape.hidden if how.values else logits_bytes(shape, tokens, chunk_elements, LOGITS_COPIES)
    whole = b * (shape.parameters - root) + r * root
    first, two = r * root + b * layer, r * root + 2 * b * layer
    gathered = {"head": first, "layer": two, "root": 0, "gather": 2 * first}
    head_gradient = 0 if frozen else (r + 4 * (tokens * shape.vocabulary > chunk_elements)) * head
    last = r * head + 4 * root if how.alone else (r + 4) * root
    moments: dict[str, tuple[MemoryPart, ...]] = {
        "head": (
            MemoryPart("activations", kept),
            MemoryPart("head's gradient", head_gradient),
            MemoryPart("logits", logits),
        ),
        "layer": (
            MemoryPart("activations", kept + recomputed),
            MemoryPart("attention to shared prefixes", sharing),
            MemoryPart("gradients of a layer", 0 if frozen else r * head + 8 * layer),
        ),
        **({"gather": ()} if frozen else {"root": (MemoryPart("gradients of embeddings and head", last),)}),
    }
    learning = [
        MemoryPhase("learn", (*states, MemoryPart("gathered weights", whole if how.alone else gathered[name]), *parts))
        for name, parts in moments.items()
    ]
    return (
        max(learning, key=lambda phase: phase.size_bytes),
        MemoryPhase(
            PUBLISH,
            (
                *resting,
                MemoryPart(
                    "exact weights of a layer, embeddings and head", 4 * (root + layer_parameters(shape) + head)
                ),
            ),
        ),
        MemoryPhase("restore", resting),
    )


def without_head(shape: ModelShape) -> ModelShape:
    """Return the shape of a critic of these sizes: it keeps the embeddings, and its own head is a single row."""
    return replace(shape, tied=True)


def value_phases(shape: ModelShape, tokens: int, how: Sharded) -> tuple[MemoryPhase, ...]:
    """Return the phases of one of N ranks of a critic.

    They are those of a learner of a model without an output head, except publication, plus `values`, a forward pass of
    T tokens: the states without gradients, the gathered weights, and twice one layer's activations, where the second
    may be replaced by the larger memory of prefix sharing.
    """
    body = without_head(shape)
    learn, _, restore = learn_phases(body, tokens, replace(how, values=True), LOGITS_CHUNK_ELEMENTS)
    layer = layer_token_bytes(shape, how.dtype)
    sharing = sharing_token_bytes(shape, how.dtype, backward=False, on_gpu=how.on_gpu) * how.sharing
    passing = max(layer, sharing)
    gathered = next(part for part in learn.parts if part.name == "gathered weights")
    if not how.alone:
        size = DTYPE_BYTES[how.dtype] * (root_parameters(body) + 2 * layer_parameters(body, how.expert_ranks))
        gathered = MemoryPart(gathered.name, size)
    passed = (gathered, MemoryPart("activations", tokens * (layer + passing)))
    return learn, MemoryPhase("values", (*restore.parts, *passed)), restore


def reference_phase(
    shape: ModelShape,
    tokens: int,
    dtype: DType,
    chunk_elements: int,
    *,
    sharing: bool,
    ranks: int = 1,
    on_gpu: bool = False,
) -> MemoryPhase:
    """Return the phase of one of N ranks of the reference.

    It holds b P / N of weights, gathered weights (`gathered_bytes`), one layer at a time for T tokens, and the logits
    of a forward pass. The layer's tokens count twice: its outputs, and its inputs or the memory of prefix sharing,
    whichever is larger.
    """
    layer = layer_token_bytes(shape, dtype)
    passing = max(layer, sharing_token_bytes(shape, dtype, backward=False, on_gpu=on_gpu) * sharing)
    return MemoryPhase(
        "logprobs",
        (
            MemoryPart("weights", DTYPE_BYTES[dtype] * math.ceil(shape.parameters / ranks)),
            MemoryPart("gathered weights", gathered_bytes(shape, root_parameters(shape), dtype, ranks)),
            MemoryPart("activations", tokens * (layer + passing)),
            MemoryPart("logits", logits_bytes(shape, tokens, chunk_elements, LOGITS_COPIES - 2)),
        ),
    )


def gathered_bytes(shape: ModelShape, root: int, dtype: DType, ranks: int) -> int:
    """Return the gathered bytes of a sharded, frozen model, b (R + 2 G).

    These are the parameters outside layers, one layer, and the prefetched next layer. A single rank gathers nothing.
    """
    return DTYPE_BYTES[dtype] * (root + 2 * layer_parameters(shape)) if ranks > 1 else 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward model and its micro-batches."""

    shape: ModelShape
    tokens: int
    """Tokens per micro-batch."""
    dtype: DType


def score_phase(models: Sequence[Scored], ranks: int) -> MemoryPhase:
    """Return the phase of one of N ranks of the reward models.

    It holds the weights of all models without an output head, b (P - R + h V) / N. The models score one after the
    other, so only the largest adds gathered weights (here R is h V) and twice one layer for T tokens.
    """

    def body(shape: ModelShape) -> int:
        return shape.parameters - root_parameters(shape) + shape.head

    weights = sum(DTYPE_BYTES[each.dtype] * math.ceil(body(each.shape) / ranks) for each in models)
    gathered = (gathered_bytes(each.shape, each.shape.head, each.dtype, ranks) for each in models)
    passing = (2 * each.tokens * layer_token_bytes(each.shape, each.dtype) for each in models)
    return MemoryPhase(
        "score",
        (
            MemoryPart("weights", weights),
            MemoryPart("gathered weights", max(gathered, default=0)),
            MemoryPart("activations", max(passing, default=0)),
        ),
    )


def kv_token_bytes(shape: ModelShape, dtype: DType, tensor_parallel: int) -> int:
    """Return the KV bytes of one token on each device, over all layers with keys: 2 L k b / t.

    A key head needed by several devices is replicated on each of them, and so is latent KV.
    """
    return round(shape.kv_layers * shape.kv_width / min(tensor_parallel, shape.kv_heads) * DTYPE_BYTES[dtype])


def kv_sequence_bytes(shape: ModelShape, dtype: DType, tensor_parallel: int, tokens: int, batch_tokens: int) -> int:
    """Return the KV bytes on each device that vLLM reserves for a sequence of T tokens, prefilled in batches of B.

    F layers that attend to all tokens and W layers with a window of w tokens hold

        (F T + W min(T, w - 1 + 2 B)) 2 k b / t

    because a windowed layer frees tokens behind its window only after the two batches in flight are done. With both
    kinds, F and W are padded to multiples of one group's size (`kv_cache_utils` of vLLM 0.32, which adds up to one
    block per group to this figure). Linear layers hold a state of constant size.
    """
    per_token = kv_token_bytes(shape, dtype, tensor_parallel)
    if shape.windows is None:
        return tokens * per_token + math.ceil(shape.state_bytes / tensor_parallel)
    full, windowed = _padded(shape.full_layers, shape.windows.layers)
    held = min(tokens, shape.windows.tokens - 1 + IN_FLIGHT_BATCHES * batch_tokens)
    return math.ceil((full * tokens + windowed * held) * per_token / shape.layers)


def _padded(full: int, windowed: int) -> tuple[int, int]:
    """Return the layers of both kinds with the padding of their groups.

    The group size is the smaller of the two counts, or the larger one if it is less than 1.5 times the smaller.
    """
    few, many = sorted((full, windowed))
    if few == 0:
        return full, windowed
    group = many if many < 1.5 * few else few
    return math.ceil(full / group) * group, math.ceil(windowed / group) * group


def engine_parts(
    shape: ModelShape,
    dtype: DType,
    tensor_parallel: int,
    batch_tokens: int,
    sequences: int,
    *,
    graphs: bool,
    eight_bits: bool = False,
) -> tuple[MemoryPart, ...]:
    """Return the memory of one device of an engine without its KV cache.

    It is the sum of the weights, b P / t; the widest layer of a batch of T tokens, b T (4 h + 3 I / t); the sampler's
    logits; and CUDA graphs. With `eight_bits` the weights are (b R + (P - R) (1 + 4 / h)) / t: the R parameters outside
    layers keep b bytes, and each row of at least h numbers has a scale of 4 bytes.
    """
    b, t = DTYPE_BYTES[dtype], tensor_parallel
    root = root_parameters(shape)
    in_layers = shape.parameters - root
    layers = in_layers + 4 * in_layers // shape.hidden if eight_bits else b * in_layers
    widest = b * batch_tokens * (4 * shape.hidden + 3 * mlp_width(shape) // t)
    sampler = SAMPLER_COPIES * 4 * sequences * shape.vocabulary
    return (
        MemoryPart("weights", (b * root + layers) // t),
        MemoryPart("activations", widest),
        MemoryPart("sampler", sampler),
        MemoryPart("CUDA graphs", GRAPH_BYTES if graphs else 0),
    )


def version_bytes(shape: ModelShape, dtype: DType) -> int:
    """Return the bytes of all weights: b P."""
    return DTYPE_BYTES[dtype] * shape.parameters


def published_bytes(shape: ModelShape, spec: RunSpec) -> int:
    """Return the bytes of a version of a run: of its weights, or its adapter; 0 if it publishes none."""
    adapter = FrozenBase.of(shape, spec.model)
    if spec.publishes_adapters and adapter is not None:
        return DTYPE_BYTES[spec.model.dtype] * adapter.parameters
    return 0 if spec.supervised else version_bytes(shape, spec.model.dtype)
