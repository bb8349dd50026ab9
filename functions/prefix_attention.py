"""Prefix-grouped attention: a packed row that contains each shared prefix once (rlhfless.prefixes.packing).

Exact, by the identity behind flash and ring attention (Dao et al. 2022, arXiv 2205.14135; Liu et al. 2023, arXiv
2310.01889): softmax attention over the union of disjoint sets of keys is the mean of the attentions over each,
weighted by exp(logsumexp of their scores). The sets here are a token's own segment, causally, and each prefix before
its segment, as a whole. The backward pass calls the same kernels' backward with the output and the logsumexp of the
union, which makes their probabilities those of the union; keys and values of a prefix thus get the gradient of all
tokens that attend to them.

On GPUs all parts run in variable-length FlashAttention, without padding or copies of KV heads or queries: one call
for own segments, and one more for the prefixes of each depth. On a CPU they run in torch's fused kernel, grouping
segments of similar length. Models reach this module through transformers' attention interface, under NAME: without a
layout it is torch's ordinary scaled dot product attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhfless.functions.attention_kernels import (
    Pieces,
    attend,
    attend_backward,
    attend_varlen,
    attend_varlen_backward,
)
from rlhfless.prefixes.packing import PackedSegments

NAME = "rlhfless_shared_prefixes"
"""Name of this attention in a model's configuration."""

