"""torch's FlashAttention over sequences of different lengths, computed on a CPU by its definition.

Importing this module registers it with torch's own operators, which have kernels only for GPUs. Everything above them,
including torch's public `varlen_attn`, then runs on a CPU as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import varlen

Split = tuple[slice, slice, torch.Tensor]


def _sequences(
    query: torch.Tensor, key: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, is_causal: bool, scale: float | None,
) -> Iterator[Split]:  # fmt: skip
    """Yield (queries, keys, scores [heads, queries, keys]) of each sequence. Rejects inputs that the kernels reject."""
    for starts, tensor, longest in ((cu_seq_q, query, max_q), (cu_seq_k, key, max_k)):
        assert starts.dtype == torch.int32, "as the kernel wants it"
        assert starts[0] == 0
        assert starts[-1] == len(tensor), "what no sequence has is not written"
        assert int(starts.diff().min()) > 0
        assert int(starts.diff().max()) <= longest
    assert len(cu_seq_q) == len(cu_seq_k)
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    groups = query.shape[1] // key.shape[1]
    for q_start, q_stop, k_start, k_stop in zip(
        cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), cu_seq_k[:-1].tolist(), cu_seq_k[1:].tolist(), strict=True
    ):
        queries, keys = slice(q_start, q_stop), slice(k_start, k_stop)
        heads = key[keys].repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query[queries], heads) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
            scores = scores.masked_fill(unseen, -torch.inf)
        yield queries, keys, scores


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, is_causal: bool = False, scale: float | None = None, window_size: Any = None,
    enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None, num_splits: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (output [queries, heads, head], log-sum-exp [heads, queries], random state)."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert list(window_size) == ([-1, 0] if is_causal else [-1, -1])
    output = torch.full_like(query, torch.nan)
    logsumexp = torch.full(query.shape[1::-1], torch.nan, dtype=torch.promote_types(query.dtype, torch.float32))
    wide = (tensor.to(logsumexp.dtype) for tensor in (query, key, value))
    query, key, value = wide
    groups = query.shape[1] // key.shape[1]
    for queries, keys, scores in _sequences(query, key, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale):
        values = value[keys].repeat_interleave(groups, 1)
        output[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(output.dtype)
        logsumexp[:, queries] = scores.logsumexp(-1)
    return output, logsumexp, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int, is_causal: bool,
    rng_state: torch.Tensor, scale: float | None = None, window_size: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of query, key and value for the probabilities exp(scores - lse), as FlashAttention does."""
    assert list(window_size) == ([-1, 0] if is_causal else [-1, -1])
    assert lse.shape == query.shape[1::-1]
    dtype, groups = query.dtype, query.shape[1] // key.shape[1]
    grad_out, query, key, value, out = (each.to(lse.dtype) for each in (grad_out, query, key, value, out))
    delta = (grad_out * out).sum(-1).T  # [heads, queries]
    sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for queries, keys, scores in _sequences(query, key, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale):
        upstream, values = grad_out[queries], value[keys].repeat_interleave(groups, 1)
        probabilities = (scores - lse[:, queries, None]).exp()
        rise = torch.einsum("qhd,khd->hqk", upstream, values) - delta[:, queries, None]
        of_scores = probabilities * rise * (scale or query.shape[-1] ** -0.5)
        sums[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, key[keys].repeat_interleave(groups, 1))
        for total, part in (
            (sums[1], torch.einsum("hqk,qhd->khd", of_scores, query[queries])),
            (sums[2], torch.einsum("hqk,qhd->khd", probabilities, upstream)),
        ):
            total[keys] = part.unflatten(1, (-1, groups)).sum(2)
    return sums[0].to(dtype), sums[1].to(dtype), sums[2].to(dtype)
