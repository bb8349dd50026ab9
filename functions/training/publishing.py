"""The learner's published weights: a stream of tensors in the published format.

A weight with an adapter is published merged with it: computed in float32 from the base weight, and rounded once. Or
the adapter alone is published (`adapter_stream`).

Names and layout match a Hugging Face checkpoint, and a tensor shared by two modules appears once, so an engine's weight
loader takes the stream like a checkpoint.

Only rank 0, which writes the stream, holds whole tensors; the other ranks send their shards. Samples for comparison
with an engine's weights are taken from the gathered tensor before it is written.

Invariant: at most one decoder layer, or one other tensor, is gathered at a time, in addition to the tensors still being
written. All functions that gather are collective.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from rlhfless.functions.expert_parallel import is_expert
from rlhfless.functions.lora import Adapter, adapters_of, is_adapter, peft_tensors
from rlhfless.functions.policy import TORCH_DTYPES
from rlhfless.functions.sharding import first_row, layers_of, local, shards_group, whole, whole_on_first
from rlhfless.records import WeightSample
from rlhfless.records.checkpoints import NOTES_FILE, CheckpointError
from rlhfless.spec import DType, ModelSpec
from rlhfless.spec.explain import shown
from rlhfless.util.errors import UserError, class_and_line
from rlhfless.util.text import parsed_json
from rlhfless.weights.adapters import tied_to_base
from rlhfless.weights.files import TensorStream
from rlhfless.weights.samples import weight_sample


class WeightsNotFinite(UserError):
    """Weights are NaN or infinite. Attention would pass them on to other samples of an engine."""

    where = "optimizer.learning_rate"


LIVE: Mapping[str, torch.Tensor] = MappingProxyType({})
"""The model's own tensors."""

Lent = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
"""See HostOffload.lent."""


def published_stream(
    model: PreTrainedModel,
    dtype: DType,
    device: torch.device,
    tensors: Mapping[str, torch.Tensor] = LIVE,
    *,
    everywhere: bool = False,
    lent: Lent | None = None,
    base: bool = False,
    own_experts: bool = False,
) -> TensorStream:
    """Stream all parameters and persistent buffers on `device`, floating-point ones in `dtype`. *Collective*.

    `tensors` replace the model's own. `base`: weights without their adapters. Only rank 0 yields tensors, or every
    rank with `everywhere`; every rank must exhaust the stream. With `own_experts` (see `divides`), rank 0 yields no
    experts of other ranks, and each rank of the first copy yields its own. Tensors may share the model's memory, except
    with `lent`: each is then read within `lent` and cloned.
    """
    shards = shards_group((named_tensors(model) | dict(tensors)).values())
    gather = whole if everywhere else partial(whole_on_first, shards=shards)
    adapters = {} if base else adapters_of(model)

    def streamed() -> Iterator[tuple[str, torch.Tensor]]:
        for unit in _units(model, tensors):
            of_unit = [part for name in unit.keys() & adapters for part in (adapters[name].down, adapters[name].up)]
            with lent([*unit.values(), *of_unit]) if lent else nullcontext():
                gathered = {
                    name: _fetched(value, dtype, device, gather, adapters.get(name))
                    for name, value in unit.items()
                    if not (own_experts and is_expert(value))
                }
                if lent:
                    gathered = {name: value if value is None else value.clone() for name, value in gathered.items()}
            present = {name: value for name, value in gathered.items() if value is not None}
            if present:
                yield from _as_published(model, present).items()
            if own_experts and (experts := {name: value for name, value in unit.items() if is_expert(value)}):
                yield from _own(model, experts, dtype, device).items()

    return TensorStream(_layout(model, dtype), streamed())