_OTHER_FORMS = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Arguments with which models request another attention than softmax over all earlier tokens."""


class SharingUnsupported(Exception):
    """The attention of a model has a form that this module does not compute."""


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """A PackedSegments on a device. Segments of similar length are computed together, padded on the right."""

    tokens: int
    buckets: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(index [segments, width] of each token of the segments, valid [segments * width]: not padding)"""
    shared: tuple[tuple[slice, slice], ...]
    """(own tokens, tokens that attend to them) of each prefix."""

    @classmethod
    def of(cls, packed: PackedSegments, device: torch.device) -> PrefixLayout:
        return cls(
            tokens=len(packed.source),
            buckets=tuple(_bucket(segments, device) for segments in _alike(packed.segments)),
            shared=tuple((slice(start, stop), slice(stop, end)) for start, stop, end in packed.shared if end > stop),
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention over the layout.

        `query` [1, heads, tokens, head], `key` and `value` [1, KV heads, tokens, head] -> output [1, heads, tokens,
        head], log-sum-exp [1, heads, tokens].
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        # Token-major in memory: the model's next product reads it that way and then keeps no copy.
        output = torch.empty_like(query.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format)
        output = output.transpose(1, 2)
        keys, values = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
        logsumexp = torch.empty(query.shape[:-1], dtype=wide, device=query.device)
        for index, valid in self.buckets:
            q, k, v = (_rows(tensor, index) for tensor in (query, keys, values))
            of_segments, scores = attend(q, k, v, scale=scale, causal=True)
            at = index.flatten()[valid]
            output[0][:, at] = of_segments.transpose(0, 1).flatten(1, 2)[:, valid].to(wide)
            logsumexp[0][:, at] = scores.transpose(0, 1).flatten(1, 2)[:, valid].to(wide)
        for own, users in self.shared:
            of_prefix, scores = attend(
                query[:, :, users], keys[:, :, own], values[:, :, own], scale=scale, causal=False
            )
            union = torch.logaddexp(logsumexp[:, :, users], scores.to(wide))
            output[:, :, users] *= (logsumexp[:, :, users] - union).exp_().unsqueeze(-1)
            output[:, :, users] += of_prefix * (scores - union).exp_().unsqueeze(-1)
            logsumexp[:, :, users] = union
        return output.to(query.dtype), logsumexp

    def attend_backward(
        self, gradient: torch.Tensor, saved: Sequence[torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value from the `gradient` of the output.

        `saved`: query, key, value, output, log-sum-exp.
        """
        query, key, value, output, logsumexp = saved
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        keys, values = (repeat_kv(tensor, groups[1]) for tensor in (key, value))
        sums = [torch.zeros_like(tensor, dtype=logsumexp.dtype) for tensor in (query, keys, values)]
        for index, valid in self.buckets:
            upstream = _rows(gradient, index).masked_fill(~valid.view(index.shape)[:, None, :, None], 0)
            q, k, v, out = (_rows(tensor, index) for tensor in (query, keys, values, output))
            scores = logsumexp[0][:, index].transpose(0, 1)
            at = index.flatten()[valid]
            parts = attend_backward(upstream, q, k, v, out, scores, scale=scale, causal=True)
            for total, part in zip(sums, parts, strict=True):
                total[0][:, at] += part.transpose(0, 1).flatten(1, 2)[:, valid]
        for own, users in self.shared:
            upstream, q, out = (tensor[:, :, users] for tensor in (gradient, query, output))
            k, v = (tensor[:, :, own] for tensor in (keys, values))
            parts = attend_backward(upstream, q, k, v, out, logsumexp[:, :, users], scale=scale, causal=False)
            for total, part, where in zip(sums, parts, (users, own, own), strict=True):
                total[:, :, where] += part
        sums[1:] = [total.unflatten(1, groups).sum(2) for total in sums[1:]]
        return tuple(total.to(query.dtype) for total in sums)


@dataclass(frozen=True, slots=True)
class SharedDepth:
    """The prefixes of one depth, to which disjoint parts of the row attend.

    A part that attends to no prefix of this depth gets one key, so that no sequence is empty, and is marked `idle`.
    """

    queries: Pieces
    keys: Pieces
    source: torch.Tensor  # [keys], position of each key in the row
    idle: torch.Tensor  # [tokens], bool


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """A PackedSegments on a GPU."""

    own: Pieces
    levels: tuple[SharedDepth, ...]
    """The shortest prefixes first."""

    @classmethod
    def of(cls, packed: PackedSegments, device: torch.device) -> VarlenLayout:
        return cls(
            Pieces.of([tokens for _, tokens in packed.segments], device),
            tuple(_level(prefixes, len(packed.source), device) for prefixes in packed.levels()),
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention over the layout.

        `query` [tokens, heads, head], `key` and `value` [tokens, KV heads, head] -> output [tokens, heads, head],
        log-sum-exp [heads, tokens].
        """
        output, logsumexp = attend_varlen(query, key, value, self.own, self.own, scale=scale, causal=True)
        for level in self.levels:
            k, v = key[level.source], value[level.source]
            of_prefix, scores = attend_varlen(query, k, v, level.queries, level.keys, scale=scale, causal=False)
            scores = scores.masked_fill(level.idle, -torch.inf)
            share = (scores - logsumexp).sigmoid()  # exp(scores) / (exp(scores) + exp(logsumexp))
            output = torch.lerp(output, of_prefix, share.T.unsqueeze(-1).to(output.dtype))
            logsumexp = torch.logaddexp(logsumexp, scores)
        return output, logsumexp

    def attend_backward(
        self, gradient: torch.Tensor, saved: Sequence[torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value from the `gradient` of the output.

        `saved`: query, key, value, output, log-sum-exp.
        """
        query, key, value, output, logsumexp = saved
        q_sum, k_sum, v_sum = attend_varlen_backward(
            gradient, query, key, value, output, logsumexp, self.own, self.own, scale=scale, causal=True
        )
        for level in self.levels:
            k, v = key[level.source], value[level.source]
            scores = logsumexp.masked_fill(level.idle, torch.inf)
            of_q, of_k, of_v = attend_varlen_backward(
                gradient, query, k, v, output, scores, level.queries, level.keys, scale=scale, causal=False
            )
            q_sum += of_q
            k_sum.index_add_(0, level.source, of_k)
            v_sum.index_add_(0, level.source, of_v)
        return q_sum, k_sum, v_sum


def _level(prefixes: list[tuple[int, int, int]], tokens: int, device: torch.device) -> SharedDepth:
    """Build one depth from `prefixes`, (start, stop, end) as in PackedSegments.shared, ascending."""
    queries, source, idle, at = list[int](), [], np.ones(tokens, bool), 0
    for start, stop, end in [*prefixes, (0, tokens, tokens)]:
        for first, last, attended in ((at, stop, np.array([at])), (stop, end, np.arange(start, stop))):
            if last > first:
                queries.append(last - first)
                source.append(attended)
        idle[stop:end] = False
        at = end
    return SharedDepth(
        Pieces.of(queries, device),
        Pieces.of(list(map(len, source)), device),
        torch.from_numpy(np.concatenate(source)).to(device),
        torch.from_numpy(idle).to(device),
    )


def packed_row(packed: PackedSegments, device: torch.device, *, varlen: bool) -> dict[str, Any]:
    """Return the arguments with which a decoder with attention NAME forwards a row of tokens in this layout."""
    return {
        "position_ids": torch.from_numpy(packed.positions)[None].to(device),
        "prefix_layout": (VarlenLayout if varlen else PrefixLayout).of(packed, device),
        # transformers uses a four-dimensional mask as is and creates none; this attention only uses the layout.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
    }


def _alike(segments: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the segments grouped by the two leading bits of their length: at most half of a bucket is padding."""
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for segment in segments:
        bits = (segment[1] - 1).bit_length()
        alike.setdefault((bits, (segment[1] - 1) >> max(bits - 2, 0)), []).append(segment)
    yield from alike.values()


def _bucket(segments: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a bucket of segments.

    Padding repeats a segment's last token: causal attention ignores it, and its gradient is 0.
    """
    start, tokens = np.array(segments).T[:, :, None]
    run = np.arange(tokens.max())
    index = torch.from_numpy(start + np.minimum(run, tokens - 1)).to(device)
    return index, torch.from_numpy((run < tokens).ravel()).to(device)


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_layout: PrefixLayout | VarlenLayout | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers' attention interface.

    `query` [1, heads, tokens, head], `key` and `value` [1, KV heads, tokens, head] -> [1, tokens, heads, head].
    Raises SharingUnsupported for a layout with attention that is more than softmax over all earlier tokens.
    """
    if prefix_layout is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        return output, None
    if wanted := [name for name in _OTHER_FORMS if arguments.get(name) is not None]:
        raise SharingUnsupported(f"its attention has {wanted[0]}")
    if value.shape[-1] != query.shape[-1]:  # multi-head latent attention, such as DeepSeek's
        raise SharingUnsupported(f"its values have {value.shape[-1]} dimensions a head, and its keys {key.shape[-1]}")
    if torch.is_autocast_enabled(query.device.type):
        wanted_dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(wanted_dtype) for tensor in (query, key, value))
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    if isinstance(prefix_layout, VarlenLayout):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return _UnionAttention.apply(q, k, v, prefix_layout, scale)[None], None
    return _UnionAttention.apply(query, key, value, prefix_layout, scale).transpose(1, 2), None


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _UnionAttention(torch.autograd.Function):
    """Attention over a layout, [1, heads, tokens, head] or [tokens, heads, head] as its `attend` takes them.

    Keeps the same tensors as torch's own attention for the backward pass, and no copies of KV heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PrefixLayout | VarlenLayout,
        scale: float,
    ) -> torch.Tensor:
        output, logsumexp = layout.attend(query, key, value, scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.layout.attend_backward(gradients[0].contiguous(), ctx.saved_tensors, ctx.scale), None, None


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather [1, heads, tokens, head] by `index` [segments, width] into [segments, heads, width, head]."""
    return tensor[0][:, index].transpose(0, 1)
