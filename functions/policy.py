"""The policy as a network: load it, and compute the logprobs of a packed batch's response tokens.

The learner and the reference function share this path, so that their logprobs differ by the weights alone.

Forward passes: a batch is cut into micro-batches within a token budget (rlhfless.functions.batching). A micro-batch
is either padded on the right: under causal attention nothing looks to the right, so no attention mask is built and
the kernel's own causal path is used. Or it is one row without padding that computes shared prefixes once
(rlhfless.functions.prefix_attention); with FlashAttention on GPUs it always is. The last token of a sequence
predicts nothing and is not fed. The output head runs only where a response token is predicted
(rlhfless.functions.lm_head).

Invariants: a token's logprob depends only on its own sequence (not on its neighbours, order or padding), up to the
rounding of differently shaped matrix products. Dropout is always off: otherwise the ratio of two passes would be
noise.

Not supported: encoder-decoders, bidirectional attention, and heads that are more than a linear layer with a scale or
a soft cap. `load_policy` compares its own logits with the model's and refuses models that differ. If torch's fused
attention ignores a part of the model's attention (a soft cap, sinks), the model's own `eager` attention is used,
without packing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.functions import sharding
from rlhfless.functions.attention_check import head_width, packed_difference
from rlhfless.functions.attention_form import has_attention, ignored_by_sdpa, is_fused, load_fused
from rlhfless.functions.attention_kernels import packed_rows_take, uses_varlen
from rlhfless.functions.batching import NO_SEQUENCES, MicroBatch, MicroBatches, cut
from rlhfless.functions.compiled_layers import compile_layers
from rlhfless.functions.context_rope import choose_frequencies
from rlhfless.functions.lm_head import Entropy, OutputHead, head_logprobs, output_head
from rlhfless.functions.loading import load_whole
from rlhfless.functions.prefix_attention import NAME, SharingUnsupported, packed_row
from rlhfless.prefixes.packing import (
    ALWAYS,
    LEAST_SAVED_TOKENS,
    NEVER,
    ON_CPUS,
    PackedSegments,
    Packing,
    SharingSequences,
)
from rlhfless.records import FloatArray
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec import DType, ModelSpec
from rlhfless.util.errors import first_line

log = logging.getLogger(__name__)

CHECK_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Difference between two passes with the same weights that rounding explains, relative to the largest logit."""

