"""LoRA (arXiv 2106.09685): trained low-rank adapters on the frozen linear layers of a policy.

A layer computes W x + s B (A x) with s = alpha / rank. The base weights W keep their names and stay split over the
ranks. A and B are float32 parameters that every rank holds whole, so their gradients are summed over the ranks once per
optimiser step. B starts at 0: an adapter changes nothing before its first update.

Names and files are PEFT's, so that its users, vLLM and transformers can load an adapter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless.functions.sharding import layers_of
from rlhfless.spec import LoRASpec, ModelSpec
from rlhfless.spec.errors import InputError, Problem

PARTS = ("lora_A", "lora_B")

ADAPTER_FILE = "adapter_model.safetensors"

ADAPTER_CONFIG_FILE = "adapter_config.json"

_PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of a parameter."""


class LoRALinear(torch.nn.Linear):
    """A linear layer with an adapter."""

    lora_A: torch.nn.Parameter
    """`[rank, in]`"""
    lora_B: torch.nn.Parameter
    """`[out, rank]`"""
    scale: float
    on: bool
    """Whether the trained adapter takes part."""
    initial: tuple[torch.Tensor, torch.Tensor] | None
    """A and B that training started from; None if they changed nothing."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return W x + bias + s B (A x)."""
        if not self.on and self.initial is None:
            return super().forward(input)
        down, up = (self.lora_A, self.lora_B) if self.on or self.initial is None else self.initial
        low = linear(input, down.to(input.dtype))
        return super().forward(input) + self.scale * linear(low, up.to(input.dtype))


def add_adapters(model: Any, spec: LoRASpec, device: torch.device, model_path: str) -> None:
    """Freeze a loaded model, and add an adapter to each target, equal on all ranks.

    Raises InputError if a target matches no layer, or the adapter to start from does not fit.
    """
    if problems := target_problems(model, spec, model_path):
        raise InputError("the model", problems)
    start = {} if spec.path is None else load_file(Path(spec.path) / ADAPTER_FILE)
    model.requires_grad_(False)
    for path, layer in dict(_targets(model, spec.patterns)).items():
        drawn = torch.Generator().manual_seed(crc32(path.encode()) ^ spec.seed)
        down = torch.empty(spec.rank, layer.in_features)
        # Equal to kaiming_uniform_(a=sqrt(5)), PEFT's and torch's initial values of a linear layer.
        down.uniform_(-1 / math.sqrt(layer.in_features), 1 / math.sqrt(layer.in_features), generator=drawn)
        layer.__class__ = LoRALinear
        layer.lora_A = torch.nn.Parameter(down.to(device))
        layer.lora_B = torch.nn.Parameter(torch.zeros(layer.out_features, spec.rank, device=device))
        layer.scale, layer.on, layer.initial = spec.alpha / spec.rank, True, None
        if start:
            names = [f"{_PEFT_PREFIX}{path}.{part}.weight" for part in PARTS]
            layer.initial = down, up = tuple(start[name].to(device, torch.float32) for name in names)
            with torch.no_grad():
                layer.lora_A.copy_(down)
                layer.lora_B.copy_(up)


def target_problems(model: Any, spec: LoRASpec, model_path: str) -> list[Problem]:
    """Return problems if a target matches no linear layer of the model's decoder layers, or the adapter to start from
    is for other layers."""
    targets = dict(_targets(model, spec.patterns))
    unmatched = [name for name in spec.patterns if not any(_matches(path, [name]) for path in targets)]
    if not unmatched:
        return [] if spec.path is None else _start_problems(Path(spec.path), spec, targets)
    names = sorted({path.rsplit(".", 1)[-1] for path in dict(_targets(model, ["*"]))})
    what = f"{', '.join(map(repr, unmatched))} matches no linear layer of {model_path!r}"
    return [Problem("model.lora.targets", what, f"it has {', '.join(names) or 'none'}")]