_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""The number of an expert in a published name."""


def divides(model: PreTrainedModel) -> bool:
    """Return whether each rank of a copy holds whole experts, each published as tensors of its own."""
    experts: dict[str, Any] = {name: value for name, value in named_tensors(model).items() if is_expert(value)}
    split = (placement for value in experts.values() for placement in value.placements if not placement.is_replicate())
    if not experts or any(placement.dim for placement in split):
        return False
    unit = next(each for each in _units(model, {}) if each.keys() & experts)
    of_unit = {name: value for name, value in unit.items() if name in experts}
    whole_names = _as_published(model, {name: value.to("meta") for name, value in _blank(of_unit).items()})
    each = {name: value[:1] for name, value in _blank(of_unit).items()}
    of_first = _as_published(model, each)
    found = {_NUMBER.sub("*", name): tuple(value.shape) for name, value in whole_names.items()}
    count = len(next(iter(of_unit.values())))
    return (
        all(_NUMBER.search(name) for name in whole_names)
        and len(whole_names) == count * len(of_first)
        and found == {_NUMBER.sub("*", name): tuple(value.shape) for name, value in of_first.items()}
    )


def _blank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}


def _own(
    model: PreTrainedModel, experts: Mapping[str, torch.Tensor], dtype: DType, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return this rank's experts of a layer by published name; empty on ranks of other copies than the first."""
    published: dict[str, torch.Tensor] = {}
    for name, value in experts.items():
        first = first_row(value)
        if first is None:
            continue
        rows = local(value.detach()).to(device, _format(value, dtype))
        for numbered, tensor in _as_published(model, {name: rows}).items():
            published[_renumbered(numbered, first)] = tensor
    return published


def _renumbered(name: str, first: int) -> str:
    """Return a published name of an expert whose number counts from this rank's `first`."""
    return _NUMBER.sub(lambda found: str(int(found[0]) + first), name)


def gathered_as(
    value: torch.Tensor, dtype: DType, device: torch.device, adapter: Adapter | None = None
) -> torch.Tensor:
    """Return a parameter or buffer, whole on every rank, in its published format. *Collective*."""
    gathered = _fetched(value, dtype, device, whole, adapter)
    assert gathered is not None, "it is gathered on every rank"
    return gathered


def adapter_stream(model: PreTrainedModel, dtype: DType, base: str, alpha: int) -> TensorStream:
    """Stream the model's adapter in `dtype`, tied to base weights of digest `base`. Raises WeightsNotFinite."""
    tensors = peft_tensors({name: value for name, value in model.named_parameters() if is_adapter(name)})
    values = {name: tensor.to(TORCH_DTYPES[dtype]) for name, tensor in tensors.items()}
    if broken := [name for name, tensor in values.items() if not bool(torch.isfinite(tensor).all())]:
        raise WeightsNotFinite(
            f"{len(broken)} tensors of the adapter have values that are not finite in {dtype}, such as {broken[0]}; "
            "lower optimizer.learning_rate, and resume from an earlier checkpoint"
        )
    return TensorStream.of(values | tied_to_base(base, alpha))


def _fetched(
    value: torch.Tensor,
    dtype: DType,
    device: torch.device,
    gather: Callable[..., torch.Tensor | None],
    adapter: Adapter | None = None,
) -> torch.Tensor | None:
    """Gather a tensor, merged with its adapter. Returns None on ranks that do not receive it."""
    if adapter is None:
        return gather(value, device, _format(value, dtype))
    weight = gather(value, device)
    return None if weight is None else adapter.merged(weight).to(_format(value, dtype))


def sampling(stream: TensorStream, tokens: Collection[int], samples: dict[str, WeightSample]) -> TensorStream:
    """Add each tensor's elements to compare with an engine's weights to `samples` (rlhfless.weights.samples).

    Samples are taken before the consumer gets the tensor, so they also reveal a file that holds other weights.
    """

    def streamed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream.tensors:
            samples[name] = weight_sample(tensor, tokens, tensor.dtype)
            yield name, tensor

    return TensorStream(stream.layout, streamed())


def named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, in place and in their own dtype; shared ones once, adapters never."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    persistent = {name: value for name, value in model.named_buffers() if name not in transient}
    return {name: parameter.detach() for name, parameter in parameters.items()} | {
        name: value for name, value in persistent.items() if name not in shared
    }


