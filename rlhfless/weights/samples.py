"""Which elements of a version are compared, bit for bit, between the learner and the layers of an engine.

The learner reads the values from its live weights, not from the file that it published; the engine reads them back
from the layers that serve. Both sides choose the elements by this module, from the tensor's shape and the probe's
tokens alone, so that only values are sent.

The elements form a grid of rows and columns, because an engine with packed layers gives back whole columns: the product
with a one-hot vector. Their number: 1e-6 is about the smallest learning rate in use, and one Adam update, which moves a
weight by about the learning rate, changes 1 in 120 of a bfloat16 tensor's elements where weights are about 0.02 (their
spacing is 1.2e-4), and 1 in 250 where they are about 0.2 (measured). So a stale tensor of 4,096 sampled elements
passes with a probability of 0.996^4096 = 7e-8 or less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from rlhfless.records import WeightSample
from rlhfless.weights.digest import dtype_name, tensor_bytes

SAMPLED_ELEMENTS = 4096
"""Sampled elements of each tensor; 8 KiB in bfloat16, so 6 MB for the 723 tensors of a model of 70 B parameters."""

SAMPLED_COLUMNS = 32
"""Sampled columns of each matrix: reading them back costs an engine as much as a prefill of 32 tokens."""


def sampled_elements(shape: Sequence[int], tokens: Collection[int]) -> torch.Tensor:
    """Flat indices `[elements]` of the sampled elements of a tensor of `shape`; all elements of a small one.

    Half of the rows are tokens of the probe, because in an embedding only the rows of tokens that occur move. The
    other rows are evenly spread, so that each device of a split layer has some.
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
    """Up to `most` indices below `size`, evenly spread."""
    count = min(size, most)
    return torch.arange(count, dtype=torch.int64) * size // max(count, 1)


def weight_sample(tensor: torch.Tensor, tokens: Collection[int], dtype: torch.dtype) -> WeightSample:
    """The sampled elements of `tensor` in `dtype`, and what their rows are scaled by in 8 bits."""
    tensor, indices = tensor.detach(), sampled_elements(tensor.shape, tokens).to(tensor.device)
    values = bytes(tensor_bytes(tensor.reshape(-1)[indices].to(dtype)))
    if tensor.dim() < 2 or not len(indices):
        return WeightSample(values, b"", tuple(tensor.shape), dtype_name(dtype))
    width = tensor.shape[-1]
    rows = tensor.reshape(-1, width)[torch.unique(indices // width)]
    maxima = bytes(tensor_bytes(rows.to(dtype).abs().amax(1).to(torch.float32)))
    return WeightSample(values, maxima, tuple(tensor.shape), dtype_name(dtype))


def decoded(sample: WeightSample, codes: Codes | None = None) -> torch.Tensor:
    """The sampled elements `[elements]` in their dtype; as a layer has them that holds `codes`, in float32."""
    values = torch.frombuffer(bytearray(sample.values), dtype=getattr(torch, sample.dtype))
    if codes is None:
        return values
    largest = torch.frombuffer(bytearray(sample.row_maxima), dtype=torch.float32)
    return codes.as_drawn_with(values.view(len(largest), -1), largest).flatten()


@dataclass(frozen=True, slots=True)
class Codes:
    """Weights in fp8, as engines hold and multiply them: codes, and one scale for each row of a matrix.

        scale = max(largest / top, least)      `largest`: the largest magnitude of the row
        code  = value / scale, rounded to the nearest code, half to even, within [-top, top]

    A row is an output of a layer, or a token. Neither fusing layers nor splitting them over devices changes its scale,
    so a learner that knows a row's largest magnitude knows an engine's codes. This is vLLM's quantization of weights
    that it loads (`fp8_per_channel`).
    """

    dtype: torch.dtype
    top: float
    """The largest."""
    least_scale: float
    """A row of zeros has this scale."""

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """The scale of each row, float32, from its `largest` magnitude, of any shape."""
        # A tensor divides; a Python number would multiply by its reciprocal, which may round to another scale.
        top = torch.tensor(self.top, dtype=torch.float32, device=largest.device)
        return (largest.to(torch.float32) / top).clamp_min(self.least_scale)

    def of(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The codes `[rows, width]` of `values` [rows, width] with `scales` [rows, 1]."""
        return (values.to(torch.float32) / scales).clamp_(-self.top, self.top).to(self.dtype)

    def as_drawn_with(self, values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """`values` [rows, width] as a layer with their codes has them, float32; `largest` [rows]: of whole rows."""
        scales = self.scales(largest)[:, None]
        return self.of(values, scales).to(torch.float32) * scales


SCALING = 1e-6
"""Relative error of a code times the scales of its row and of a token, in float32."""


def product_error(dtype: torch.dtype) -> float:
    """The largest relative error of the product of a code and one, which is exact but for the scales and the rounding
    to an output's format. Neighbouring codes differ by 1/15 of their value and more."""
    return torch.finfo(dtype).eps / 2 + SCALING


FP8 = Codes(torch.float8_e4m3fn, 448.0, 1 / (448 * 512))
"""Some devices have other codes for fp8, which their workers know."""
