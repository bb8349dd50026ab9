"""torch's fused attention with its logsumexp, forward and backward, on a CPU and on GPUs.

The public function of torch gives no logsumexp, which is what joins the attention over two sets of keys
(rlhfless.functions.prefix_attention). Scores, weights and sums are in float32 at least, whatever the inputs' format.
"""

from __future__ import annotations

import torch

LSE_ALIGNMENT = 32
"""The CUDA kernel pads the queries of its logsumexp to a multiple of this, and wants it so again."""

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
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, logsumexp, 0.0, causal, scale=scale
        )
        return found[0], found[1], found[2]
    padded = torch.nn.functional.pad(logsumexp.float(), (0, -logsumexp.shape[2] % LSE_ALIGNMENT))
    no_dropout = torch.zeros((), dtype=torch.int64, device="cpu")
    found = _aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, None, output, padded, no_dropout, no_dropout, 0.0, [True, True, True, False],
        causal, scale=scale,
    )  # fmt: skip
    return found[0], found[1], found[2]