EAGER_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Difference of hidden states between two attention implementations that rounding explains. Low-precision hidden
states are rounded again in each layer, so the attention forms are compared in float32
(rlhfless.functions.attention_form)."""

SMALL_WINDOW = 128
"""Sliding windows up to this many tokens are crossed when attentions are compared; larger ones would need a long
pass."""

SHARING_CHECK_TOKENS = LEAST_SAVED_TOKENS + 8
"""Long enough for two sequences to share their prefix."""

NOT_SHARED: Mapping[str, Any] = MappingProxyType({})
"""The layout of a pass without shared prefixes."""

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class PolicyNetwork:
    """A causal language model, split into decoder and head."""

    model: PreTrainedModel
    decoder: torch.nn.Module
    head: OutputHead
    device: torch.device
    compute_dtype: torch.dtype
    """Dtype of matrix products."""
    mesh: DeviceMesh | None = None
    """All ranks of the process group, over which its parameters are split; None if they are not split."""
    packing: Packing = NEVER
    """When to pack sequences into one row that computes shared prefixes once."""

    varlen: bool = False
    """Every pass is a row of sequences without padding, computed by FlashAttention."""

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def hidden_states(self, tokens: torch.Tensor, **shared: Any) -> torch.Tensor:
        """Map `tokens` [batch, width], padded on the right, to [batch, width, hidden].

        For a packed row, `shared` has its `packed_row`.
        """
        output = self.decoder(input_ids=tokens, use_cache=False, **shared)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function(*arguments)` as one forward pass, gathering each group of a sharded model once.

        *Collective*.

        Tensors that a gradient must flow from must be in its result, alone or in a tuple.
        """
        return function(*arguments) if self.mesh is None else getattr(self.model, sharding.INSIDE)(function, *arguments)

    def in_step(self, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Append empty micro-batches until all ranks have the same number. *Collective*."""
        return [*parts, *[NO_SEQUENCES] * (self.most(len(parts)) - len(parts))]

    def most(self, count: int) -> int:
        """Return the largest of all ranks' counts. *Collective*."""
        if self.mesh is None or self.mesh.size() == 1:
            return count
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def settle(self) -> None:
        """Free the gathered parameters, before the shards are written to. *Collective*."""
        if self.mesh is not None:
            sharding.settle(self.model)


@dataclass(frozen=True, slots=True)
class ResponseLogprobs:
    """Values of the response tokens of a batch, in its order."""

    logprobs: torch.Tensor  # [response tokens], float32
    entropy: torch.Tensor  # [response tokens], float32, nats; with a gradient only if requested


@dataclass(frozen=True, slots=True)
class Form:
    """How to build a model from a checkpoint's files."""

    auto: Any
    """The transformers class that builds it."""
    key: str
    """The spec key that names the files."""
    head: Callable[[Any, int | None], OutputHead]
    """Finds its head; takes OutputHead.chunk_elements."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration values that override the files'."""
    new_head: bool = False
    """See `load_whole`."""


POLICY = Form(AutoModelForCausalLM, "model.path", output_head)


def load_policy(
    spec: ModelSpec,
    *,
    parameter_dtype: DType,
    compute_dtype: DType,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
    mesh: DeviceMesh | None = None,
    offload: bool = False,
    exact_head: bool = False,
    share_prefixes: bool = True,
    logits_elements: int | None = None,
    compiled: bool = False,
    form: Form = POLICY,
) -> PolicyNetwork:
    """Load `spec.path` in Hugging Face format, without dropout, to `device`. *Collective* with a mesh.

    Args:
        device: `sharding.default_device` if None.
        mesh: split the parameters over these ranks; each reads its own parts of the files. Without a mesh, both dtypes
            must be the same.
        offload: see sharding.shard.
        exact_head: see sharding.shard.
        share_prefixes: pack sequences where that pays, if the model's attention and the device's kernels allow it.
        logits_elements: see OutputHead.chunk_elements.
        compiled: see compile_layers.
        form: how to build the model from the files.

    Raises InputError if weights are missing, malformed or not finite; ValueError if this module's logits differ from
    the model's own, or for two dtypes without a mesh; and transformers' errors for an unreadable path.
    """
    if mesh is None and parameter_dtype != compute_dtype:
        raise ValueError(f"{parameter_dtype} parameters computing in {compute_dtype} need a mesh: its groups cast them")
    device = device or sharding.default_device()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a function's output is a log
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code, **form.config)
    _switch_off_dropout(config)
    compute = TORCH_DTYPES[compute_dtype]
    split: Callable[[Any], None] | None = None
    if mesh is not None:
        split = partial(sharding.shard, mesh=mesh, compute_dtype=compute, offload=offload, exact_head=exact_head)
    model = load_fused(
        lambda attention: load_whole(
            form.auto,
            spec.path,
            form.key,
            prepare=split,
            offload=offload,
            new_head=form.new_head,
            config=config,
            dtype=TORCH_DTYPES[parameter_dtype],
            attn_implementation=attention,
            trust_remote_code=spec.trust_remote_code,
        )
    )
    _place(model, device, offload=offload)
    choose_frequencies(model, spec.max_context_tokens)
    policy = policy_of(model, device, compute, mesh, logits_elements, form.head)
    _choose_attention(policy, spec.path)
    _check_against_model(policy, spec.path)
    if form is POLICY and _can_fuse_head(policy, spec.path, torch.float32 if exact_head else compute):
        policy = dataclasses.replace(policy, head=dataclasses.replace(policy.head, fused=True))
    varlen = uses_varlen(device)
    packed = dataclasses.replace(policy, packing=_on_gpus(config) if varlen else ON_CPUS, varlen=varlen)
    if share_prefixes and is_fused(model) and _can_pack(packed, spec.path):
        policy = packed
    if gradient_checkpointing:
        checkpoint_activations(model)
    if compiled:
        compile_layers(model)
    return policy


def policy_of(
    model: Any,
    device: torch.device,
    compute_dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    logits_elements: int | None = None,
    head: Callable[[Any, int | None], OutputHead] = output_head,
) -> PolicyNetwork:
    """Return the network of a model that is on `device`. `logits_elements`: see OutputHead.chunk_elements."""
    decoder = model.get_decoder()
    if decoder is model:  # transformers does not find that of Llama 4's text model
        decoder = model.model
    return PolicyNetwork(model, decoder, head(model, logits_elements), device, compute_dtype, mesh)


