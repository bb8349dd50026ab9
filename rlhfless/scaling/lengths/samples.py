"""Samples as evidence of response lengths, and the array types of `lengths`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]


class Samples(NamedTuple):
    """Samples of prompts, as evidence. Samples of a prompt that are known to be longer than some length are alike and
    counted together; samples whose lengths are known are counted together with the mean of their logs."""

    prompt: Ints  # [entries]: the prompt that they were drawn for
    log_tokens: Array  # [entries]: log of the length, or of the tokens so far
    finished: BoolArray  # [entries]: whether the length is known, or it is at least that
    number: Array  # [entries]: number of samples

    def sums(self, of_one: Array | BoolArray | float, prompts: int) -> Array:
        """[prompts]: the sum over all samples of a figure [entries] of one."""
        return np.bincount(self.prompt, of_one * self.number, minlength=prompts).astype(np.float64, copy=False)
