"""Fused attention kernels that also return the log-sum-exp of the scores, forward and backward.

torch's public `scaled_dot_product_attention` does not return the log-sum-exp, which is needed to join attention over
two sets of keys (rlhfless.functions.prefix_attention). Scores and sums are in float32 or wider, whatever the inputs'
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.varlen import AuxRequest, _varlen_attn_backward, varlen_attn

_aten = torch.ops.aten

CAUSAL, ALL = (-1, 0), (-1, -1)
"""Windows (tokens to the left, tokens to the right) of `varlen_attn`."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention on a CPU.

    `query` [batch, heads, queries, head], `key` and `value` [batch, heads, keys, head] -> output [batch, heads,
    queries, head], log-sum-exp [batch, heads, queries].
    """
    output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal, scale=scale
    )
    return output, logsumexp


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
    """Return the gradients of query, key and value from `gradient`, that of `output`; shapes as in `attend`.

    Output and log-sum-exp may cover more keys than these; the gradients are then the part of these keys.
    """
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logsumexp, 0.0, causal, scale=scale
    )
    return gradients[0], gradients[1], gradients[2]


def uses_varlen(device: torch.device) -> bool:
    """Return whether packed rows on `device` use torch's variable-length FlashAttention, as on GPUs.

    It supports heads of up to 256 dimensions.
    """
    return device.type == "cuda"


def packed_rows_take(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels of packed rows on `device` support this dtype."""
    return not uses_varlen(device) or dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The boundaries of the sequences of a row."""

    starts: torch.Tensor  # [sequences + 1], int32; the last one is the length of the row
    longest: int

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Pieces:
        """Compute the boundaries.

        `longest` is an upper bound and at least 2: for one-token sequences the kernel would take another path and
        write its log-sum-exp in another order.
        """
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(starts.to(device), max([*lengths, 2]))


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Pieces,
    keys: Pieces,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each piece of the queries to the same piece of the keys.

    `query` [queries, heads, head], `key` and `value` [keys, KV heads, head] -> output [queries, heads, head],
    log-sum-exp [heads, queries].
    """
    output, logsumexp = varlen_attn(
        query, key, value, queries.starts, keys.starts, queries.longest, keys.longest,
        return_aux=AuxRequest(lse=True), scale=scale, window_size=CAUSAL if causal else ALL, enable_gqa=True,
    )  # fmt: skip
    return output, logsumexp


def attend_varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    queries: Pieces,
    keys: Pieces,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `attend_varlen`; see `attend_backward`.

    Queries with infinite log-sum-exp neither receive nor contribute gradients.
    """
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients = _varlen_attn_backward(
        gradient, query, key, value, output, logsumexp, queries.starts, keys.starts, queries.longest, keys.longest,
        causal, no_dropout, scale, list(CAUSAL if causal else ALL),
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]
