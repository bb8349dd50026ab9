"""torch's fused attention: with its logsumexp, forward and backward, on a CPU and on GPUs; and of sequences in a row.

The public function of torch gives no logsumexp, which is what joins the attention over two sets of keys
(rlhfless.functions.prefix_attention). Scores, weights and sums are in float32 at least, whatever the inputs' format.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn.attention.varlen import varlen_attn

SIDE_BY_SIDE_DTYPES = (torch.bfloat16, torch.float16)
"""The formats of FlashAttention, which torch has for GPUs alone."""

LSE_ALIGNMENT = 32
"""The CUDA kernel pads the queries of its logsumexp to a multiple of this, with infinity, and wants it so again: the
probabilities of queries past the end are then 0, whatever their rows of shared memory hold."""

_aten = torch.ops.aten


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` [batch, heads, queries, head], `key` and `value` [batch, heads, keys, head] -> the attention [batch,
    heads, queries, head], and the logsumexp of its scores [batch, heads, queries]."""
    if query.device.type == "cpu":
        output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=causal, scale=scale
        )
        return output, logsumexp
    output, logsumexp, _, _ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, is_causal=causal, scale=scale
    )
    return output, logsumexp[:, :, : query.shape[2]]


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, of shapes as in `attend`, when `gradient` is that of `output`. Output and
    logsumexp may be of more keys than these: then the gradients are these keys' part."""
    if query.device.type == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, logsumexp, 0.0, causal, scale=scale
        )
        return gradients[0], gradients[1], gradients[2]
    no_dropout = torch.zeros((), dtype=torch.int64, device="cpu")
    gradients = _aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, None, output, padded(logsumexp), no_dropout, no_dropout, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def padded(logsumexp: torch.Tensor) -> torch.Tensor:
    """[batch, heads, queries] as the CUDA kernel's forward pass leaves it."""
    return torch.nn.functional.pad(logsumexp.float(), (0, -logsumexp.shape[2] % LSE_ALIGNMENT), value=torch.inf)


CHECKED = ((45, 45, True), (7, 33, False))
"""(queries, keys, causal) with which the kernels are checked: none fills a block of theirs, so that what they hold of a
block past its end would be seen."""

CHECKED_HEADS = (64, 128)
"""Sizes of a head: the CUDA kernels for larger ones are others."""


def gradient_difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference between gradients of `attend_backward` and those of plain attention in float32, as a part
    of the largest; not finite if a gradient is not."""
    random = torch.Generator().manual_seed(0)
    shares = []
    for (queries, keys, causal), head in itertools.product(CHECKED, CHECKED_HEADS):
        shapes = [(1, 2, count, head) for count in (queries, keys, keys, queries)]
        query, key, value, upstream = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
        expected = _plain_gradients(upstream, (query, key, value), causal=causal)
        output, logsumexp = attend(query, key, value, scale=head**-0.5, causal=causal)
        ours = attend_backward(upstream, query, key, value, output, logsumexp, scale=head**-0.5, causal=causal)
        shares += [(one - other).abs().max() / other.abs().max() for one, other in zip(ours, expected, strict=True)]
    return float(torch.stack(shares).max())  # of NaN and a number, NaN


def _plain_gradients(
    upstream: torch.Tensor, inputs: Sequence[torch.Tensor], *, causal: bool
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        query, key, value = (tensor.detach().float().requires_grad_() for tensor in inputs)
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return torch.autograd.grad(scores.softmax(-1) @ value, (query, key, value), upstream.float())


def runs_side_by_side(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has FlashAttention for these; an old GPU may refuse it all the same."""
    return device.type == "cuda" and dtype in SIDE_BY_SIDE_DTYPES


def attend_side_by_side(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, *, scale: float
) -> torch.Tensor:
    """Causal attention inside of each sequence of a row: `query` [1, heads, tokens, head], `key` and `value` [1, KV
    heads, tokens, head], `starts` [sequences + 1] -> [1, tokens, heads, head]. Differentiable."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    causal = (-1, 0)
    output = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=causal, enable_gqa=True)
    assert isinstance(output, torch.Tensor)  # without a logsumexp, which was not asked for
    return output[None]
