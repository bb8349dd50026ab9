"""Compare outputs and gradients of the attention kernels with plain float32 attention on the device in use.

torch's kernels have been silently wrong on GPUs: on an H100, half of a run's updates had non-finite gradients. Each
function therefore checks them when it loads a model (rlhfless.functions.policy), and so does the self-test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhfless.functions.prefix_attention import packed_row, shared_prefix_attention
from rlhfless.prefixes.packing import PackedSegments, Packing, SharingSequences

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
    packed = _checked_row()
    row = packed_row(packed, device, varlen=varlen)
    seen = torch.zeros(len(packed.source), len(packed.source), dtype=torch.bool)
    ends = np.cumsum([len(sequence) for sequence in _CHECKED_SEQUENCES])
    for index in np.split(packed.index, ends[:-1]):
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


def _checked_row() -> PackedSegments:
    lengths = np.array([len(sequence) for sequence in _CHECKED_SEQUENCES])
    packing = Packing(math.inf, least_saved_tokens=1)
    return SharingSequences(np.concatenate(_CHECKED_SEQUENCES), lengths, packing).pack(np.arange(len(lengths)))


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
