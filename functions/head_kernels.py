"""The output head on GPUs: logprobs and entropy in one pass over each block of logits, in Triton.

The plain head (rlhfless.functions.lm_head) reads and writes each logit some 20 times in float32; here its product is
read once in the forward pass and overwritten by its gradient in the backward pass. Loading a policy compares both on
its device. `TRITON_INTERPRET=1` runs these kernels on CPUs.

The softmax is the one-pass recurrence of Milakov and Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from rlhfless.functions.lm_head import Entropy, HeadPass, OutputHead, head_logprobs, in_format, rows_of

BLOCK = 4096
"""Logits of a row that a program holds at a time."""

WARPS = 8

BLOCKS_OF_PLAN = 4
"""Size of a block of products relative to the plain head's, which the memory plan counts: the plain head holds five
float32 tensors, this one a single tensor in the products' own dtype."""


@triton.jit
def _logits(products, scale, cap, temperature, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert products to logits at the temperature, and return their derivative."""
    logits = products.to(tl.float32) * scale
    slope = scale / temperature
    if CAPPED:
        bent = 2 * tl.sigmoid(2 * logits / cap) - 1  # tanh
        logits = bent * cap
        slope = slope * (1 - bent * bent)
    return logits / temperature, slope


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    products, targets, logprobs, normalisers, entropies, columns, scale, cap, temperature,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    products += row.to(tl.int64) * columns
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        logits, _ = _logits(tl.load(products + column, mask=inside, other=0), scale, cap, temperature, CAPPED)
        reached = tl.maximum(largest, tl.max(tl.where(inside, logits, -float("inf")), 0))
        powers = tl.where(inside, tl.exp(logits - reached), 0)
        shrunk = tl.exp(largest - reached)
        total = total * shrunk + tl.sum(powers, 0)
        if ENTROPY:
            weighted = weighted * shrunk + tl.sum(powers * logits, 0)
        largest = reached
    normaliser = largest + tl.log(total)
    target, _ = _logits(tl.load(products + tl.load(targets + row)), scale, cap, temperature, CAPPED)
    tl.store(logprobs + row, target - normaliser)
    tl.store(normalisers + row, normaliser)
    if ENTROPY:
        tl.store(entropies + row, normaliser - weighted / total)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    products, targets, normalisers, entropies, of_logprobs, of_entropies, columns, scale, cap, temperature,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the products with the gradient  g (1[target] - p) - e p (log p + H),  times the slope of the logits."""
    row = tl.program_id(0)
    products += row.to(tl.int64) * columns
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logits, slope = _logits(tl.load(products + column, mask=inside, other=0), scale, cap, temperature, CAPPED)
    logprobs = logits - tl.load(normalisers + row)
    powers = tl.exp(logprobs)
    of_logprob = tl.load(of_logprobs + row)
    gradient = tl.where(column == tl.load(targets + row), of_logprob, 0.0) - of_logprob * powers
    if ENTROPY:
        gradient -= tl.load(of_entropies + row) * powers * (logprobs + tl.load(entropies + row))
    tl.store(products + column, gradient * slope, mask=inside)


class _FusedHead(torch.autograd.Function):
    """Fused equivalent of rlhfless.functions.lm_head._ChunkedHead.

    A single block of products is kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        asked: HeadPass,
    ) -> tuple[torch.Tensor, ...]:
        rows = BLOCKS_OF_PLAN * rows_of(asked.head)
        logprobs, normalisers, entropies = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        chunks = (torch.split(each, rows) for each in (hidden, targets, logprobs, normalisers, entropies))
        ctx.products = None
        for part, target, *outputs in zip(*chunks, strict=True):
            products = linear(part, weight, bias)
            _launch(_forward, (len(target),), products, target, *outputs, asked, asked.entropy != "none")
            if asked.backward and len(targets) <= rows:
                ctx.products = products
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.rows, ctx.asked = rows, asked
        if asked.entropy == "none":
            return (logprobs,)
        if asked.entropy == "value":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: torch.Tensor, *of_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight = of_bias = None
        of_hidden, with_entropy = torch.empty_like(hidden), ctx.asked.entropy == "gradient"
        of_entropies = of_entropy[0] if with_entropy else entropies
        upstream = (of_logprobs.contiguous(), of_entropies.contiguous())
        given = (hidden, targets, normalisers, entropies, *upstream, of_hidden)
        for part, target, *rows, result in zip(*(torch.split(each, ctx.rows) for each in given), strict=True):
            slope = linear(part, weight, bias) if ctx.products is None else ctx.products
            grid = (len(target), triton.cdiv(slope.shape[1], BLOCK))
            _launch(_backward, grid, slope, target, *rows, ctx.asked, with_entropy)
            torch.mm(slope, weight, out=result)
            if ctx.needs_input_grad[1]:
                of_weight = _added(of_weight, slope.T @ part, len(hidden) > ctx.rows)
            if ctx.needs_input_grad[2]:
                of_bias = _added(of_bias, slope.sum(0, dtype=wide), several=False)
        ctx.products = None  # it holds the gradient now
        return of_hidden, *in_format(weight, of_weight, of_bias), None, None


def _added(total: torch.Tensor | None, part: torch.Tensor, several: bool) -> torch.Tensor:
    """Add to a sum, which is at least float32 if it has several parts; see rlhfless.functions.lm_head."""
    if total is not None:
        return total.add_(part)
    return part.to(torch.promote_types(part.dtype, torch.float32)) if several else part


def _launch(kernel: Any, grid: tuple[int, ...], products: torch.Tensor, *given: Any) -> None:
    *tensors, asked, entropy = given
    if not len(products):
        return
    kernel[grid](
        products, *tensors, products.shape[1], asked.head.scale, asked.head.soft_cap or 1.0, asked.temperature,
        CAPPED=asked.head.soft_cap is not None, ENTROPY=entropy, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def fused_logprobs(
    head: OutputHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: Entropy = "none"
) -> tuple[torch.Tensor, ...]:
    """Compute rlhfless.functions.lm_head.head_logprobs with the fused kernels, in float32."""
    return HeadPass(head, temperature, entropy, torch.is_grad_enabled()).apply(_FusedHead, hidden, targets)


CHECKED_ROWS, CHECKED_WIDTH = 12, 64
"""Shape of the hidden states in `fused_difference`."""


def fused_difference(head: OutputHead, device: torch.device, dtype: torch.dtype) -> float:
    """Compare the fused head of this vocabulary, scale, cap and dtype with the plain one on random weights.

    Returns the largest difference of outputs and gradients, relative to the largest value of each.
    """
    vocabulary, random = head.linear.weight.shape[0], torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    layer = torch.nn.Linear(CHECKED_WIDTH, vocabulary, bias=head.linear.bias is not None, device=device, dtype=dtype)
    for parameter in layer.parameters():
        parameter.data.copy_(drawn(*parameter.shape))
    hidden, targets = drawn(CHECKED_ROWS, CHECKED_WIDTH) / 4, torch.arange(CHECKED_ROWS, device=device) % vocabulary

    @torch.enable_grad()
    def everything(compute: Any, head: OutputHead) -> list[torch.Tensor]:
        inputs = [hidden.clone().requires_grad_(), *layer.parameters()]
        logprobs, entropies = compute(head, inputs[0], targets, 0.7, "gradient")
        gradients = torch.autograd.grad((logprobs - entropies / 2).square().sum(), inputs)
        return [each.detach().float() for each in (logprobs, entropies, *gradients)]

    apart = []
    for elements in (2 * vocabulary, CHECKED_ROWS * vocabulary):  # several blocks of rows, and a single one
        small = dataclasses.replace(head, linear=layer, chunk_elements=elements)
        plain, fused = everything(head_logprobs, small), everything(fused_logprobs, small)
        apart += [
            (one - other).abs().max() / one.abs().max().clamp(min=1e-6) for one, other in zip(plain, fused, strict=True)
        ]
    return float(torch.stack(apart).max())
