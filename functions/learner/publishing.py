"""The weights that the learner publishes: in the published format, rounded, perturbed, or both.

Names and layout are as in a Hugging Face checkpoint of the model, and a tensor that two modules share
appears once, so that an engine's weight loader takes them as it takes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhfless.functions.policy import TORCH_DTYPES
from rlhfless.spec import DType
from rlhfless.weights.samples import sampled_values


def published_weights(model: PreTrainedModel, dtype: DType) -> dict[str, torch.Tensor]:
    """A copy of all parameters and persistent buffers on the CPU, floating point ones in `dtype`."""
    return {
        name: tensor.to("cpu", _format(tensor, dtype), copy=True).contiguous()
        for name, tensor in _named_as_published(model).items()
    }


def published_samples(model: PreTrainedModel, dtype: DType, tokens: Collection[int]) -> dict[str, bytes]:
    """By tensor: the elements that an engine's weights are compared with (rlhfless.weights.samples), in `dtype`.

    They are taken from the live model, so that they also reveal a file with other weights.
    """
    return {
        name: sampled_values(tensor, tokens, _format(tensor, dtype))
        for name, tensor in _named_as_published(model).items()
    }


def _named_as_published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, where they are and in their own dtype."""
    names = dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in shared}
    tensors = {name: parameter.detach() for name, parameter in names.items()} | buffers
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return converted


@contextmanager
def substituted(model: PreTrainedModel, substitute: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the block each parameter is `substitute(name, value)`; after it, the old value, bit for bit.

    Costs the memory of the values put in. `substitute` must not write to the value it is given.
    """
    originals = {name: parameter.data for name, parameter in model.named_parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.data = substitute(name, parameter.data)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = originals[name]


def rounded_to(dtype: DType) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A substitute: the value as an engine that was given `dtype` has it, in the parameter's own format."""

    def substitute(_: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(_format(value, dtype)).to(value.dtype)

    return substitute


def cast_to(dtype: DType) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A substitute: the value in `dtype`."""

    def substitute(_: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(_format(value, dtype))

    return substitute


def _format(tensor: torch.Tensor, dtype: DType) -> torch.dtype:
    return TORCH_DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
