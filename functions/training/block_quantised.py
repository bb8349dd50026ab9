"""Tensors in 8 bits per number: blocks with a scale each, and a code for values of very different size.

Of each row, BLOCK neighbouring numbers share a scale, their largest absolute value (block-wise quantisation, Dettmers
et al., arXiv 2110.02861, section 2.1). A code stands for a value in [-1, 1] of a table whose decades down to 1e-7 each
have half as many values as the one above (dynamic quantisation, section 2.2): an optimiser's moments differ by orders
of magnitude within a block. A block never crosses a row, so the codes of a row are the same however many ranks share
the rows.
"""

from __future__ import annotations

import functools

import torch

from rlhfless.scaling.memory import SCALED_NUMBERS

BLOCK = SCALED_NUMBERS
"""Numbers that share a scale: 1/64 byte per number, and a large number spoils few others."""


@functools.cache
def table(device: torch.device, *, signed: bool) -> torch.Tensor:
    """The values `[codes]` that codes stand for, ascending: 0, and 10^-e (0.1 + 0.9 k / n) for k = 1 .. n with
    n = 2^(7 - e), e = 0 .. 7; `signed`: n = 2^(6 - e), e = 0 .. 6, each with both signs."""
    most = 6 if signed else 7
    positive = torch.cat(
        [10.0**-e * (0.1 + 0.9 * torch.arange(1, 2 ** (most - e) + 1) / 2 ** (most - e)) for e in range(most, -1, -1)]
    )
    values = torch.cat([-positive.flip(0), torch.zeros(1), positive] if signed else [torch.zeros(1), positive])
    return values.to(device, torch.float32)


@functools.cache
def _bounds(device: torch.device, *, signed: bool) -> torch.Tensor:
    values = table(device, signed=signed)
    return (values[1:] + values[:-1]) / 2


def blocks_of(width: int) -> int:
    """Blocks of a row of `width` numbers."""
    return -(-width // BLOCK)


def quantised(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[rows, width]` (uint8) and scales `[rows, blocks]` (float32) of `values` [rows, width]: the nearest value
    of the table, but for a positive one of those without a sign never 0, by which an update would be divided."""
    rows, width = values.shape
    blocks = torch.nn.functional.pad(values, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1)
    relative = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(relative, _bounds(values.device, signed=signed), out_int32=True)
    if not signed:
        codes = torch.maximum(codes, (blocks > 0).int())
    return codes.to(torch.uint8).view(rows, -1)[:, :width], scales


def restored(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The values `[rows, width]` in float32 that codes and scales stand for."""
    rows, width = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    values = table(codes.device, signed=signed)[padded.int()] * scales.unsqueeze(-1)
    return values.view(rows, -1)[:, :width]
