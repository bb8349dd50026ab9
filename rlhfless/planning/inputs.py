"""Inputs of a plan: the model's sizes, and the present or named devices."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhfless.functions.kinds import kv_bytes
from rlhfless.prepare.model import missing_on_hub
from rlhfless.records import FunctionRole
from rlhfless.scaling.function_specs import FrozenShapes, MemoryTerms, kinds_of
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import UnknownDevice, device_of, load_devices
from rlhfless.scaling.latency.known_models import known_config
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.placement import CPU_KIND, Node, device_kind
from rlhfless.scaling.prices import load_price_book
from rlhfless.spec import DType, RewardModelSpec, RunSpec
from rlhfless.spec.base import MOST_PROCESSES
from rlhfless.spec.data import is_path
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util.text import parsed_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """Kind and number of a run's devices."""

    kind: str
    count: int

    @property
    def text(self) -> str:
        return f"{self.count} x {self.kind}"


_DEVICES = re.compile(r"(?:([1-9]\d{,99}) ?x ?)?([a-z][\w-]*)", re.IGNORECASE)


def parsed_devices(text: str) -> DeviceCount:
    """Return kind and number of `8xh100`. Raises InputError."""
    match = _DEVICES.fullmatch(text.strip())
    if match is None:
        raise InputError("--devices", [Problem("", f"{text!r} names no devices", "write it as 8xh100")])
    kind, count = match[2].lower(), int(match[1] or 1)
    if count > MOST_PROCESSES:  # same limit as `placement.devices`: a plan takes time and memory per device
        what = f"{text!r}: more than {MOST_PROCESSES:,} devices"
        raise InputError("--devices", [Problem("", what, "ask for fewer")])
    try:
        device_of(kind)
    except UnknownDevice as error:
        raise InputError("--devices", [Problem("", str(error))]) from error
    return DeviceCount(kind, count)


def parsed_sides(text: str, *, draws: bool = True) -> tuple[DeviceCount, dict[str, Any]]:
    """Return the devices of `8xh100`, and the spec changes for a learner on other devices.

    For `8xl40s+2xh100`, the devices are those of generation, and the changes (by dotted key) give the learner the
    others. Raises InputError, also for two sides of a run without generation (`draws` is False).
    """
    generation, plus, learner = text.partition("+")
    devices = parsed_devices(generation)
    if not plus:
        return devices, {}
    own = parsed_devices(learner)
    if own.kind == devices.kind:
        what = f"{text!r} names {own.kind} for both sides"
        hint = f"write {devices.count + own.count}x{own.kind}, which has both"
        raise InputError("--devices", [Problem("", what, hint)])
    if not draws:
        what, hint = f"{text!r} has devices of two kinds, and the run generates nothing", "give devices of one kind"
        raise InputError("--devices", [Problem("", what, hint)])
    apart = {"placement.mode": "disaggregated", "placement.learner_devices": own.count}
    return devices, apart | {"placement.learner_kind": own.kind}


def devices_of(spec: RunSpec, nodes: Sequence[Node]) -> DeviceCount:
    """Return a run's devices on these nodes, excluding a learner's of another kind.

    Raises PlacementError if no kind can be chosen.
    """
    kind = device_kind(spec.placement, nodes)
    return DeviceCount(kind, count_on(spec, sum(node.count(kind) for node in nodes)))


def count_on(spec: RunSpec, present: int) -> int:
    """Return the number of a run's devices where `present` are there. An elastic run has them to itself."""
    wanted = spec.placement.size_range
    return spec.placement.device_count or present if wanted is None else wanted.within(present)


def local_devices(spec: RunSpec) -> DeviceCount:
    """Return a run's devices on this machine.

    Raises PlacementError, UnknownAccelerator, or InputError if the price book cannot be read.
    """
    from rlhfless.prepare.machine import local_node  # imports torch

    return devices_of(spec, [local_node(load_price_book(spec.scaling.prices).kinds)])


def planned(
    spec: RunSpec, shape: ModelShape | None, kind: str, sequence_tokens: int
) -> Mapping[str, Mapping[str, int]]:
    """Return the bytes of one replica or rank on one device, by function and phase; empty for unknown sizes."""
    if shape is None or kind not in load_devices():
        return {}
    rewards = reward_shapes(spec)
    # The figure would be wrong if only some reward models have known sizes.
    others = frozen_shapes(spec), draft_shape(spec)
    terms = MemoryTerms(spec, shape, device_of(kind), sequence_tokens, rewards, *others)
    unknown = len(rewards) < len(spec.reward_models)
    return {
        each.name: {phase.name: phase.size_bytes for phase in each.phases(terms)}
        for each in kinds_of(spec)
        if not (unknown and each.role is FunctionRole.SCORES)
    }


