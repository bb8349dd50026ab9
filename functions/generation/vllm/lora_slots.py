"""A worker's adapters: loaded from the weight store into host memory, and from there into vLLM's slots.

vLLM reads adapters from folders, and reads an adapter that it has evicted again in the middle of an iteration, where a
failure ends the engine. Here `_load_adapter` takes the tensors from host memory, where they stay until the adapter is
dropped, so nothing can be missing.

The base weights come from the model's folder, at the engine's start. They are compared with the learner's before the
first adapter, and an adapter for another base is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name, replace_submodule
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhfless.functions.generation.vllm.messages import Consumed
from rlhfless.functions.generation.vllm.read_back import TensorIndex, index_tensors
from rlhfless.records import WeightSample
from rlhfless.weights.adapters import ALPHA, BASE, base_of
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import Digest
from rlhfless.weights.samples import decoded, sampled_elements
from rlhfless.weights.store import WeightReader

RELATIVE_ERROR: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest error of the device's products of adapters, relative to the norm of the exact product. Rounding of float32 is
below 1e-6, of bfloat16 about 6e-3; a wrong kernel is off by the norm itself."""

_TRIED_ROWS = (1, 40, 700)
"""Rows of the batches with which kernels are tried: decoding, a few prompts, and prompts beyond the 400 tokens from
which Hopper's were seen to be wrong."""


@dataclass(frozen=True, slots=True)
class _Held:
    """An adapter in host memory, by PEFT's names of its tensors."""

    tensors: Mapping[str, torch.Tensor]
    rank: int
    alpha: int
    base: str
    """Digest of the base weights that it was trained on."""


