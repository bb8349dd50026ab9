"""Fix length-dependent rotary positions (`longrope` of Phi-3 and Phi-4-mini, `dynamic`) for a whole run.

transformers chooses the frequencies in each pass by the batch's longest sequence, so a token's logprob would depend
on its neighbours. vLLM chooses them once, by the longest sequence that a run can have (`max_model_len`).
"""

from __future__ import annotations

from typing import Any

import torch

LENGTH_DEPENDENT = ("longrope", "dynamic")


@torch.no_grad()
def choose_frequencies(model: Any, longest: int | None) -> None:
    """Fix the frequencies of `model` to those of a sequence of `longest` tokens (None: the model's own limit)."""
    config = model.config.get_text_config()
    tokens: int | None = longest or getattr(config, "max_position_embeddings", None)
    if tokens is None:
        return
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in LENGTH_DEPENDENT:
            like: torch.Tensor = module.inv_freq
            module(torch.zeros(1, device=like.device), torch.tensor([[tokens - 1]], device=like.device))
            module.rope_type = "default"  # its forward pass leaves the frequencies unchanged