def shared_kv_bytes(spec: RunSpec, shape: ModelShape | None, kind: str) -> int | None:
    """Return the planned KV cache in bytes of an engine that shares its GPU, or None.

    There, a measurement would include other functions' memory. None if the engine does not share its GPU or the plan
    has no figure.
    """
    if spec.placement.mode != "colocated" or kind == CPU_KIND or shape is None or kind not in load_devices():
        return None
    return kv_bytes(spec, shape, device_of(kind), draft_shape(spec))


def host_memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reward_shapes(spec: RunSpec) -> tuple[tuple[RewardModelSpec, ModelShape], ...]:
    """Return the reward models whose sizes can be read. The plan ignores others, such as encoders."""
    shapes = []
    for part in spec.reward_models:
        try:
            shapes.append((part, ModelShape.of_config(text_config(part.path))))
        except (UnknownShape, ValueError, OSError) as error:
            log.info("the memory plan leaves out the reward model %r: %s", part.path, error)
    return tuple(shapes)


def frozen_shapes(spec: RunSpec) -> FrozenShapes:
    """Return the sizes of teachers and judges by function. Others are counted with the policy's sizes."""
    taught = [each for each in spec.teachers if each.path is not None and not each.is_self]
    named: dict[str, tuple[str | None, DType]] = {each.function: (each.path, spec.learner.dtype) for each in taught}
    named |= {each.function: (each.path, each.dtype) for each in spec.judges}
    shapes = {}
    for function, (path, dtype) in named.items():
        assert path is not None, "others are left out"
        try:
            shapes[function] = replace(ModelShape.of_config(text_config(path)), weight_bytes=DTYPE_BYTES[dtype])
        except (UnknownShape, ValueError, OSError) as error:
            log.info("the memory plan counts %r of %s with the policy's sizes: %s", path, function, error)
    return shapes


def draft_shape(spec: RunSpec) -> ModelShape | None:
    """Return the sizes of the engines' draft model or head, or None without one or if they cannot be read.

    This is an upper bound for a head that shares the model's embeddings.
    """
    model = spec.generation.speculation.model
    if model is None:
        return None
    try:
        return ModelShape.of_config(text_config(model))
    except (UnknownShape, ValueError, OSError) as error:
        log.info("the memory plan leaves out the draft model %r: %s", model, error)
        return None


def text_config(model: str) -> Mapping[str, Any]:
    """Return the configuration of a model's text model. Raises ValueError and OSError."""
    config = model_config(model)
    return _mapping(config.get("text_config", config))


def model_config(model: str) -> Mapping[str, Any]:
    """Return a model's config.json, or built-in sizes if the hub is unreachable. Raises ValueError and OSError."""
    try:
        return _mapping(parsed_json(config_file(model).read_bytes()))
    except OSError:
        if (known := known_config(model)) is None:
            raise
        log.info("%s: its config.json cannot be read; planned with the sizes that are built in", model)
        return known


def shape_of(spec: RunSpec) -> tuple[ModelShape, Mapping[str, Any]]:
    try:
        config = text_config(spec.model.path)
        return ModelShape.of_config(config), config
    except (UnknownShape, ValueError, OSError) as error:
        what = f"the sizes of {spec.model.path!r} cannot be read: {error}"
        hint = "name a folder with the config.json of a decoder-only transformer, or a model of the hub"
        raise InputError("the plan", [Problem("model.path", what, hint)]) from error


def _mapping(config: Any) -> Mapping[str, Any]:
    """Return `config` if it is a mapping. Raises ValueError otherwise."""
    if not isinstance(config, Mapping):
        raise ValueError(f"it is a {type(config).__name__}, not a mapping")
    return config


def config_file(model: str) -> Path:
    """Return the path of a model's config.json. Raises OSError if neither a folder nor the hub has it."""
    if is_path(model):
        return Path(model) / "config.json"
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise FileNotFoundError(f"no such folder, and no name of the hub: {error}") from error
    if isinstance(cached, str):
        return Path(cached)
    if missing := missing_on_hub(model):
        raise FileNotFoundError(f"no such folder, and {missing}")
    return Path(hf_hub_download(model, "config.json"))