class LoraSlots:
    """The adapters of one worker. Paths, names and numbers of adapters are never used twice."""

    def __init__(self, manager: WorkerLoRAManager) -> None:
        self._manager = manager
        self._held: dict[str, _Held] = {}
        """By path."""
        self._paths: dict[int, str] = {}
        """By number, for adapters with a slot."""
        self._base: str | None = None
        """Digest of the base weights, once they were compared with the learner's."""
        manager._load_adapter = self._from_memory  # type: ignore[method-assign]

    @property
    def _slots(self) -> LoRAModelManager:
        return self._manager._adapter_manager

    def fetch(self, reader: WeightReader, location: str, path: str) -> Consumed:
        """Read an adapter from the store into host memory."""
        digest = Digest(reader.of_piece)
        reading = digest.passing(
            reader.read(location),
            reader.hashes(location),
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
        )
        try:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in reading}
        except WeightFileError as error:
            return Consumed(digest.hashes, digest.size_bytes, reader.transport, str(error))
        reader.release()
        base, alpha = base_of(tensors.pop(BASE)), int(tensors.pop(ALPHA))
        rank = next(len(tensor) for name, tensor in tensors.items() if "lora_A" in name)
        self._held[path] = _Held(tensors, rank, alpha, base)
        return Consumed(digest.hashes, digest.size_bytes, reader.transport, None)

    def add(self, name: str, number: int, path: str) -> None:
        """Put a fetched adapter into a slot. Raises ValueError if it does not fit this engine's base weights."""
        held = self._held[path]
        if held.base != self._base:
            raise ValueError(f"{name} belongs to base weights with digest {held.base}; this engine has {self._base}")
        if held.rank > (most := self._manager.lora_config.max_lora_rank):
            raise ValueError(f"{name} has rank {held.rank}, and the engine's slots have rank {most}")
        modules = {self._named(tensor)[0] for tensor in held.tensors}
        known = {part for module in self._slots.modules for part in self._parts(module)}
        if unbound := sorted(modules - known):
            raise ValueError(f"{name}: the engine's model has no adapter at {', '.join(unbound[:3])}")
        if len(self._slots) >= self._slots.lora_slots:
            raise ValueError(f"{name}: all {self._slots.lora_slots} slots are in use")
        self._manager.add_adapter(LoRARequest(name, number, path))
        self._paths[number] = path

    def drop(self, number: int, path: str) -> None:
        """Free an adapter's slot and memory, as far as it has them: a load may have failed in between."""
        self._manager.remove_adapter(number)
        self._paths.pop(number, None)
        self._held.pop(path, None)

    def clear(self) -> None:
        """Forget all adapters and the comparison of the base weights, which are about to be lost."""
        self._manager._adapter_manager.remove_all_adapters()
        self._held.clear()
        self._paths.clear()
        self._base = None

    def _from_memory(self, lora_request: LoRARequest) -> LoRAModel:
        """Return an adapter as vLLM's manager wants it; in place of WorkerLoRAManager._load_adapter."""
        held = self._held[lora_request.lora_path]
        # vLLM multiplies each B by alpha / rank in place, so each load needs its own.
        tensors = {name: tensor.clone() if "lora_B" in name else tensor for name, tensor in held.tensors.items()}
        return LoRAModel.from_lora_tensors(
            lora_request.lora_int_id,
            tensors,
            PEFTHelper(r=held.rank, lora_alpha=held.alpha, target_modules=[]),
            device="cpu",
            dtype=cast(torch.dtype, self._manager.lora_config.lora_dtype),
            weights_mapper=self._mapper,
        )

    @property
    def _mapper(self) -> Any:
        mapper = getattr(self._slots.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _named(self, tensor: str) -> tuple[str, bool]:
        """Return a tensor's module in vLLM's model, and whether it is an A."""
        return parse_fine_tuned_lora_name(tensor, self._mapper)

    def _parts(self, module: str) -> list[str]:
        """Return the modules of the published model that a module of vLLM's fuses."""
        return self._slots.packed_modules.get(module, [module])

    # -- checks

    def compare_base(
        self,
        model: Any,
        model_config: Any,
        base: str,
        samples: Mapping[str, WeightSample],
        tokens: tuple[int, ...],
        device: torch.device,
    ) -> dict[str, tuple[int, int]]:
        """Compare the base weights with the learner's; see TensorIndex.compare. Remembers their digest `base`."""
        with self._as_loaded(model), _quiet_reload():
            initialize_layerwise_reload(model)
            layout = {name: sample.shape for name, sample in samples.items()}
            index: TensorIndex = index_tensors(model, model.load_weights, layout, tokens, device)
            finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]
            compared = index.compare(model, samples)
        self._base = base
        return compared

    @contextmanager
    def _as_loaded(self, model: Any) -> Iterator[None]:
        """Give the model its layers without adapters, whose parameters have the names that its loaders expect."""
        wrapped: dict[str, BaseLayerWithLoRA] = dict(self._slots.modules)
        try:
            for name, layer in wrapped.items():
                replace_submodule(model, name, layer.base_layer)
            yield
        finally:
            for name, layer in wrapped.items():
                replace_submodule(model, name, layer)

    def compare(
        self, number: int, samples: Mapping[str, WeightSample], tokens: tuple[int, ...]
    ) -> dict[str, tuple[int, int]]:
        """Return (elements compared, elements that differ from the learner's) by tensor of an adapter.

        Everything else in the slot must be 0.
        """
        held, slot = self._held[self._paths[number]], self._slots.lora_index_to_id.index(number)
        compared = {
            BASE: (1, int(base_of(decoded(samples[BASE])) != held.base)),
            ALPHA: (1, int(int(decoded(samples[ALPHA])) != held.alpha)),
        }
        by_module = {self._named(name): name for name in held.tensors}
        for module, layer in self._slots.modules.items():
            for is_down, stacks in ((True, layer.lora_a_stacked), (False, layer.lora_b_stacked)):
                names = [by_module.get((part, is_down)) for part in self._parts(module)]
                marks = [None if name is None else _marks(samples[name], tokens) for name in names]
                for name, stack, mark in zip(names, stacks, _sliced(layer, is_down, marks), strict=True):
                    scale = 1.0 if is_down else held.alpha / held.rank
                    found = _compared(stack[slot, 0], mark, None if name is None else samples[name], scale)
                    compared[name or module] = found
        return compared

    def try_products(self) -> None:
        """Compare this device's products of adapters with torch's, for each kind of layer.

        Call this before the first adapter. Raises RuntimeError if they differ, or if rows without an adapter change.
        """
        slots = self._slots
        kinds = {
            (type(each), each.output_slices, each.lora_a_stacked[0].shape): (name, each)
            for name, each in slots.modules.items()
        }
        random = torch.Generator().manual_seed(0)
        slots.lora_index_to_id[-1] = 1
        try:
            for name, layer in kinds.values():
                for rows in _TRIED_ROWS:
                    self._try(name, layer, min(rows, self._manager.max_num_batched_tokens), random)
        finally:
            slots.lora_index_to_id[-1] = None
            slots._last_mapping = None

    def _try(self, name: str, layer: Any, rows: int, random: torch.Generator) -> None:
        slot = self._slots.lora_slots - 1
        of_row = tuple(int(row % 3 != 1) for row in range(rows))  # every third row has no adapter
        self._slots._set_adapter_mapping(LoRAMapping(of_row, (1,), is_prefill=True))

        def drawn(*shape: int, like: torch.Tensor) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(like)

        downs = [stack[slot, 0].copy_(drawn(*stack.shape[2:], like=stack)) for stack in layer.lora_a_stacked]
        ups = [stack[slot, 0].copy_(drawn(*stack.shape[2:], like=stack)) for stack in layer.lora_b_stacked]
        x = drawn(rows, downs[0].shape[-1], like=downs[0])
        y = x.new_zeros(rows, sum(layer.output_slices))
        layer.punica_wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices)
        has = torch.tensor(of_row, dtype=torch.bool, device=y.device)
        exact = torch.cat(
            [x.double() @ down.double().T @ up.double().T for down, up in zip(downs, ups, strict=True)], 1
        )
        layer.reset_lora(slot)
        wrong = float((y[has].double() - exact[has]).norm() / exact[has].norm())
        if not wrong <= RELATIVE_ERROR[y.dtype] or bool(y[~has].count_nonzero()):
            raise RuntimeError(
                f"this device computes wrong products of adapters at {name} for {rows} rows (relative error {wrong:.2g}"
                "); set generation.lora to merged"
            )


