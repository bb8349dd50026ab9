"""Bytes of each part of a run, from the sizes of its model. Pure; each formula is in the docstring of its function.

P parameters, L layers, h hidden size, q and k the widths of queries and of keys, I the width of the gated MLPs that a
token passes (with experts: all that it is sent to), V the vocabulary, T tokens, b bytes per number.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.spec import DType

GIB = 2**30

PROCESS_BYTES = int(0.8 * GIB)
"""Of each process on a GPU, outside of torch's own account: CUDA's context with its kernels (0.5 GiB on data-centre
GPUs) and the buffers of NCCL and cuBLAS. An assumption until a GPU has been measured."""

GRAPH_BYTES = int(0.6 * GIB)
"""CUDA graphs of an engine, as vLLM's log of their capture gives them for models of 0.5 B to 8 B parameters (0.3 to
1 GiB). An assumption until a GPU has been measured."""

LOGITS_COPIES = 5
"""Blocks of logits that are alive at once in a backward pass of the head: logits, scaled logits, log-probabilities, and
the gradients of two of them (rlhfless/functions/policy.py, `_chunk_logprobs`)."""

SAMPLER_COPIES = 3
"""Blocks `[sequences, V]` in float32 of vLLM's sampler: logits, log-probabilities, probabilities."""

STORED_VERSIONS = 4
"""Versions that may be in the learner's store at once: the newest two, the perturbed one, and the one being written."""

CACHED_VERSIONS = 3
"""Versions that may be in a node's cache of a store that is read by HTTP: the newest two, and the one being read."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a function holds on one device."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What a function holds on one device while it does one kind of work."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def mlp_width(shape: ModelShape) -> int:
    """I: the width of the MLPs that one token passes in a layer, on average over the layers.

    A gated MLP of width I has 3 h I parameters.
    """
    active = shape.dense_mlp + shape.experts_per_token * shape.expert_mlp
    return round(active / (3 * shape.hidden * shape.layers))


def layer_token_bytes(shape: ModelShape, dtype: DType) -> int:
    """What one layer keeps of a token for the backward pass.

        float32           24 h + 16 q + 16 k + 16 I
        16 bit (autocast) 26 h + 10 q + 10 k +  8 I

    Counted by torch's saved-tensor hooks over transformers 5's Llama, Qwen2 and Qwen3 with SDPA, which these lines fit
    to 1 % (tests/prepare): the residual stream and its norms stay float32 under autocast. Models without a norm of
    queries and keys keep 8 (q + k) less in float32. Attention keeps no matrix (Korthikanti et al., arXiv 2205.05198,
    section 4, counts 34 h + 5 a s for GPT with one).
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if dtype == "float32":
        return 24 * shape.hidden + 16 * (queries + keys) + 16 * mlp_width(shape)
    return 26 * shape.hidden + 10 * (queries + keys) + 8 * mlp_width(shape)


def sharing_token_bytes(shape: ModelShape, dtype: DType, *, backward: bool) -> int:
    """What the attention of one layer holds of a token while shared prefixes are computed once, and gives back. What it
    keeps for the backward pass is what torch's own attention keeps.

        forward     q (4 + 8 b)      the output in float32; queries, keys and values by segments, and their output, each
                                     up to 3/2 long with padding; keys and values for all heads
        backward    q (12 + 14 b)    three gradients in float32; five tensors by segments, and their three gradients;
                                     keys and values for all heads
    """
    queries, b = shape.heads * shape.head_dim, DTYPE_BYTES[dtype]
    return queries * (12 + 14 * b if backward else 4 + 8 * b)


def activation_bytes(shape: ModelShape, tokens: int, dtype: DType, *, checkpointing: bool, sharing: bool) -> int:
    """Kept by the decoder for the backward pass of T tokens.

        all layers       L T layer_token_bytes
        checkpointing    L T 4 h + T layer_token_bytes     (inputs of the layers in float32, and one layer anew)

    and with either, as much again as one layer keeps, for the gradients that pass through it; or, if that is more, what
    `sharing` of prefixes holds.
    """
    layer = tokens * layer_token_bytes(shape, dtype)
    passing = max(layer, tokens * sharing_token_bytes(shape, dtype, backward=True) if sharing else 0)
    if checkpointing:
        return shape.layers * tokens * 4 * shape.hidden + layer + passing
    return shape.layers * layer + passing


