"""Weights in fp8, as engines hold and multiply them: codes, and one scale for each row of a matrix.

    scale = max(largest / top, least)      `largest`: the largest magnitude of the row
    code  = value / scale, rounded to the nearest code, half to even, within [-top, top]

A row is an output of a layer, or a token. Neither fusing layers nor splitting them over devices changes its scale, so
a learner that knows a row's largest magnitude knows an engine's codes. This is vLLM's quantisation of weights that it
loads (`fp8_per_channel`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Codes:
    """The numbers that a format has."""

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