def _start_problems(folder: Path, spec: LoRASpec, targets: Mapping[str, Any]) -> list[Problem]:
    """Return why a run cannot start from the adapter in a folder."""
    field = "model.lora.path"
    missing = [name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE) if not (folder / name).is_file()]
    if missing:
        hint = "name a folder that peft or `rlhfless models export` wrote; download one of a hub first"
        return [Problem(field, f"{str(folder)!r} has no {' and no '.join(missing)}", hint)]
    try:
        config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
        with safe_open(folder / ADAPTER_FILE, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (ValueError, SafetensorError) as error:
        return [Problem(field, f"{str(folder)!r} cannot be read: {error}", "write the adapter again")]
    problems = [
        Problem(f"model.lora.{key}", f"{ours}, but the adapter in {str(folder)!r} has {theirs}", f"set it to {theirs}")
        for key, ours, theirs in (("rank", spec.rank, config.get("r")), ("alpha", spec.alpha, config.get("lora_alpha")))
        if ours != theirs
    ]
    if odd := [name for name in _UNSUPPORTED if config.get(name) not in (None, False, "none", {}, [])]:
        what = f"the adapter in {str(folder)!r} uses {', '.join(odd)}, which adapters here do not have"
        problems.append(Problem(field, what, "export it merged, and name that model as model.path"))
    expected = {
        f"{_PEFT_PREFIX}{path}.{part}.weight": shape
        for path, layer in targets.items()
        for part, shape in zip(PARTS, ((spec.rank, layer.in_features), (layer.out_features, spec.rank)), strict=True)
    }
    if not problems and shapes != expected:
        odd = sorted(name for name in shapes.keys() | expected if shapes.get(name) != expected.get(name))
        what = f"{len(odd)} tensors of the adapter in {str(folder)!r} are not those of the targets, such as {odd[0]}"
        problems.append(Problem(field, what, "set model.lora.targets and model.path to those it was trained with"))
    return problems


_UNSUPPORTED = (
    "use_dora",
    "use_rslora",
    "bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
)
"""Keys of PEFT's config that change what an adapter computes."""


def _targets(model: Any, patterns: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield paths and linear layers of the decoder layers that match a pattern."""
    names = {module: name for name, module in model.named_modules()}
    for layer in layers_of(model):
        for path, module in layer.named_modules(prefix=names[layer]):
            if type(module) in (torch.nn.Linear, LoRALinear) and _matches(path, patterns):
                yield path, module


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path.rsplit(".", 1)[-1], pattern) for pattern in patterns)


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Compute as the model before training within the block: as the frozen model, to the last bit, unless training
    started from an adapter."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter."""
    return name.endswith(PARTS)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained: the adapters, or all without adapters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sum_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Sum the gradients of adapters over all ranks, in one message. *Collective.*

    FSDP sums the gradients of split parameters itself.
    """
    if dist.get_world_size() == 1:
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one weight."""

    down: torch.Tensor
    """A: `[rank, in]`"""
    up: torch.Tensor
    """B: `[out, rank]`"""
    scale: float

    def rounded(self, dtype: torch.dtype) -> Adapter:
        """Return the adapter as it is published in `dtype`."""
        return Adapter(self.down.detach().to(dtype), self.up.detach().to(dtype), self.scale)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W + s B A `[out, in]`, in float32 or finer."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        low, high = (part.detach().to(weight.device, wide) for part in (self.down, self.up))
        return torch.addmm(weight.to(wide), high, low, alpha=self.scale)


def adapters_of(model: torch.nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by the names of their weights; empty without adapters."""
    return {
        f"{name}.weight": Adapter(module.lora_A, module.lora_B, module.scale)
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear)
    }


def peft_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's `tensors`, by the names of parameters, on the CPU by PEFT's names."""
    return {f"{_PEFT_PREFIX}{name}.weight": tensor.detach().cpu() for name, tensor in sorted(tensors.items())}


def write_adapter_config(folder: Path, spec: ModelSpec, model: torch.nn.Module) -> None:
    """Write PEFT's description of a model's adapter to `folder`."""
    assert spec.lora is not None, "the model has an adapter"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.path,
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in adapters_of(model)}),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def merge_adapter(folder: Path, out: Path) -> None:
    """Write the model of an adapter's folder, its base merged with the adapter, to a new folder.

    Weights are computed in float32 and rounded once to the base's own format. Raises InputError if the folder holds no
    adapter, and transformers' errors if the base cannot be read.
    """
    file = folder / ADAPTER_CONFIG_FILE
    if not file.is_file():
        what = f"{str(folder)!r} holds no adapter; leave out --merged, because its model has all weights"
        raise InputError("the checkpoint", [Problem("", what)])
    config = json.loads(file.read_text())
    base, scale = config["base_model_name_or_path"], config["lora_alpha"] / config["r"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    parts = {_parameter_of(name): value for name, value in load_file(folder / ADAPTER_FILE).items()}
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted({name.rpartition(".")[0] for name in parts}):
            adapter = Adapter(parts[f"{name}.lora_A"], parts[f"{name}.lora_B"], scale)
            weight = weights[f"{name}.weight"]
            weight.copy_(adapter.merged(weight))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def _parameter_of(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX).removesuffix(".weight")
