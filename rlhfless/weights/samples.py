"""Select the elements of a version that are compared bit for bit between the learner and an engine's layers.

The learner reads the values from its live weights, not from the published file. The engine reads the same elements
back; the choice depends on the probe's tokens alone, so only values are sent.

The elements form a grid of rows and columns, because an engine with packed layers returns whole columns: the product
with a one-hot vector. Sample size: 1e-6 is about the smallest learning rate in use, and one Adam update, which moves
a weight by about the learning rate, changes 1 in 120 of a bfloat16 tensor's elements where weights are about 0.02
(their spacing is 1.2e-4), and 1 in 250 where they are about 0.2 (measured). A stale tensor with 4,096 sampled
elements thus passes with a probability of at most 0.996^4096 = 7e-8.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from rlhfless.records import WeightSample
from rlhfless.weights.digest import dtype_name, tensor_bytes

SAMPLED_ELEMENTS = 4096
"""Sampled elements per tensor: 8 KiB in bfloat16, so 6 MB for the 723 tensors of a 70 B model."""

SAMPLED_COLUMNS = 32
"""Sampled columns per matrix: reading them back costs an engine as much as a prefill of 32 tokens."""


def sampled_elements(shape: Sequence[int], tokens: Collection[int]) -> torch.Tensor:
    """Return flat indices `[elements]` of the sampled elements of a tensor of `shape`; all elements if it is small.

    Half of the rows are tokens of the probe, because in an embedding only the rows of occurring tokens change. The
    other rows are evenly spread, so that each device of a split layer holds some.
    """
    if len(shape) < 2:
        return _spread(shape[0] if shape else 1, SAMPLED_ELEMENTS)
    width = shape[-1]
    height = torch.Size(shape[:-1]).numel()
    columns = _spread(width, SAMPLED_COLUMNS)
    if not len(columns):
        return columns
    count = SAMPLED_ELEMENTS // len(columns)
    known = torch.tensor(sorted(token for token in set(tokens) if token < height), dtype=torch.int64)
    chosen = known[_spread(len(known), count // 2)]
    rows = torch.tensor(sorted({*chosen.tolist(), *_spread(height, count - len(chosen)).tolist()}))
    flat: torch.Tensor = (rows[:, None] * width + columns).flatten()
    return flat


def _spread(size: int, most: int) -> torch.Tensor:
    """Return up to `most` evenly spread indices below `size`."""
    count = min(size, most)
    return torch.arange(count, dtype=torch.int64) * size // max(count, 1)


def weight_sample(tensor: torch.Tensor, tokens: Collection[int], dtype: torch.dtype) -> WeightSample:
    """Return the sampled elements of `tensor` in `dtype`, and the row maxima that determine 8-bit scales."""
    tensor, indices = tensor.detach(), sampled_elements(tensor.shape, tokens).to(tensor.device)
    values = bytes(tensor_bytes(tensor.reshape(-1)[indices].to(dtype)))
    if tensor.dim() < 2 or not len(indices):
        return WeightSample(values, b"", tuple(tensor.shape), dtype_name(dtype))
    width = tensor.shape[-1]
    rows = tensor.reshape(-1, width)[torch.unique(indices // width)]
    maxima = bytes(tensor_bytes(rows.to(dtype).abs().amax(1).to(torch.float32)))
    return WeightSample(values, maxima, tuple(tensor.shape), dtype_name(dtype))


def decoded(sample: WeightSample, codes: Codes | None = None) -> torch.Tensor:
    """Return the sampled elements `[elements]` in their dtype, or with `codes` as an 8-bit layer has them (float32)."""
    values = torch.frombuffer(bytearray(sample.values), dtype=getattr(torch, sample.dtype))
    if codes is None:
        return values
    largest = torch.frombuffer(bytearray(sample.row_maxima), dtype=torch.float32)
    return codes.as_drawn_with(values.view(len(largest), -1), largest).flatten()


@dataclass(frozen=True, slots=True)
class Codes:
    """Weights in fp8, as engines store and multiply them: codes, and one scale per row of a matrix.

        scale = max(largest / top, least)    `largest`: the largest magnitude of the row
        code  = value / scale, rounded to the nearest code, half to even, within [-top, top]

    A row is an output of a layer, or a token. Neither fusing layers nor splitting them over devices changes its
    scale, so a learner that knows a row's largest magnitude knows an engine's codes. This is vLLM's quantization of
    weights that it loads (`fp8_per_channel`).
    """

    dtype: torch.dtype
    top: float
    """The largest code."""
    least_scale: float
    """The smallest scale; used for rows of zeros."""

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the float32 scale of each row from its `largest` magnitude, of any shape."""
        # Divide by a tensor: a Python number would multiply by its reciprocal, which may round to another scale.
        top = torch.tensor(self.top, dtype=torch.float32, device=largest.device)
        return (largest.to(torch.float32) / top).clamp_min(self.least_scale)

    def of(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the codes `[rows, width]` of `values` [rows, width] with `scales` [rows, 1]."""
        return (values.to(torch.float32) / scales).clamp_(-self.top, self.top).to(self.dtype)

    def as_drawn_with(self, values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return `values` [rows, width] as a layer with their codes has them, in float32.

        `largest` [rows] is the largest magnitude of each whole row.
        """
        scales = self.scales(largest)[:, None]
        return self.of(values, scales).to(torch.float32) * scales


SCALING = 1e-6
"""Relative error of multiplying a code by the scales of its row and of a token, in float32."""


def product_error(dtype: torch.dtype) -> float:
    """Return the largest relative error of a code's product with a one-hot input.

    The product is exact except for the scales and the rounding to the output's dtype. Adjacent codes differ by at
    least 1/15 of their value.
    """
    return torch.finfo(dtype).eps / 2 + SCALING


FP8 = Codes(torch.float8_e4m3fn, 448.0, 1 / (448 * 512))
"""The common fp8 codes. Some devices use other codes, which their workers know."""
