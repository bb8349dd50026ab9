"""A perturbed copy of a model: what the check `moved` loads once at an engine's start."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_RELATIVE_NOISE = (
    0.3  # so that even one layer that stays stale moves logprobs by far more than bfloat16's tolerance
)


def perturbed(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Adds Gaussian noise of 0.3 times its own root mean square to every floating tensor; the same for a seed.

    Tensors stay on their device and keep dtype and shape; others than floating ones are returned as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _noisy(tensor, generator) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _noisy(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = tensor.detach().float()
    # Drawn on the CPU, so that the perturbation does not depend on the device.
    noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
    return (values + _RELATIVE_NOISE * values.square().mean().sqrt() * noise).to(tensor.dtype)
