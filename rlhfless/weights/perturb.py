"""A perturbed copy of a model, which the check `moved` loads once at an engine's start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

RELATIVE_NOISE = 0.3
"""Noise relative to a tensor's root mean square: large enough that even one stale layer moves logprobs by far more than
bfloat16's tolerance, small enough that no activation overflows."""

ZERO_TENSOR_NOISE = 0.01
"""Absolute noise for a tensor of zeros, such as a new bias: its root mean square is 0."""


def perturbed_by(seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """(name, value) -> the value with Gaussian noise that depends on `seed` and the name alone.

    The result has the value's device, dtype and shape. Tensors that are not floating point are returned as they are.
    """

    def perturb(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        # Drawn on the CPU, so that the perturbation does not depend on the device.
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        noise = torch.randn(value.shape, generator=generator).to(value.device)
        exact = value.detach().float()
        size = exact.square().mean().sqrt() * RELATIVE_NOISE
        return (exact + noise * torch.where(size > 0, size, ZERO_TENSOR_NOISE)).to(value.dtype)

    return perturb


def perturbed(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """All of `tensors`, perturbed as by `perturbed_by`."""
    perturb = perturbed_by(seed)
    return {name: perturb(name, tensor) for name, tensor in tensors.items()}