def checkpoint_activations(model: Any) -> None:
    """Keep only the layers' inputs for the backward pass, which recomputes the rest."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # checkpointing requires training mode, which without dropout changes nothing else


def _place(model: Any, device: torch.device, *, offload: bool) -> None:
    """Move a model to `device`; with `offload` only its buffers, which are not split."""
    if not offload:
        model.to(device)
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


Outputs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""A head: (hidden states [positions, hidden], their next tokens [positions]) -> tensors [positions]."""


def response_logprobs(
    policy: PolicyNetwork,
    batch: PackedBatch,
    temperature: float,
    packed: PackedSegments | None = None,
    *,
    entropy_gradient: bool = False,
) -> ResponseLogprobs:
    """Return logprobs at `temperature` of all response tokens of `batch`; see `response_outputs`."""
    outputs = logprob_outputs(policy, temperature, "gradient" if entropy_gradient else "value")
    return ResponseLogprobs(*response_outputs(policy, batch, outputs, packed))


def logprob_outputs(policy: PolicyNetwork, temperature: float, entropy: Entropy = "none") -> Outputs:
    """Return the head that computes logprobs at `temperature`, and entropies if requested."""
    compute = head_logprobs
    if policy.head.fused:
        from rlhfless.functions.head_kernels import fused_logprobs as compute  # imports triton
    return partial(compute, policy.head, temperature=temperature, entropy=entropy)


