"""The weights that the learner publishes: in the published format, perturbed or not, one tensor after the other.

Names and layout are as in a Hugging Face checkpoint of the model, and a tensor that two modules share appears once, so
that an engine's weight loader takes them as it takes a checkpoint. What is done to a tensor (`Substitute`) is done to
the gathered one, on its way out: the shards are never written to.

Only the rank that writes, the first, has whole tensors; each other one sends its part of them. The samples that an
engine's weights are compared with are taken from the gathered tensor, on its way out and before the file gets it.

Invariant: at most one decoder layer, or one other tensor, is gathered at a time, beside what is still being written.
All of it is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhfless.functions.policy import TORCH_DTYPES
from rlhfless.functions.sharding import layers_of, whole, whole_on_first
from rlhfless.records import WeightSample
from rlhfless.spec import DType
from rlhfless.weights.files import TensorStream
from rlhfless.weights.samples import weight_sample

LIVE: Mapping[str, torch.Tensor] = MappingProxyType({})
"""The model's own tensors."""

Lent = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
"""See Parking.lent."""

Substitute = Callable[[str, torch.Tensor], torch.Tensor]
"""(name of the parameter, its exact value, whole) -> the value that is published."""


def published_stream(
    model: PreTrainedModel,
    dtype: DType,
    device: torch.device,
    substitute: Substitute | None = None,
    tensors: Mapping[str, torch.Tensor] = LIVE,
    *,
    everywhere: bool = False,
    lent: Lent | None = None,
) -> TensorStream:
    """All parameters and persistent buffers, floating point ones in `dtype`, on `device`; those of `tensors` in the
    place of the model's own. They may share the model's memory. On the first rank, or `everywhere`; on other ranks the
    stream has none. Each is used within `lent`, and is a copy then. *Collective*: every rank must take all that there
    are."""
    gather = whole if everywhere else whole_on_first
    fetch = partial(_fetched, dtype=dtype, device=device, substitute=substitute, gather=gather)

    def streamed() -> Iterator[tuple[str, torch.Tensor]]:
        for unit in _units(model, tensors):
            with lent(unit.values()) if lent else nullcontext():
                gathered = {name: fetch(name, value) for name, value in unit.items()}
                if lent:
                    gathered = {name: value if value is None else value.clone() for name, value in gathered.items()}
            present = {name: value for name, value in gathered.items() if value is not None}
            if present:
                yield from _as_published(model, present).items()

    return TensorStream(_layout(model, dtype), streamed())


def gathered_as(
    name: str, value: torch.Tensor, dtype: DType, device: torch.device, substitute: Substitute | None
) -> torch.Tensor:
    """A parameter or buffer, whole on every rank, as it is published. *Collective*."""
    gathered = _fetched(name, value, dtype, device, substitute, whole)
    assert gathered is not None, "it is gathered on every rank"
    return gathered


def _fetched(
    name: str,
    value: torch.Tensor,
    dtype: DType,
    device: torch.device,
    substitute: Substitute | None,
    gather: Callable[..., torch.Tensor | None],
) -> torch.Tensor | None:
    """None where it is not gathered."""
    if substitute is None or not value.is_floating_point():
        return gather(value, device, _format(value, dtype))
    exact = gather(value, device)
    return None if exact is None else substitute(name, exact).to(_format(value, dtype))


def sampling(stream: TensorStream, tokens: Collection[int], samples: dict[str, WeightSample]) -> TensorStream:
    """The stream; `samples` takes, by tensor, the elements that an engine's weights are compared with
    (rlhfless.weights.samples), before the consumer has the tensor: so they also reveal a file with other weights."""

    def streamed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream.tensors:
            samples[name] = weight_sample(tensor, tokens, tensor.dtype)
            yield name, tensor

    return TensorStream(stream.layout, streamed())


def named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, where they are and in their own dtype; shared ones once."""
    parameters = dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    persistent = {name: value for name, value in model.named_buffers() if name not in _transient(model)}
    return {name: parameter.detach() for name, parameter in parameters.items()} | {
        name: value for name, value in persistent.items() if name not in shared
    }


def _transient(model: torch.nn.Module) -> set[str]:
    """Names of the buffers that a checkpoint leaves out."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _units(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each decoder layer together, because a file's tensor may be made of several of them; each other
    tensor alone."""
    names = {module: name for name, module in model.named_modules()}
    layers = tuple(f"{names[layer]}." for layer in layers_of(model))
    unit: dict[str, torch.Tensor] = {}
    current = ""
    for name, tensor in (named_tensors(model) | dict(tensors)).items():
        layer = next((prefix for prefix in layers if name.startswith(prefix)), name)
        if unit and layer != current:
            yield unit
            unit = {}
        unit[name], current = tensor, layer
    if unit:
        yield unit


def _layout(model: PreTrainedModel, dtype: DType) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    blank = {
        name: torch.empty(tensor.shape, dtype=_format(tensor, dtype), device="meta")
        for name, tensor in named_tensors(model).items()
    }
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _as_published(model, blank).items()}


def _as_published(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return converted


def _format(tensor: torch.Tensor, dtype: DType) -> torch.dtype:
    return TORCH_DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