def _units(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each decoder layer together, and every other tensor by itself.

    A tensor of a file may be built from several tensors of a layer.
    """
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


CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_OF_WEIGHTS = (".index.json", ".safetensors.json")
_TEXT_FILES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".bpe", ".spm", ".py")
"""Suffixes of files copied with the weights. Other files (weights in any format, images, README.md) are left out."""

_FOLDERS = ("additional_chat_templates",)


def write_model_files(folder: Path, spec: ModelSpec, config: Any, architecture: str, own_code: Any = None) -> None:
    """Write all files of a model except its weights to `folder`.

    `config`: the saved model's; `architecture`: its class name; `own_code`: that class, if it is not in transformers.
    Raises CheckpointError naming the file that cannot be written.
    """
    source = files_of_model(spec.path)
    tokenizer = files_of_model(spec.tokenizer) if spec.tokenizer else source
    if tokenizer is not None:
        for name, file in _beside_weights(tokenizer):
            if name not in (CONFIG_FILE, GENERATION_FILE):
                with _writing(name, file):
                    (folder / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, folder / name)
    if source is not None and (generation := source / GENERATION_FILE).is_file():
        with _writing(GENERATION_FILE, generation):
            shutil.copyfile(generation, folder / GENERATION_FILE)
    if own_code is not None:
        with _writing("the model's own code", spec.path):
            custom_object_save(own_code.__new__(own_code), folder, config=config)
            if config._auto_class is not None:  # the configuration class is custom code as well
                custom_object_save(config, folder, config=config)
    with _writing(CONFIG_FILE, spec.path):
        values = _config_values(spec, config, source) | {"architectures": [architecture]}
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")


def try_model_files(spec: ModelSpec, config: Any, architecture: str, tokenizer: Any) -> None:
    """Write the model's files to a temporary folder and load them again, comparing them with `tokenizer`.

    Skips the model's own code, which the learner tries. Raises CheckpointError.
    """
    with TemporaryDirectory(prefix="rlhfless-trial-") as folder:
        write_model_files(Path(folder), spec, config, architecture)
        if (Path(folder) / GENERATION_FILE).is_file():
            with _writing(GENERATION_FILE, spec.path):
                GenerationConfig.from_pretrained(folder)
        if spec.trust_remote_code:
            return
        with _writing(CONFIG_FILE, spec.path):
            AutoConfig.from_pretrained(folder)
        with _writing("a tokenizer that can be read again", spec.tokenizer or spec.path):
            saved = AutoTokenizer.from_pretrained(folder)
            for what in ("vocab_size", "eos_token_id", "pad_token_id", "chat_template"):
                if (kept := getattr(saved, what, None)) != (own := getattr(tokenizer, what, None)):
                    raise ValueError(f"the copy has another {what}: {shown(kept)} instead of {shown(own)}")


def files_of_model(path: str) -> Path | None:
    """Return the folder of a model's files: the path itself, or the local snapshot of a hub name.

    Returns None if it has no config.json or tokenizer file.
    """
    for name in (CONFIG_FILE, "tokenizer_config.json", "tokenizer.json"):
        with contextlib.suppress(OSError):  # it has no such file
            if found := cached_file(path, name):
                return Path(found).parent
    return None


def _beside_weights(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the files to copy."""
    for file in sorted([*folder.iterdir(), *(each for name in _FOLDERS for each in (folder / name).glob("*"))]):
        name = str(file.relative_to(folder))
        if file.is_file() and name.endswith(_TEXT_FILES) and not name.endswith(_OF_WEIGHTS) and name != NOTES_FILE:
            yield name, file


def _config_values(spec: ModelSpec, config: Any, source: Path | None) -> dict[str, Any]:
    """Return the values of config.json, updated with those that differ in the saved weights.

    Starts from the source's file, unless that describes a larger model around this one.
    """
    own: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    values = parsed_json((source / CONFIG_FILE).read_text()) if source and (source / CONFIG_FILE).is_file() else own
    if values.get("model_type") != config.model_type:
        values = own
    for name in ("id2label", "label2id", "auto_map"):
        if own.get(name) != values.get(name) and name in own:
            values[name] = own[name]
    values.pop("quantization_config", None)  # weights are saved in `dtype`
    return {name: value for name, value in values.items() if name != "torch_dtype"} | {"dtype": spec.dtype}


@contextlib.contextmanager
def _writing(name: str, source: str | Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # file systems, tokenizers and a model's own code raise errors of their own
        raise CheckpointError(
            f"cannot write {name} to a checkpoint, from {str(source)!r}: {class_and_line(error)}; correct that file, "
            "or download the model again"
        ) from error
