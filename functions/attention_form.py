"""Check whether torch's fused attention computes a model's attention or ignores a part of it.

Models express deviations from plain softmax attention as arguments (a soft cap) or parameters (sinks) of their
attention modules. `sdpa` silently ignores those that it does not know; a model's own `eager` attention computes
them. Both get the same random queries, keys and values, small and large, and their outputs and gradients are
compared in float32: what is ignored depends on the model's form and may not show with the loaded weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rlhfless_compared"
"""Name of the comparing attention in a model's configuration."""

TOLERANCE = 1e-3
"""Difference explained by rounding to float32, relative to the largest value."""

SCORES = (1.0, 30.0)
"""Standard deviations of the scores. Soft caps are between 1 and 50, and take effect when scores approach them."""

NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"
"""transformers' message for a model without `sdpa`, such as gpt-oss."""

_compared: list[str] = []
"""Ignored parts found by the current forward pass."""


def load_fused(load: Callable[[str], Any]) -> Any:
    """Call `load(attention)` with torch's fused attention, or with `eager` if transformers lacks it for the model."""
    try:
        return load("sdpa")
    except ValueError as error:
        if NO_SDPA not in str(error):
            raise
    return load("eager")


def has_attention(config: Any) -> bool:
    """Return whether a model has attention layers; Mamba and RWKV have none."""
    return bool(getattr(config.get_text_config(), "num_attention_heads", None))


def is_fused(model: Any) -> bool:
    """Return whether the model uses torch's fused attention."""
    return bool(model.config._attn_implementation == "sdpa")


def ignored_by_sdpa(model: Any, forward: Callable[[], Any]) -> str:
    """Return the parts of `model` that torch's fused attention ignores, or an empty string.

    Example: `softcap of Gemma2Attention (outputs differ by 0.3)`. `forward` runs the model on a few tokens. Not
    compared: models with `eager` attention, and models that bypass transformers' attention interface and choose
    their attention themselves.

    *Collective* if the model is split.
    """
    if not (is_fused(model) and model.is_backend_compatible()):
        return ""
    _compared.clear()
    model.set_attn_implementation(NAME)
    try:
        forward()
        return "; ".join(dict.fromkeys(_compared))
    finally:
        model.set_attn_implementation("sdpa")
        _compared.clear()


def _compare(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Record the parts of a module that `sdpa` ignores, then run it; an attention function for transformers."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None:
        for scores in SCORES:
            if found := _difference(module, eager, (query, key, value), arguments, scores):
                _compared.append(found)
                break
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return output, None


AttentionInterface.register(NAME, _compare)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _difference(
    module: torch.nn.Module, eager: Any, shaped: tuple[torch.Tensor, ...], arguments: Mapping[str, Any], scores: float
) -> str:
    """Return the difference between the two for random inputs of these shapes with scores of about this size."""
    device = shaped[0].device
    plain: Any = sdpa_attention_forward
    module, given = _own_numbers(module), {**arguments, "dropout": 0.0}
    parameters = list(module.parameters(recurse=False))
    for name, argument in arguments.items():  # such as sinks, which some models also pass as an argument
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            same = [each for each in parameters if each.shape == argument.shape]
            given[name] = same[0] if same else argument.detach().float()
    random = torch.Generator().manual_seed(0)
    scaling = arguments.get("scaling") or shaped[0].shape[-1] ** -0.5
    size = (scores / (scaling * shaped[0].shape[-1] ** 0.5)) ** 0.5
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        inputs = [
            torch.randn(tensor.shape, generator=random).to(device).mul(factor).requires_grad_()
            for tensor, factor in zip(shaped, (size, size, 1.0), strict=True)
        ]
        queries, keys = shaped[0].shape[2], shaped[1].shape[2]
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        hidden = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
        try:
            expected = eager(module, *inputs, hidden, **given)[0]
            fused = plain(module, *inputs, seen, **given)[0]
        except (TypeError, AttributeError, RuntimeError):  # it needs other arguments, and cannot be judged on its own
            return ""
        upstream = torch.randn(expected.shape, generator=random).to(device)
        gradients = [
            torch.autograd.grad(output, [*inputs, *parameters], upstream, allow_unused=True)
            for output in (expected, fused)
        ]
    form = ", ".join(name for name in ("softcap", "s_aux", "position_bias") if arguments.get(name) is not None)
    what = f"{form or 'the form'} of {type(module).__name__}"
    if (apart := _apart(expected, fused)) > TOLERANCE:
        return f"{what} (outputs differ by {apart:.2g} of the largest)"
    if (apart := max(_apart(one, other) for one, other in zip(*gradients, strict=True))) > TOLERANCE:
        return f"{what} (gradients differ by {apart:.2g} of the largest)"
    return ""


def _own_numbers(module: torch.nn.Module) -> torch.nn.Module:
    """Copy the module with float32 copies of its own parameters, such as sinks."""
    own = copy.copy(module)
    own._parameters = {
        name: None if parameter is None else torch.nn.Parameter(parameter.detach().float())
        for name, parameter in module._parameters.items()
    }
    return own.eval()


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference, relative to the largest value; a missing gradient counts as 0."""
    if one is None or other is None:
        there = one if other is None else other
        return 0.0 if there is None or not there.abs().max() > 0 else 1.0
    return float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1e-6))
