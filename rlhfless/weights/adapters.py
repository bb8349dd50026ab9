"""A version that is an adapter (LoRA): tensors by PEFT's names, and two more that tie it to its base weights.

All of them are part of the version's digest, which therefore covers the values of A and B, the targets (names), the
rank (shapes), alpha, and the digest of the base weights.
"""

from __future__ import annotations

import torch

BASE, ALPHA = "rlhfless.base", "rlhfless.alpha"
"""Names of the tensors with the digest of the base weights, and with alpha."""


def tied_to_base(base: str, alpha: int) -> dict[str, torch.Tensor]:
    """Return the two tensors, for base weights of digest `base`."""
    return {
        BASE: torch.tensor(list(bytes.fromhex(base)), dtype=torch.uint8),
        ALPHA: torch.tensor([alpha], dtype=torch.int64),
    }


def base_of(tensor: torch.Tensor) -> str:
    """Return the digest of the base weights from its tensor."""
    return bytes(tensor.tolist()).hex()
