"""Load a policy: build the network, and check that this device computes it right.

Not supported: encoder-decoders, bidirectional attention, and heads that are more than a linear layer with a scale or
a soft cap. `load_policy` compares its own logits with the model's and refuses models that differ. If torch's fused
attention ignores a part of the model's attention (a soft cap, sinks), the model's own `eager` attention is used,
without packing.

Rotary positions that depend on a batch's longest sequence (`longrope` of Phi-3 and Phi-4-mini, `dynamic`) are fixed for
a whole run: otherwise a token's logprob would depend on its neighbours. vLLM chooses them once, too, by the longest
sequence that a run can have (`max_model_len`).

With `compile`, decoder layers run through `torch.compile`: norms, rotary embeddings and activation functions in fused
kernels. The forward method of a layer is compiled inside FSDP's hooks and activation checkpointing, and all layers
share one graph. Packed-row attention is excluded, because its layout differs with every micro-batch. Lengths are
dynamic.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from rlhfless.functions import sharding
from rlhfless.functions.attention_check import (
    has_attention,
    head_width,
    ignored_by_sdpa,
    is_fused,
    load_fused,
    packed_difference,
)
from rlhfless.functions.attention_kernels import packed_rows_take, uses_varlen
from rlhfless.functions.expert_parallel import require_routers
from rlhfless.functions.lm_head import OutputHead, output_head
from rlhfless.functions.loading import load_whole
from rlhfless.functions.policy import CHECK_TOLERANCE, TORCH_DTYPES, PolicyNetwork, policy_of
from rlhfless.functions.prefix_attention import NAME, SharingUnsupported, packed_row, shared_prefix_attention
from rlhfless.functions.sharding import layers_of
from rlhfless.prefixes.packing import (
    ALWAYS,
    LEAST_SAVED_TOKENS,
    ON_CPUS,
    Packing,
    SharingSequences,
)
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec import DType, ModelSpec
from rlhfless.util.errors import first_line

log = logging.getLogger(__name__)

EAGER_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Difference of hidden states between two attention implementations that rounding explains. Low-precision hidden
states are rounded again in each layer, so the attention forms are compared in float32
(rlhfless.functions.attention_check)."""

SMALL_WINDOW = 128
"""Sliding windows up to this many tokens are crossed when attentions are compared; larger ones would need a long
pass."""

SHARING_CHECK_TOKENS = LEAST_SAVED_TOKENS + 8
"""Long enough for two sequences to share their prefix."""


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
    experts: DeviceMesh | None = None,
    offload: bool = False,
    exact_head: bool = False,
    share_prefixes: bool = True,
    logits_elements: int | None = None,
    compiled: bool = False,
    layers_dtype: DType | None = None,
    exact_routers: bool = False,
    freeze_router: bool = False,
    form: Form = POLICY,
) -> PolicyNetwork:
    """Load `spec.path` in Hugging Face format, without dropout, to `device`. *Collective* with a mesh.

    Args:
        device: `sharding.default_device` if None.
        mesh: split the parameters over these ranks; each reads its own parts of the files. Without a mesh, both dtypes
            must be the same.
        experts: divide the experts over this mesh (rlhfless.functions.expert_parallel).
        offload: see sharding.shard.
        exact_head: see sharding.shard.
        share_prefixes: pack sequences where that pays, if the model's attention and the device's kernels allow it.
        logits_elements: see OutputHead.chunk_elements.
        compiled: see compile_layers.
        layers_dtype: format of the decoder layers' parameters, if not that of the others; see sharding.shard.
        exact_routers: see sharding.shard.
        freeze_router: routers of experts are not trained.
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
        split = partial(
            sharding.shard,
            mesh=mesh,
            experts=experts,
            compute_dtype=compute,
            offload=offload,
            exact_head=exact_head,
            layers_dtype=None if layers_dtype is None else TORCH_DTYPES[layers_dtype],
            exact_routers=exact_routers,
        )
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
    for router in require_routers(model, "learner.freeze_router", "true") if freeze_router else ():
        router.requires_grad_(False)
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


LENGTH_DEPENDENT = ("longrope", "dynamic")


@torch.no_grad()
def choose_frequencies(model: Any, longest: int | None) -> None:
    """Fix the frequencies of `model` to those of a sequence of `longest` tokens (None: the model's own limit)."""
    config = model.config.get_text_config()
    tokens: int | None = longest or getattr(config, "max_position_embeddings", None)
    if tokens is None:
        return
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in LENGTH_DEPENDENT:
            like: torch.Tensor = module.inv_freq
            module(torch.zeros(1, device=like.device), torch.tensor([[tokens - 1]], device=like.device))
            module.rope_type = "default"  # its forward pass leaves the frequencies unchanged


BACKEND = "inductor"


def compile_layers(model: Any) -> None:
    """Compile each decoder layer at its first forward pass, which takes a minute with inductor."""
    AttentionInterface.register(NAME, torch.compiler.disable(shared_prefix_attention))
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)  # type: ignore[method-assign]


def restore_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for layer in layers_of(model):
        vars(layer).pop("forward", None)
    AttentionInterface.register(NAME, shared_prefix_attention)