def _marks(sample: WeightSample, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a sample's shape with the numbers of its sampled elements, from 1; 0 elsewhere."""
    elements = sampled_elements(sample.shape, tokens)
    marks = torch.zeros(torch.Size(sample.shape).numel(), dtype=torch.int32)
    marks[elements] = torch.arange(1, len(elements) + 1, dtype=torch.int32)
    return marks.view(tuple(sample.shape))


def _sliced(layer: Any, is_down: bool, marks: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return what this worker holds of the marked tensors of a layer."""
    if len(marks) != layer.n_slices:
        downs, ups = layer.expand_packed_lora(marks, marks)
        marks = downs if is_down else ups
    if layer.tp_size == 1:
        return marks
    cut: Callable[..., Any] = layer.slice_lora_a if is_down else layer.slice_lora_b
    return list(cut(marks)) if layer.n_slices > 1 else [cut(marks[0])]


def _compared(
    held: torch.Tensor, marks: torch.Tensor | None, sample: WeightSample | None, scale: float
) -> tuple[int, int]:
    """Return (elements compared, wrong elements) of a stack's slot; `marks` says where sampled elements lie in it."""
    strange = int(held.count_nonzero())
    if marks is None or sample is None:
        return 0, strange
    part = held[: marks.shape[0], : marks.shape[1]]
    strange -= int(part.count_nonzero())
    where = marks > 0
    expected = decoded(sample).to(held.dtype)[(marks[where] - 1).long()] * scale
    found = part.cpu()[where]
    return len(expected), strange + int((found != expected).sum())


@contextmanager
def _quiet_reload() -> Iterator[None]:
    """Silence vLLM's warning about each layer that a reload gave no weights, which is intended here."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
