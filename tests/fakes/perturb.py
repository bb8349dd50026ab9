"""Perturbed copies of models. The check `moved` loads such a copy once at an engine's start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

RELATIVE_CHANGE = 0.3
"""Root mean square of an element's change, relative to the element. Large enough that a single stale layer moves
logprobs by far more than bfloat16's tolerance, and small enough that no activation overflows."""

ZERO_TENSOR_VALUE = 0.01
"""Replaces the elements, with random signs, of all-zero tensors such as new biases, because no factor changes zeros."""


def perturbed_by(seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function (name, value) -> value that multiplies each element by a factor of its first and of its last
    dimension.

    The factors are 1 plus or minus a constant; the signs depend only on `seed` and the name. Both dimensions are
    needed, because a norm after an embedding would undo a factor per row. Independent noise per element would take
    minutes for a model of several billion parameters; signs are few, and the rest is one multiplication per dimension,
    on the value's device. The result has the value's device, dtype and shape. Tensors that are not floating point are
    unchanged.
    """

    def perturb(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        value = value.detach()
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        # Sampled on the CPU, so that the perturbation does not depend on the device.
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        signs = [
            (torch.randint(2, (length,), generator=generator) * 2 - 1).to(value.device, value.dtype)
            for length in value.shape[:1] + value.shape[1:][-1:]
        ] or [torch.ones((), device=value.device, dtype=value.dtype)]
        signs[0] = signs[0].view(-1, *[1] * (value.dim() - 1)) if value.dim() else signs[0]
        if not value.any():
            sign = signs[0] if len(signs) == 1 else signs[0] * signs[1]
            return (ZERO_TENSOR_VALUE * sign).expand(value.shape).clone()
        # With independent factors 1 + c and 1 - c for each of n dimensions, the mean square of the change is (1 +
        # c^2)^n - 1.
        change = ((1 + RELATIVE_CHANGE**2) ** (1 / len(signs)) - 1) ** 0.5
        moved: torch.Tensor = value * (1 + change * signs[0])
        for sign in signs[1:]:
            moved *= 1 + change * sign
        return moved

    return perturb


def perturbed(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return all `tensors`, perturbed by `perturbed_by`."""
    perturb = perturbed_by(seed)
    return {name: perturb(name, tensor) for name, tensor in tensors.items()}
