"""Inputs of a memory plan: the model's sizes, and the present or named devices."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhfless.functions.generation.kind import kv_bytes
from rlhfless.planning.memory_plan import Question, edited
from rlhfless.planning.resolve import device_problems, is_set, placed, resolve_for_kind, timed, unplanned
from rlhfless.planning.suggestions import nearest_change
from rlhfless.prepare.model import missing_on_hub
from rlhfless.records import FunctionRole
from rlhfless.scaling.function_specs import MemoryTerms, kinds_of
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import UnknownDevice, device_of, load_devices
from rlhfless.scaling.latency.known_models import known_config
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND, Node, PlacementError, device_kind
from rlhfless.scaling.prices import load_price_book
from rlhfless.spec import RewardModelSpec, RunSpec
from rlhfless.spec.base import MOST_PROCESSES
from rlhfless.spec.data import is_path
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util.errors import UserError
from rlhfless.util.text import parsed_json

log = logging.getLogger(__name__)

_DEVICES = re.compile(r"(?:([1-9]\d{,99}) ?x ?)?([a-z][\w-]*)", re.IGNORECASE)

PROMPT_TOKENS = 1024
"""Room for a prompt if the prompts have not been read: the longest sequence is this plus `generation.max_tokens`."""


RESPONSE_TOKENS = 1024
"""Room for a written response, for runs that learn from written responses."""


def parsed_devices(text: str) -> tuple[str, int]:
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
    return kind, count


def parsed_sides(text: str, *, draws: bool = True) -> tuple[str, int, dict[str, Any]]:
    """Return kind and number of `8xh100`, and the spec changes for a learner on other devices.

    For `8xl40s+2xh100`, kind and number are those of generation, and the changes (by dotted key) give the learner the
    others. Raises InputError, also for two sides of a run without generation (`draws` is False).
    """
    generation, plus, learner = text.partition("+")
    kind, count = parsed_devices(generation)
    if not plus:
        return kind, count, {}
    of_learner, learners = parsed_devices(learner)
    if of_learner == kind:
        what, hint = f"{text!r} names {kind} for both sides", f"write {count + learners}x{kind}, which has both"
        raise InputError("--devices", [Problem("", what, hint)])
    if not draws:
        what, hint = f"{text!r} has devices of two kinds, and the run generates nothing", "give devices of one kind"
        raise InputError("--devices", [Problem("", what, hint)])
    apart = {"placement.mode": "disaggregated", "placement.learner_devices": learners}
    return kind, count, apart | {"placement.learner_kind": of_learner}


def question_of(spec: RunSpec, kind: str, count: int, sequence_tokens: int | None = None) -> Question:
    """Return a spec on devices of a kind, with all device-dependent values resolved.

    Raises InputError if the model's sizes cannot be read from its config.json.
    """
    shape, config = _shape(spec)
    limit = config.get("max_position_embeddings")
    spec = _within_context(spec, limit)
    wanted = sequence_tokens or PROMPT_TOKENS + (RESPONSE_TOKENS if spec.supervised else spec.generation.max_tokens)
    tokens = min(wanted, spec.model.max_context_tokens or limit or wanted)
    sheet = device_of(kind)
    others = reward_shapes(spec), draft_shape(spec)
    given = resolve_for_kind(spec, kind)
    asked = Question(given, shape, sheet, count, tokens, host_memory_bytes(), *others, given)
    asked = replace(asked, spec=placed(asked))
    return replace(asked, spec=timed(asked))


def _within_context(spec: RunSpec, limit: int | None) -> RunSpec:
    """Set a default `generation.max_tokens` that exceeds a small model's context to half of the context.

    The other half is room for prompts.
    """
    context = spec.model.max_context_tokens or limit
    if context is None or is_set(spec, "generation.max_tokens") or spec.generation.max_tokens < context:
        return spec
    return edited(spec, {"generation.max_tokens": max(context // 2, 1)})


def resolve_for_devices(spec: RunSpec, kind: str, count: int) -> RunSpec:
    """Return a spec with all values that depend on `count` devices of a kind resolved.

    If the model's sizes are unknown, only values that depend on the kind are resolved. For CPU cores the sizes are not
    fetched from the hub.
    """
    if _on_cores(spec, kind) and not is_path(spec.model.path):
        return unplanned(spec, kind)
    try:
        return question_of(spec, kind, count).spec
    except (InputError, UnknownDevice):
        return unplanned(spec, kind)


def _on_cores(spec: RunSpec, kind: str) -> bool:
    """Return whether all devices of a run are CPU cores. `kind` is generation's."""
    return {kind, spec.placement.kind_of_learner(kind)} == {CPU_KIND}


