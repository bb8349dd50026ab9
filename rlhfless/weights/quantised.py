"""Weights in 8 bits, as engines hold and multiply them: codes, and one scale for each row of a matrix.

    scale = max(largest / top, least)      `largest`: the largest magnitude of the row
    code  = value / scale, rounded to the nearest code, half to even, within [-top, top]

A row is an output of a layer, or a token. Neither fusing layers nor splitting them over devices changes its scale, so
a learner that knows a row's largest magnitude knows an engine's codes. This is vLLM's quantisation of weights that it
loads (`fp8_per_channel`), and the symmetric one of its kernels for int8.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from rlhfless.spec.generation import Quantised


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
        scaled = (values.to(torch.float32) / scales).clamp_(-self.top, self.top)
        return (scaled if self.dtype.is_floating_point else scaled.round_()).to(self.dtype)

    def as_drawn_with(self, values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """`values` [rows, width] as a layer with their codes has them, float32; `largest` [rows]: of whole rows."""
        scales = self.scales(largest)[:, None]
        return self.of(values, scales).to(torch.float32) * scales


NO_VNNI = (
    "this processor has no VNNI instructions, without which products of int8 lose a bit: the engine would draw with "
    "other weights than it was given"
)


def multiplies_int8_exactly() -> bool:
    """Whether this machine's processor adds up products of int8 without an overflow at 16 bits: x86 only with VNNI."""
    return platform.machine() != "x86_64" or "_vnni" in Path("/proc/cpuinfo").read_text()


SCALING = 1e-6
"""Relative error of a code times the scales of its row and of a token, in float32."""


def product_error(dtype: torch.dtype) -> float:
    """The largest relative error of the product of a code and one, which is exact but for the scales and the rounding
    to an output's format. Neighbouring codes differ by 1/127 of their value and more."""
    return torch.finfo(dtype).eps / 2 + SCALING


CODES: Mapping[Quantised, Codes] = MappingProxyType(
    {
        "int8": Codes(torch.int8, 127.0, 1e-12),
        "fp8": Codes(torch.float8_e4m3fn, 448.0, 1 / (448 * 512)),
    }
)
"""By format. Some devices have other codes for fp8, which their workers know."""