def response_outputs(
    policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, packed: PackedSegments | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a head's outputs `[response tokens]` for all response tokens of `batch`, in one forward pass.

    The batch is one micro-batch. With `packed`, the layout of its sequences without their last tokens, shared
    prefixes are computed once. Gradients flow to the parameters unless disabled by the caller. Without responses a
    single token is run and the outputs are empty: each rank of a sharded model must take part in every pass and its
    backward pass.
    """
    if not batch.response_mask.any():
        token = torch.zeros(1, dtype=torch.int64, device=policy.device)
        return tuple(each[:0] for each in policy.inside(_passed, policy, token[None], token, token, outputs))
    if packed is None and policy.varlen:
        packed = PackedSegments.side_by_side(batch.lengths - 1)
    targets = torch.from_numpy(batch.tokens[batch.response_mask]).to(policy.device)
    tokens, predictors = _padded(batch) if packed is None else _in_one_row(batch, packed)
    shared = NOT_SHARED if packed is None else packed_row(packed, policy.device, varlen=policy.varlen)
    fed = (tokens.to(policy.device), predictors.to(policy.device), targets, outputs, shared)
    passed: tuple[torch.Tensor, ...] = policy.inside(_passed, policy, *fed)
    return passed


def _padded(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fed tokens `[sequences, width]`, and the flat positions `[response tokens]` that predict responses."""
    width = int(batch.lengths.max()) - 1
    fed = batch.positions < batch.lengths[batch.sequence_id] - 1
    flat = batch.sequence_id * width + batch.positions
    padded = np.zeros(batch.sequences * width, dtype=np.int64)
    padded[flat[fed]] = batch.tokens[fed]
    predictors = torch.from_numpy(flat[batch.response_mask] - 1)
    return torch.from_numpy(padded).view(batch.sequences, width), predictors


def _in_one_row(batch: PackedBatch, packed: PackedSegments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a row `[1, width]` of this layout."""
    fed = batch.tokens[batch.positions < batch.lengths[batch.sequence_id] - 1]
    # A sequence's first token is never generated, so the token before a generated one is in its own sequence, and fed.
    before = np.flatnonzero(batch.response_mask) - batch.sequence_id[batch.response_mask] - 1
    return torch.from_numpy(fed[packed.source])[None], torch.from_numpy(packed.index[before])


def _passed(
    policy: PolicyNetwork,
    tokens: torch.Tensor,
    predictors: torch.Tensor,
    targets: torch.Tensor,
    outputs: Outputs,
    shared: Mapping[str, Any] = NOT_SHARED,
) -> tuple[torch.Tensor, ...]:
    """Map `tokens` [batch, width] to `outputs` of `targets` [response tokens].

    The flat positions `predictors` [response tokens] predict the targets. `shared`: see PolicyNetwork.hidden_states.
    """
    hidden = policy.hidden_states(tokens, **shared).flatten(0, 1).index_select(0, predictors)
    first, *others = outputs(hidden, targets)
    return first.clone(), *others  # FSDP hooks the result, and warns about views


@torch.no_grad()
def token_logprobs(
    policy: PolicyNetwork, batch: PackedBatch, temperature: float, micro_batch_tokens: int
) -> FloatArray:
    """Return old or reference logprobs `[tokens]` at `temperature`, 0 on prompt tokens, without a gradient.

    *Collective* if the policy is sharded.
    """
    return logprobs_of(policy, batch, temperature, cut(batch, micro_batch_tokens, packing=policy.packing))


def logprobs_of(policy: PolicyNetwork, batch: PackedBatch, temperature: float, parts: MicroBatches) -> FloatArray:
    """Return the same as `token_logprobs`, in these micro-batches."""
    return outputs_of(policy, batch, logprob_outputs(policy, temperature), parts.parts)


@torch.no_grad()
def outputs_of(policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, parts: Sequence[MicroBatch]) -> FloatArray:
    """Return the first output of a head `[tokens]`, without a gradient. *Collective* if the network is sharded.

    The output is 0 on prompt tokens and on sequences in no micro-batch.
    """
    values = torch.zeros(len(batch.tokens), dtype=torch.promote_types(policy.compute_dtype, torch.float32)).numpy()
    for micro_batch in policy.in_step(parts):
        part = select(batch, micro_batch.indices)
        first, *_ = response_outputs(policy, part, outputs, micro_batch.packed)
        source = np.repeat(batch.starts[micro_batch.indices], part.lengths) + part.positions
        values[source[part.response_mask]] = first.cpu().numpy()
    policy.settle()
    return values


def _switch_off_dropout(config: PretrainedConfig) -> None:
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


@torch.no_grad()
def _choose_attention(policy: PolicyNetwork, path: str) -> None:
    """Use the model's own `eager` attention if torch's fused attention is wrong for it. *Collective.*

    The fused attention is wrong if it ignores a part of the model's form or gives other logits.
    """
    model, tokens, reason = policy.model, _check_tokens(policy), ""
    if is_fused(model) and model.is_backend_compatible():
        reason = ignored_by_sdpa(model, lambda: policy.inside(policy.hidden_states, tokens))
        fused = policy.inside(policy.hidden_states, tokens).float()
        model.set_attn_implementation("eager")
        expected = policy.inside(policy.hidden_states, tokens).float()
        policy.settle()
        model.set_attn_implementation("sdpa")
        difference = float((fused - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not reason and not difference <= EAGER_TOLERANCE[policy.compute_dtype]:
            reason = f"its outputs differ by {difference:.2g} of the largest"
    if policy.most(bool(reason)):
        model.set_attn_implementation("eager")
    if not is_fused(model) and has_attention(model.config):
        log.warning(
            "model %r is computed with its own eager attention, whose memory grows with the square of a sequence's "
            "length, and prefixes are computed for each sequence. torch's fused attention does not have its form: %s",
            path, reason or "transformers says so",
        )  # fmt: skip


def _check_tokens(policy: PolicyNetwork) -> torch.Tensor:
    """Return a few tokens `[1, tokens]`, exceeding the sliding window if it is small."""
    config = policy.model.config.get_text_config()
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    count = max([8, *(window + 4 for window in windows if window <= SMALL_WINDOW)])
    return torch.arange(1, count + 1, device=policy.device).remainder(policy.vocabulary)[None]


@torch.no_grad()
def _check_against_model(policy: PolicyNetwork, path: str) -> None:
    """Compare the model's own outputs for a few tokens with ours, which are padded on the right.

    All positions are compared, or only the last for a model that scores sequences. Raises ValueError if they differ.
    """
    tokens = _check_tokens(policy)
    padded = torch.nn.functional.pad(tokens, (0, 4))
    with _without_padding_token(policy.model.config):
        expected = policy.model(input_ids=tokens, use_cache=False).logits.flatten(0, -2).float()
    ours = policy.inside(lambda: policy.head.logits(policy.hidden_states(padded)[0, : tokens.shape[1]])).float()
    policy.settle()
    difference = float((ours[-len(expected) :] - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    limit = CHECK_TOLERANCE[policy.compute_dtype]
    if not difference <= limit:
        kind = sharding.class_of(policy.model).__name__
        raise ValueError(
            f"model {path!r} ({kind}) is not supported: its logits differ from those "
            f"of a causal decoder with a linear head by {difference:.2g} of the largest (limit {limit:g})"
        )


def _can_fuse_head(policy: PolicyNetwork, path: str, dtype: torch.dtype) -> bool:
    """Return whether the fused head matches the plain one on the GPUs of all ranks. *Collective.*"""
    if policy.device.type != "cuda":
        return False
    reason = ""
    try:
        from rlhfless.functions.head_kernels import fused_difference

        if not (difference := fused_difference(policy.head, policy.device, dtype)) <= CHECK_TOLERANCE[dtype]:
            reason = f"its outputs or gradients differ by {difference:.2g} of the largest"
    except Exception as error:  # Triton compiles here and raises several kinds of errors
        reason = f"{type(error).__name__}: {first_line(error)}"
    if policy.most(bool(reason)):
        log.warning("model %r: plain output head; fused kernels: %s", path, reason or "refused on another rank")
        return False
    return True


@contextmanager
def _without_padding_token(config: Any) -> Iterator[None]:
    """Make a model that scores a sequence use its last token, even if that is the padding token, within the block."""
    configs = {id(each): each for each in (config, config.get_text_config())}.values()
    kept = [(each, each.pad_token_id) for each in configs if hasattr(each, "pad_token_id")]
    try:
        for each, _ in kept:
            each.pad_token_id = None
        yield
    finally:
        for each, token in kept:
            each.pad_token_id = token


def _on_gpus(config: PretrainedConfig) -> Packing:
    """Return when to pack on GPUs: rows always, and prefixes depending on the model's sizes."""
    try:
        return Packing(math.inf, ModelShape.of_config(config.get_text_config().to_dict()).token_keys)
    except UnknownShape as error:
        log.info("prefixes of %d tokens are shared, whatever they cost this model: %s", LEAST_SAVED_TOKENS, error)
        return ALWAYS


@torch.no_grad()
def _can_pack(policy: PolicyNetwork, path: str) -> bool:
    """Return whether all ranks can compute the model in packed rows, and if so set that attention. *Collective.*

    Checks the kernels against plain attention, and two sequences with a common prefix against the padded pass.
    """
    if not policy.model.is_backend_compatible():
        log.info(
            "model %r does not use transformers' attention interface; prefixes are computed once per sequence", path
        )
        return False
    level, reason = logging.WARNING, _kernel_problem(policy)
    if not policy.most(bool(reason)):
        policy.model.set_attn_implementation(NAME)
        level, reason = logging.INFO, _packing_problem(policy)
        if not policy.most(bool(reason)):
            return True
        policy.model.set_attn_implementation("sdpa")
    reason = reason or "it cannot on another rank"
    log.log(level, "model %r is computed in padded rows, without shared prefixes: %s", path, reason)
    return False


def _kernel_problem(policy: PolicyNetwork) -> str:
    """Return the problem with the kernels of packed rows on this device; empty if none."""
    if not packed_rows_take(policy.device, policy.compute_dtype):
        return "FlashAttention takes bfloat16 and float16"
    head = head_width(policy.model.config)
    try:
        wrong = packed_difference(policy.device, policy.compute_dtype, varlen=policy.varlen, head=head)
    except RuntimeError as error:  # such as a GPU, a dtype or a head dimension that the kernel does not support
        return first_line(error)
    if not wrong <= CHECK_TOLERANCE[policy.compute_dtype]:
        return (
            "torch's attention kernels have outputs or gradients that differ "
            f"by {wrong:.2g} of the largest from plain ones"
        )
    return ""


def _packing_problem(policy: PolicyNetwork) -> str:
    """Return how two sequences in a packed row differ from the padded pass; empty if they do not. *Collective.*"""
    rows = torch.arange(1, SHARING_CHECK_TOKENS + 1).remainder(policy.vocabulary).repeat(2, 1)
    rows[1, -2:] = rows[1, -2:].add(1).remainder(policy.vocabulary)
    layout = SharingSequences(rows.flatten().numpy(), np.full(len(rows), rows.shape[1])).pack(np.arange(len(rows)))
    row = rows.flatten()[torch.from_numpy(layout.source)][None].to(policy.device)
    packed = partial(policy.hidden_states, **packed_row(layout, policy.device, varlen=policy.varlen))
    expected = policy.inside(policy.hidden_states, rows.to(policy.device)).flatten(0, 1)  # sdpa, without a layout
    try:
        ours = policy.inside(packed, row)[0, torch.from_numpy(layout.index)]
    except SharingUnsupported as error:
        return str(error)
    finally:
        policy.settle()
    difference = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= CHECK_TOLERANCE[policy.compute_dtype]:
        return f"its outputs differ by {difference:.2g} of the largest"
    return ""
