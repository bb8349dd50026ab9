"""Compare attention kernels with plain float32 attention, and torch's fused attention with a model's own.

torch's kernels have been silently wrong on GPUs: on an H100, half of a run's updates had non-finite gradients. Each
function therefore checks them when it loads a model (rlhfless.functions.policy_loading), and so does the self-test.

Models express deviations from plain softmax attention as arguments (a soft cap) or parameters (sinks) of their
attention modules. `sdpa` silently ignores those that it does not know; a model's own `eager` attention computes
them. `ignored_by_sdpa` gives both the same random queries, keys and values, small and large, and compares outputs and
gradients in float32: what is ignored depends on the model's form and may not show with the loaded weights.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhfless.functions.prefix_attention import packed_row, shared_prefix_attention
from rlhfless.prefixes.packing import Packing, SharingSequences

CHECKED_HEADS = ((2, 2, 64), (7, 1, 128))
"""(heads, KV heads, head dimension). Kernels differ by head dimension."""

_STEM, _NESTED = np.arange(21), np.arange(21, 30)
_CHECKED_SEQUENCES = (
    np.r_[_STEM, 100:107],
    np.r_[_STEM, 200:230],
    np.r_[_STEM, _NESTED, 400],
    np.r_[_STEM, _NESTED, 500:512],
    np.arange(600, 645),
    np.array([700]),
)
"""Two nested prefixes, and two sequences without prefixes. No length fills a kernel block, so that reads past the
end of a block are detected."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def head_width(config: Any) -> int | None:
    """Return the head dimension of a model's attention, or None for a model without attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    return getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)


def packed_difference(device: torch.device, dtype: torch.dtype, *, varlen: bool, head: int | None = None) -> float:
    """Return the largest difference of packed rows from plain attention (`_difference`).

    `head`: an additional head dimension to check on GPUs.
    """
    lengths = np.array([len(sequence) for sequence in _CHECKED_SEQUENCES])
    packing = Packing(math.inf, least_saved_tokens=1)
    packed = SharingSequences(np.concatenate(_CHECKED_SEQUENCES), lengths, packing).pack(np.arange(len(lengths)))
    row = packed_row(packed, device, varlen=varlen)
    seen = torch.zeros(len(packed.source), len(packed.source), dtype=torch.bool)
    for index in np.split(packed.index, np.cumsum(lengths)[:-1]):
        at = torch.from_numpy(index)
        seen[at[:, None], at] |= torch.ones(len(at), len(at), dtype=torch.bool).tril()

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return shared_prefix_attention(torch.nn.Module(), query, key, value, None, row["prefix_layout"])[0]

    shapes = [*CHECKED_HEADS, *([(7, 1, head)] if head and varlen else [])]  # a CPU has one kernel for all
    return _largest(attention, seen.to(device), shapes, dtype)


def padded_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Return the same difference for the padded pass's causal attention."""
    seen = torch.ones(45, 45, dtype=torch.bool, device=device).tril()

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        module: Any = torch.nn.Module()
        module.num_key_value_groups = query.shape[1] // key.shape[1]
        return sdpa_attention_forward(module, query, key, value, None, is_causal=True)[0]

    return _largest(attention, seen, CHECKED_HEADS, dtype)


def _largest(
    attention: Attention, seen: torch.Tensor, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype
) -> float:
    return float(np.max([_difference(attention, seen, shape, dtype) for shape in shapes]))  # NaN if any is