def devices_of(spec: RunSpec, nodes: Sequence[Node]) -> tuple[str, int]:
    """Return kind and number of a run's devices on these nodes, excluding a learner's of another kind.

    Raises PlacementError if no kind can be chosen.
    """
    kind = device_kind(spec.placement, nodes)
    return kind, spec.placement.devices or sum(node.count(kind) for node in nodes)


def local_devices(spec: RunSpec) -> tuple[str, int]:
    """Return kind and number of a run's devices on this machine.

    Raises PlacementError, UnknownAccelerator, or InputError if the price book cannot be read.
    """
    from rlhfless.prepare.machine import local_node  # imports torch

    return devices_of(spec, [local_node(load_price_book(spec.scaling.prices).kinds)])


def on_these_devices(spec: RunSpec) -> tuple[RunSpec, str]:
    """Resolve a spec for the devices of this machine, and return it with a description of the devices.

    A spec that joins a cluster is resolved later.
    """
    if spec.placement.ray_address:
        return spec, f"the devices of the cluster at {spec.placement.ray_address}"
    try:
        kind, count = local_devices(spec)
    except UserError:
        return spec, "no devices"  # reported by preflight
    return resolve_for_devices(spec, kind, count), f"{count} x {kind}"


def memory_problems(spec: RunSpec, kind: str, count: int, sequence_tokens: int) -> list[Problem]:
    """Return the reasons that a resolved run cannot start on `count` devices of a kind.

    These are refused settings and insufficient memory. On CPU cores, whose memory other programs share, or for unknown
    sizes, memory is never a reason.
    """
    problems = device_problems(spec, kind)
    if _on_cores(spec, kind):
        return problems
    try:
        asked = question_of(spec, kind, count, sequence_tokens)
        plan = asked.plan()
    except (InputError, UnknownDevice, PlacementError):  # reported elsewhere, or not known
        return problems
    if not plan.fits:
        change = nearest_change(asked)
        hint = f"it fits with {change.text}" if change else "see docs/sizing.md"
        devices = " and ".join(f"{number} x {of}" for of, number in asked.devices.items())
        problems.append(Problem("placement", f"{devices} do not hold the run: {'; '.join(plan.problems)}", hint))
    return problems


def with_ranks(spec: RunSpec, ranks: int | None) -> RunSpec:
    """Return a resolved spec with `ranks` learner ranks, or the spec itself for None."""
    return spec if ranks is None else edited(spec, {"learner.ranks": ranks})


def rank_counts(spec: RunSpec, kind: str, count: int, sequence_tokens: int) -> tuple[int, ...]:
    """Return the numbers of ranks that the learner of a resolved run may have on `count` devices, largest first.

    They range from `learner.ranks` down to `learner.min_ranks`, without those that do not fit in memory.
    """
    learner = spec.learner
    fewer = range(learner.world_size - 1, learner.fewest_ranks - 1, -1)
    fit = (ranks for ranks in fewer if not memory_problems(with_ranks(spec, ranks), kind, count, sequence_tokens))
    return (learner.world_size, *fit)


def loading_bytes(spec: RunSpec, kind: str, count: int, sequence_tokens: int) -> int:
    """Return the bytes of host memory needed to load the functions, over all nodes.

    The result is 0 on CPU cores, whose memory other programs share, and for unknown sizes.
    """
    if _on_cores(spec, kind):
        return 0
    try:
        return question_of(spec, kind, count, sequence_tokens).plan().host_bytes
    except (InputError, UnknownDevice, PlacementError):
        return 0


def planned(
    spec: RunSpec, shape: ModelShape | None, kind: str, sequence_tokens: int
) -> Mapping[str, Mapping[str, int]]:
    """Return the bytes of one replica or rank on one device, by function and phase; empty for unknown sizes."""
    if shape is None or kind not in load_devices():
        return {}
    rewards = reward_shapes(spec)
    # The figure would be wrong if only some reward models have known sizes.
    terms = MemoryTerms(spec, shape, device_of(kind), sequence_tokens, rewards, draft_shape(spec))
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
            shapes.append((part, ModelShape.of_config(_config(part.path))))
        except (UnknownShape, ValueError, OSError) as error:
            log.info("the memory plan leaves out the reward model %r: %s", part.path, error)
    return tuple(shapes)


def draft_shape(spec: RunSpec) -> ModelShape | None:
    """Return the sizes of the engines' draft model or head, or None without one or if they cannot be read.

    This is an upper bound for a head that shares the model's embeddings.
    """
    model = spec.generation.speculation.model
    if model is None:
        return None
    try:
        return ModelShape.of_config(_config(model))
    except (UnknownShape, ValueError, OSError) as error:
        log.info("the memory plan leaves out the draft model %r: %s", model, error)
        return None


def _config(model: str) -> Mapping[str, Any]:
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


def _shape(spec: RunSpec) -> tuple[ModelShape, Mapping[str, Any]]:
    try:
        config = _config(spec.model.path)
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
