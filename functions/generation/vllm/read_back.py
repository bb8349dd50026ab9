"""Read back the weights that a worker actually computes with, and compare them with the learner's.

vLLM decides where an element of a published tensor ends up: layers are fused, split over devices and padded. vLLM's
own loaders therefore locate it (`index_tensors`): once per engine they load tensors whose sampled elements are codes
that name the element into a scratch parameter, in which the codes are looked up. No table of layer names is needed.

A matrix is read back through the layer's own product with one-hot vectors (`apply` of its quantisation method): one
times a weight plus zeros is exactly that weight, in every dtype. This is the value that the layer computes with,
even if it uses a packed copy (CPU) or a tied head shares the embedding's weight. Other parameters, such as norms and
biases, are read in place.

vLLM loads fused experts one at a time into a parameter of all experts. Two of its kernels compute with the parameter
as loaded, and one with the two halves of `w13` (gate and up projection) swapped. Others, including CPUs, pack or
shuffle it; these are not read back.

A quantised layer also multiplies a one-hot vector exactly: its output is a code times its scale. The expected values
follow from the learner's value and the largest magnitude of its row (rlhfless.weights.samples).

Not read back: quantised experts, experts whose kernel reorders them, tensors that a model changes while loading, and
all tensors of a model whose loaders reject the codes, which are integers. They are counted, and only the probe
covers them.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from rlhfless.functions.generation.vllm.fp8 import codes_of, input_format
from rlhfless.records import WeightSample
from rlhfless.weights.samples import SAMPLED_ELEMENTS, decoded, product_error, sampled_elements

log = logging.getLogger(__name__)

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_CODE_SPACING, _CODE_START = 7, 3
"""Codes are 3, 10, 17, ...: if a loader adds a small number to its input, the result is not a code, let alone that
of another element."""

_UNSAMPLED = -1

_BYTES_AN_ELEMENT = 16
"""Bytes per element of a coded tensor, its scratch parameter (four bytes each) and the comparison's temporaries,
with a margin."""

_ROUNDS_TO_ZERO = 1e-37
"""Kernels may flush subnormal numbers to zero."""

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
_HALVES_SWAPPED = UnquantizedMoeBackend.FLASHINFER_CUTLASS

_EVERYWHERE, _NOWHERE = slice(None), slice(0, 0)


@dataclass(frozen=True, slots=True)
class _Held:
    """The sampled elements in one parameter of this worker, from one published tensor or several fused ones."""

    layer: Any
    parameter: str
    shape: torch.Size
    """The parameter's shape while loading."""
    parts: tuple[tuple[str, torch.Tensor], ...]
    """By tensor: the numbers of its sampled elements held here, `[held of the tensor]`."""
    indices: torch.Tensor
    """`[held]`: positions of the elements in the flattened parameter, part by part."""
    columns: torch.Tensor
    """`[columns]`: columns of the parameter, as a matrix, that contain an element."""
    column: torch.Tensor
    """`[held]`: the index into `columns` of each element's column."""

    @classmethod
    def of(cls, layer: Any, parameter: str, shape: torch.Size, parts: Sequence[_Part]) -> _Held:
        indices = torch.cat([part.indices for part in parts])
        columns, column = (indices % shape[-1]).unique(return_inverse=True) if shape else (indices, indices)
        return cls(
            layer, parameter, shape, tuple((part.tensor, part.elements) for part in parts), indices, columns, column
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The sampled elements of one published tensor that one parameter holds."""

    tensor: str
    elements: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The locations of the published tensors' sampled elements in a worker."""

    held: tuple[_Held, ...]

    def compare(self, model: torch.nn.Module, samples: Mapping[str, WeightSample]) -> dict[str, tuple[int, int]]:
        """Return (elements compared, elements that differ from the learner's) by tensor.

        `samples` is `Probe.samples`.
        """
        compared: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        users = _users(model)
        for held in self.held:
            codes = codes_of(held.layer) if held.parameter == "weight" else None
            expected = torch.cat([decoded(samples[name], codes)[some] for name, some in held.parts])
            for values in _read(held, users):
                allowed = (
                    _ROUNDS_TO_ZERO + (0 if codes is None else product_error(values.dtype)) * expected.float().abs()
                )
                wrong = ~((values.cpu().to(expected.dtype).float() - expected.float()).abs() <= allowed)
                of_parts = wrong.split([len(some) for _, some in held.parts])
                for (name, some), part in zip(held.parts, of_parts, strict=True):
                    count, differ = compared[name]
                    compared[name] = count + len(some), differ + int(part.sum())
        return dict(compared)


def index_tensors(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    layout: Mapping[str, Sequence[int]],
    tokens: Collection[int],
    device: torch.device,
) -> TensorIndex:
    """Locate the sampled elements of the tensors of `layout` (name to shape) in the model, without changing it.

    Call this after vLLM's `initialize_layerwise_reload`, when all parameters have their loading shapes. If the
    model's loaders fail on the codes, nothing is found, with a warning. Each readable element is written once, and
    each element of its parameter compared once per tensor fused into it; on the worker's `device` while it has room.
    """
    recorder = _Recorder(list(layout), device)
    shapes = [(name, torch.Size(shape)) for name, shape in layout.items()]
    coded = (
        (name, _coded(number, sampled_elements(shape, tokens), shape, _place(shape, device)))
        for number, (name, shape) in enumerate(shapes)
    )
    try:
        with recorder.recording(model):
            load_weights(coded)
    except Exception as error:  # loaders are the model author's code; the probe checks what they really load
        log.warning("no weights can be read back from %s, whose loaders fail: %r", type(model).__name__, error)
        recorder.found.clear()
    held = tuple(_Held.of(layer, name, shape, parts) for (layer, name), (shape, parts) in recorder.found.items())
    return TensorIndex(held)


def _coded(number: int, elements: torch.Tensor, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Return a tensor whose sampled elements are codes for (tensor, element)."""
    codes = number * SAMPLED_ELEMENTS + torch.arange(len(elements), dtype=torch.int32, device=device)
    coded = torch.full((shape.numel(),), _UNSAMPLED, dtype=torch.int32, device=device)
    coded[elements.to(device)] = codes * _CODE_SPACING + _CODE_START
    return coded.view(shape)


def _place(shape: torch.Size, device: torch.device) -> torch.device:
    """Return the worker's device if it has room for a coded tensor of `shape` and its lookup, else the CPU.

    Most of an engine's GPU memory belongs to its KV cache.
    """
    if device.type == "cpu" or torch.accelerator.get_memory_info(device)[0] > _BYTES_AN_ELEMENT * shape.numel():
        return device
    return torch.device("cpu")


class _Recorder:
    """Redirects the loaders of all parameters to a scratch parameter and looks up the codes in it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = names
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int32)
        """Shared by all scratch parameters. It holds no codes between loads, so it is never cleared as a whole."""
        self.found: dict[tuple[torch.nn.Module, str], tuple[torch.Size, list[_Part]]] = {}
        """By layer and parameter: its loading shape and the elements that it holds."""

    @contextmanager
    def recording(self, model: torch.nn.Module) -> Iterator[None]:
        """Prevent loads from reaching the model within the block."""
        users = _users(model)
        replaced = [
            (tensor, getattr(tensor, "weight_loader", None), self._loader(layer, name, tensor, users))
            for layer in model.modules()
            for name, tensor in get_layer_tensors(layer).items()
        ]
        try:
            for tensor, _, ours in replaced:
                _set_loader(tensor, ours)
            yield
        finally:
            for tensor, theirs, _ in replaced:
                _set_loader(tensor, theirs)

    def _loader(
        self, layer: torch.nn.Module, name: str, parameter: torch.Tensor, users: Mapping[int, list[torch.nn.Module]]
    ) -> Callable[..., object]:
        original = _get_original_loader(parameter)  # type: ignore[no-untyped-call]

        def pass_over(*_: Any, **__: Any) -> object:
            return True  # expert loaders return whether they took the tensor

        def load(param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ARG001
            scratch = self._scratch(parameter.shape)
            flat = scratch.reshape(-1)
            scratch.__class__ = parameter.__class__
            scratch.__dict__ = parameter.__dict__.copy()
            returned = original(scratch, loaded_weight, *args, **kwargs)
            parts = self.found.setdefault((layer, name), (parameter.shape, []))[1]
            where = _written(layer, parameter.shape, loaded_weight, args, kwargs)
            parts += self._looked_up(flat[where], where.start or 0)
            return returned

        through = name == "weight" and any(_has_product(user) for user in users.get(id(parameter), (layer,)))
        return load if through or _lies_open(layer, name) else pass_over

    def _scratch(self, shape: torch.Size) -> torch.Tensor:
        place, count = _place(shape, self._device), shape.numel()
        if self._buffer.device != place or len(self._buffer) < count:
            self._buffer = torch.empty(0, dtype=torch.int32)  # free the old buffer first
            self._buffer = torch.full((count,), _UNSAMPLED, dtype=torch.int32, device=place)
        return self._buffer[:count].view(shape)

    def _looked_up(self, scratch: torch.Tensor, begin: int) -> Iterator[_Part]:
        """Yield the elements found in `scratch`, which was loaded from element `begin` of the parameter on."""
        indices = (scratch >= _CODE_START).nonzero()[:, 0]
        codes = scratch[indices] - _CODE_START
        scratch[indices] = _UNSAMPLED
        exact = codes % _CODE_SPACING == 0
        codes, indices = codes[exact].cpu() // _CODE_SPACING, begin + indices[exact].cpu()
        numbers = codes // SAMPLED_ELEMENTS
        for number in numbers.unique().tolist():
            of_expert = numbers == number
            yield _Part(self._names[number], codes[of_expert] % SAMPLED_ELEMENTS, indices[of_expert])


def _set_loader(tensor: Any, loader: Callable[..., object] | None) -> None:
    if loader is None:
        vars(tensor).pop("weight_loader", None)  # of a tensor that two layers have, it is gone already
    else:
        tensor.weight_loader = loader


def _users(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """Map each parameter's ID to the layers that have it as `weight`; several if embedding and head are tied."""
    users: defaultdict[int, list[torch.nn.Module]] = defaultdict(list)
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if name == "weight":
                users[id(parameter)].append(layer)
    return users


def _lies_open(layer: torch.nn.Module, name: str) -> bool:
    """Return whether a layer computes with a parameter as stored."""
    method = getattr(layer, "quant_method", None)
    if method is None or name == "bias" or isinstance(method, UnquantizedEmbeddingMethod):
        return True
    return isinstance(method, UnquantizedFusedMoEMethod) and (
        method.unquantized_backend in _AS_LOADED or method.unquantized_backend is _HALVES_SWAPPED
    )


def _has_product(layer: torch.nn.Module) -> bool:
    plain = isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return plain or codes_of(layer) is not None


def _read(held: _Held, users: Mapping[int, list[torch.nn.Module]]) -> Iterator[torch.Tensor]:
    """Yield the values `[held]`, once for each way the worker computes with them; none if they cannot be read."""
    parameter = getattr(held.layer, held.parameter, None)
    if held.parameter == "weight" and len(held.shape) == 2:
        for layer in users.get(id(parameter), [held.layer]):
            if _has_product(layer):
                yield _through_product(layer, held)
    if parameter is not None and parameter.shape == held.shape and _lies_open(held.layer, held.parameter):
        indices = _in_kernel_order(held.layer, held.parameter, held.shape, held.indices)
        yield parameter.data.reshape(-1)[indices.to(parameter.device)]


@torch.no_grad()
def _through_product(layer: Any, held: _Held) -> torch.Tensor:
    """Return the layer's outputs for one-hot vectors; each is a column of its matrix."""
    width = held.shape[-1]
    one_hot = torch.nn.functional.one_hot(held.columns, width).to(*input_format(layer))
    answers: torch.Tensor = layer.quant_method.apply(layer, one_hot)
    return answers[held.column.to(answers.device), (held.indices // width).to(answers.device)]


def _in_kernel_order(layer: Any, name: str, shape: torch.Size, indices: torch.Tensor) -> torch.Tensor:
    """Map positions `[elements]` in the flattened parameter as loaded, of `shape`, to the kernel's positions."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod) or method.unquantized_backend is not _HALVES_SWAPPED:
        return indices
    if name != "w13_weight" or not method.moe.is_act_and_mul:
        return indices
    size = math.prod(shape[1:])
    return indices // size * size + (indices % size + size // 2) % size


def _written(
    layer: Any, shape: torch.Size, loaded: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> slice:
    """Return the part of the flattened parameter, of `shape`, that a loader call with these arguments wrote.

    In a layer of experts, this is a single expert's part.
    """
    if not isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod) or loaded.dim() == len(shape):
        return _EVERYWHERE
    number = kwargs["expert_id"] if "expert_id" in kwargs else args[2]  # follows the tensor's and the shard's name
    local = layer._map_global_expert_id_to_local_expert_id(number)
    size = math.prod(shape[1:])
    return _NOWHERE if local < 0 else slice(local * size, (local + 1) * size)


def repack_experts(model: torch.nn.Module) -> None:
    """Repack the experts for CPU kernels.

    vLLM packs them only after the first load, and after a reload would treat plain values as packed.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            isinstance(method, UnquantizedFusedMoEMethod)
            and method.unquantized_backend is UnquantizedMoeBackend.CPU
            and method.moe_kernel is not None
        ):
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