def logits_bytes(shape: ModelShape, tokens: int, chunk_elements: int, copies: int) -> int:
    """Of the output head: `copies` blocks of 4 min(T V, chunk) bytes, and the hidden states of the tokens with their
    gradient, 8 T h."""
    return copies * 4 * min(tokens * shape.vocabulary, chunk_elements) + 8 * tokens * shape.hidden


def learner_states_bytes(shape: ModelShape) -> tuple[Part, ...]:
    """Of one rank: master weights, gradients, and AdamW's two moments in float32, 16 P (Rajbhandari et al., ZeRO, arXiv
    1910.02054, section 3.1, counts the same 16). Every rank holds all of them."""
    p = shape.parameters
    return Part("master weights", 4 * p), Part("gradients", 4 * p), Part("AdamW", 8 * p)


def learn_phases(
    shape: ModelShape, tokens: int, dtype: DType, chunk_elements: int, *, checkpointing: bool, sharing: bool
) -> tuple[Phase, ...]:
    """The phases of a learner rank whose micro-batches have T tokens.

    learn     the states; 2 P for the weights that autocast casts to 16 bit; activations; logits
    publish   the states, and 4 P: the probe computes with a rounded copy of all weights, beside the exact ones
    restore   master weights and gradients (8 P), and a checkpoint's master weights and moments (12 P)
    """
    states, p = learner_states_bytes(shape), shape.parameters
    casts = Part("weights in 16 bit", 0 if dtype == "float32" else 2 * p)
    activations = activation_bytes(shape, tokens, dtype, checkpointing=checkpointing, sharing=sharing)
    logits = logits_bytes(shape, tokens, chunk_elements, LOGITS_COPIES)
    working = (casts, Part("activations", activations), Part("logits", logits))
    return (
        Phase("learn", (*states, *working)),
        Phase("publish", (*states, Part("rounded weights", 4 * p))),
        Phase("restore", (*states[:2], Part("checkpoint", 12 * p))),
    )


def reference_phase(shape: ModelShape, tokens: int, dtype: DType, chunk_elements: int, *, sharing: bool) -> Phase:
    """The reference: b P of weights, one layer at a time for T tokens, and the logits of a forward pass. The layer's
    second half is for what it computes from, or for what `sharing` of prefixes holds, if that is more."""
    b, layer = DTYPE_BYTES[dtype], layer_token_bytes(shape, dtype)
    passing = max(layer, sharing_token_bytes(shape, dtype, backward=False) if sharing else 0)
    return Phase(
        "logprobs",
        (
            Part("weights", b * shape.parameters),
            Part("activations", tokens * (layer + passing)),
            Part("logits", logits_bytes(shape, tokens, chunk_elements, LOGITS_COPIES - 2)),
        ),
    )


def kv_token_bytes(shape: ModelShape, dtype: DType, tensor_parallel: int) -> int:
    """KV of one token on each device: 2 L k b / t. A key head that several devices need is kept by each of them."""
    heads = max(shape.kv_heads / tensor_parallel, 1)
    return round(2 * shape.layers * heads * shape.head_dim * DTYPE_BYTES[dtype])


def engine_parts(
    shape: ModelShape, dtype: DType, tensor_parallel: int, batch_tokens: int, sequences: int, *, graphs: bool
) -> tuple[Part, ...]:
    """Of one device of an engine, without its KV: b P / t of weights; the widest layer of a batch of T tokens,
    b T (4 h + 3 I / t); the sampler's logits; CUDA graphs."""
    b, t = DTYPE_BYTES[dtype], tensor_parallel
    widest = b * batch_tokens * (4 * shape.hidden + 3 * mlp_width(shape) // t)
    sampler = SAMPLER_COPIES * 4 * sequences * shape.vocabulary
    return (
        Part("weights", b * shape.parameters // t),
        Part("activations", widest),
        Part("sampler", sampler),
        Part("CUDA graphs", GRAPH_BYTES if graphs else 0),
    )


def version_bytes(shape: ModelShape, dtype: DType) -> int:
    """A published version: b P."""
    return DTYPE_BYTES[dtype] * shape.parameters