def _difference(attention: Attention, seen: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the largest difference of output and gradients from plain attention.

    `seen` [queries, keys] is the mask of plain attention. Differences are relative to the largest value of each
    tensor; the result is not finite if a difference is not.
    """
    heads, kv_heads, head = shape
    random, tokens, device = torch.Generator().manual_seed(0), len(seen), seen.device
    drawn = [torch.randn(1, count, tokens, head, generator=random) for count in (heads, kv_heads, kv_heads, heads)]
    *inputs, upstream = (tensor.to(device, dtype) for tensor in drawn)
    forms: list[tuple[Attention, torch.dtype]] = [(attention, dtype), (partial(_plain, seen), torch.float32)]
    results = []
    for compute, wanted in forms:
        with torch.enable_grad():
            query, key, value = (tensor.to(wanted).requires_grad_() for tensor in inputs)
            output = compute(query, key, value)
            gradients = torch.autograd.grad(output, [query, key, value], upstream.to(wanted).transpose(1, 2))
        results.append([output.detach(), *gradients])
    shares = [(ours.float() - plain).abs().max() / plain.abs().max() for ours, plain in zip(*results, strict=True)]
    return float(torch.stack(shares).max())  # NaN propagates


def _plain(seen: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute attention [1, tokens, heads, head] by its definition."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


NAME = "rlhfless_compared"
"""Name of the comparing attention in a model's configuration."""

TOLERANCE = 1e-3
"""Difference explained by rounding to float32, relative to the largest value."""

SCORES = (1.0, 30.0)
"""Standard deviations of the scores. Soft caps are between 1 and 50, and take effect when scores approach them."""

NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"
"""transformers' message for a model without `sdpa`, such as gpt-oss."""

_compared: list[str] = []
"""Ignored parts found by the current forward pass."""


def load_fused(load: Callable[[str], Any]) -> Any:
    """Call `load(attention)` with torch's fused attention, or with `eager` if transformers lacks it for the model."""
    try:
        return load("sdpa")
    except ValueError as error:
        if NO_SDPA not in str(error):
            raise
    return load("eager")


def has_attention(config: Any) -> bool:
    """Return whether a model has attention layers; Mamba and RWKV have none."""
    return bool(getattr(config.get_text_config(), "num_attention_heads", None))


def is_fused(model: Any) -> bool:
    """Return whether the model uses torch's fused attention."""
    return bool(model.config._attn_implementation == "sdpa")


def ignored_by_sdpa(model: Any, forward: Callable[[], Any]) -> str:
    """Return the parts of `model` that torch's fused attention ignores, or an empty string.

    Example: `softcap of Gemma2Attention (outputs differ by 0.3)`. `forward` runs the model on a few tokens. Not
    compared: models with `eager` attention, and models that bypass transformers' attention interface and choose
    their attention themselves.

    *Collective* if the model is split.
    """
    if not (is_fused(model) and model.is_backend_compatible()):
        return ""
    _compared.clear()
    model.set_attn_implementation(NAME)
    try:
        forward()
        return "; ".join(dict.fromkeys(_compared))
    finally:
        model.set_attn_implementation("sdpa")
        _compared.clear()


def _compare(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Record the parts of a module that `sdpa` ignores, then run it; an attention function for transformers."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None:
        for scores in SCORES:
            if found := _form_difference(module, eager, (query, key, value), arguments, scores):
                _compared.append(found)
                break
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return output, None


AttentionInterface.register(NAME, _compare)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _form_difference(
    module: torch.nn.Module, eager: Any, shaped: tuple[torch.Tensor, ...], arguments: Mapping[str, Any], scores: float
) -> str:
    """Return the difference between the two for random inputs of these shapes with scores of about this size."""
    device = shaped[0].device
    plain: Any = sdpa_attention_forward
    module, given = _own_numbers(module), {**arguments, "dropout": 0.0}
    parameters = list(module.parameters(recurse=False))
    for name, argument in arguments.items():  # such as sinks, which some models also pass as an argument
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            same = [each for each in parameters if each.shape == argument.shape]
            given[name] = same[0] if same else argument.detach().float()
    random = torch.Generator().manual_seed(0)
    scaling = arguments.get("scaling") or shaped[0].shape[-1] ** -0.5
    size = (scores / (scaling * shaped[0].shape[-1] ** 0.5)) ** 0.5
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        inputs = [
            torch.randn(tensor.shape, generator=random).to(device).mul(factor).requires_grad_()
            for tensor, factor in zip(shaped, (size, size, 1.0), strict=True)
        ]
        queries, keys = shaped[0].shape[2], shaped[1].shape[2]
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        hidden = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
        try:
            expected = eager(module, *inputs, hidden, **given)[0]
            fused = plain(module, *inputs, seen, **given)[0]
        except (TypeError, AttributeError, RuntimeError):  # it needs other arguments, and cannot be judged on its own
            return ""
        upstream = torch.randn(expected.shape, generator=random).to(device)
        gradients = [
            torch.autograd.grad(output, [*inputs, *parameters], upstream, allow_unused=True)
            for output in (expected, fused)
        ]
    form = ", ".join(name for name in ("softcap", "s_aux", "position_bias") if arguments.get(name) is not None)
    what = f"{form or 'the form'} of {type(module).__name__}"
    if (apart := _apart(expected, fused)) > TOLERANCE:
        return f"{what} (outputs differ by {apart:.2g} of the largest)"
    if (apart := max(_apart(one, other) for one, other in zip(*gradients, strict=True))) > TOLERANCE:
        return f"{what} (gradients differ by {apart:.2g} of the largest)"
    return ""


def _own_numbers(module: torch.nn.Module) -> torch.nn.Module:
    """Copy the module with float32 copies of its own parameters, such as sinks."""
    own = copy.copy(module)
    own._parameters = {
        name: None if parameter is None else torch.nn.Parameter(parameter.detach().float())
        for name, parameter in module._parameters.items()
    }
    return own.eval()


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference, relative to the largest value; a missing gradient counts as 0."""
    if one is None or other is None:
        there = one if other is None else other
        return 0.0 if there is None or not there.abs().max() > 0 else 1.0
    return float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1e-6))
