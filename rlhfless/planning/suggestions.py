"""The smallest change of a spec, or of its devices, with which a run fits. Pure.

A change is applied to the spec that the user wrote, and open keys are resolved again (`placed`), so a hint works as
typed. Changes of the spec come before more devices of the same kind, and those before other kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.planning.memory_plan import (
    FRACTIONS,
    TENSOR_PARALLEL_SIZES,
    MemoryPlan,
    Question,
    edited,
    is_set,
    more_ranks,
)
from rlhfless.planning.placement_search import FRACTION, TENSOR_PARALLEL, TURNS, may_take_turns, open_ranks, placed
from rlhfless.scaling.function_specs import replica_requests
from rlhfless.scaling.latency.devices import DeviceSheet, load_devices
from rlhfless.scaling.placement import CPU_KIND, PlacementError, Site

MOST_DEVICES = 64

MOST_EDITS = 3
"""Maximum number of spec edits in one hint; one fewer when combined with other devices."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change, and the plan after it."""

    text: str
    """The spec keys, or the devices, that change."""
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a spec, or of its devices."""

    text: str
    values: Mapping[str, Any]
    """Values by dotted key."""
    kind: str | None = None
    count: int | None = None


def nearest_change(asked: Question) -> Change | None:
    """Return the fewest edits after which the run fits, cheapest first, or None if there are none."""
    base = asked if asked.given is None else replace(asked, spec=asked.given)
    formats, batches, placements = [*_of_formats(base)], [*_of_batches(base)], [*_of_placement(base)]
    # Combinations use only the smallest micro-batches.
    combined = [*formats, *batches[-len(base.spec.trained) :], *placements]
    groups: list[list[tuple[Edit, ...]]] = [[(edit,) for edit in (*formats, *batches, *placements)]]
    groups += [[*itertools.combinations(combined, size)] for size in range(2, MOST_EDITS + 1)]
    fewer = [(), *((edit,) for edit in combined), *itertools.combinations(combined, 2)]
    for devices in (_more_devices(base), _other_kinds(base)):
        groups.append([(*chosen, device) for device in devices for chosen in fewer])
    return next(filter(None, (_after(base, chosen) for chosen in itertools.chain(*groups))), None)


def _of_batches(asked: Question) -> Iterator[Edit]:
    """Yield smaller micro-batches, which cost little time, for each trained model down to the longest sequence."""
    sizes = {name: part.pass_tokens // 2 for name, part in asked.spec.trained.items()}
    while any(tokens >= max(asked.sequence_tokens, 256) for tokens in sizes.values()):
        for name, tokens in sizes.items():
            if tokens >= max(asked.sequence_tokens, 256):
                yield _edit(f"{name}.micro_batch_tokens", tokens)
        sizes = {name: tokens // 2 for name, tokens in sizes.items()}


def _of_formats(asked: Question) -> Iterator[Edit]:
    spec, on_gpu = asked.spec, asked.learner_sheet.kind != CPU_KIND
    if asked.sheet.kind != CPU_KIND and spec.model.dtype == "float32":
        yield _edit("model.dtype", "bfloat16")
    for name, part in spec.trained.items():
        if on_gpu and part.dtype == "float32":
            yield _edit(f"{name}.dtype", "bfloat16")
        if part.gradient_checkpointing is False:
            yield _edit(f"{name}.gradient_checkpointing", True)
        if on_gpu and part.copies > 1:
            yield _edit(f"{name}.shard_ranks", "auto")


def _of_placement(asked: Question) -> Iterator[Edit]:
    """Yield edits of keys that the spec sets; `placed` tries the others by itself."""
    if asked.learner_sheet.kind == CPU_KIND:
        return
    spec, engine = asked.spec, asked.spec.generation.engine
    colocated, engines = spec.placement.mode == "colocated", not asked.spec.supervised
    if colocated and engines and is_set(spec, FRACTION):
        yield from (_edit(FRACTION, fraction) for fraction in FRACTIONS if fraction < engine.gpu_memory_fraction)
    if colocated and engines and asked.count > 1:
        ranks = max(1, min(spec.learner.world_size, asked.count // 2))
        split = {"placement.mode": "disaggregated", "placement.learner_devices": ranks}
        yield Edit(f"placement: {{mode: disaggregated, learner_devices: {ranks}}}", split)
    yield from _of_ranks(asked)
    if engines and engine.tensor_parallel_size != "auto":
        sizes = (size for size in TENSOR_PARALLEL_SIZES if size > engine.devices_per_actor)
        yield from (_edit(TENSOR_PARALLEL, size) for size in sizes)
    if engines and not spec.placement.in_turns and is_set(spec, TURNS) and may_take_turns(spec):
        yield _edit(TURNS, True)
    yield from (_edit(f"{name}.offload", True) for name, part in spec.trained.items() if not part.offload)


def _of_ranks(asked: Question) -> Iterator[Edit]:
    """Yield more ranks for the learner, the reference, teachers and reward models, if their numbers are set."""
    spec, colocated = asked.spec, asked.spec.placement.mode == "colocated"
    if spec.learner.ranks != "auto":
        most = asked.count if colocated else asked.count - 1 if spec.placement.learner_kind is None else MOST_DEVICES
        for ranks in more_ranks(most, spec.learner.world_size):
            text, values = f"learner.ranks: {ranks}", {"learner.ranks": ranks}
            if not colocated:
                text += f" and placement.learner_devices: {ranks}"
                values["placement.learner_devices"] = ranks
            yield Edit(text, values)
    side = asked.count if colocated else spec.placement.learner_devices
    for wanted in replica_requests(spec):
        if wanted.site is Site.LEARNER_SHARED and wanted.ranks_key and wanted.ranks_key not in open_ranks(spec):
            yield from (_edit(wanted.ranks_key, more) for more in more_ranks(side, wanted.ranks))


def _more_devices(asked: Question) -> Iterator[Edit]:
    count = asked.count * 2
    while asked.sheet.kind != CPU_KIND and count <= MOST_DEVICES:
        yield Edit(f"{count} x {asked.sheet.kind}", {}, count=count)
        count *= 2


def _other_kinds(asked: Question) -> Iterator[Edit]:
    if asked.sheet.kind == CPU_KIND:
        return
    for sheet in _larger(asked.sheet):
        yield Edit(f"{asked.count} x {sheet.kind}", {}, kind=sheet.kind)
    for sheet in _larger(asked.learner_sheet) if asked.spec.placement.learner_kind is not None else ():
        yield _edit("placement.learner_kind", sheet.kind)


def _larger(than: DeviceSheet) -> list[DeviceSheet]:
    """Return the devices with more memory, smallest first."""
    larger = [sheet for sheet in load_devices().values() if sheet.memory_bytes.value > than.memory_bytes.value]
    usable = (sheet for sheet in larger if sheet.kind != CPU_KIND and sheet.no_engine is None)
    return sorted(usable, key=lambda sheet: sheet.memory_bytes.value)


def _edit(key: str, value: Any) -> Edit:
    return Edit(f"{key}: {str(value).lower() if isinstance(value, bool) else value}", {key: value})


def _after(asked: Question, edits: Sequence[Edit]) -> Change | None:
    """Return the run after some edits, placed again, or None if it does not fit or the edits exclude each other."""
    values: dict[str, Any] = {}
    for edit in edits:
        if values.keys() & edit.values.keys():
            return None
        values |= edit.values
    kind = next((edit.kind for edit in edits if edit.kind), asked.sheet.kind)
    count = next((edit.count for edit in edits if edit.count), asked.count)
    changed = replace(asked, spec=edited(asked.spec, values), sheet=load_devices()[kind], count=count)
    try:
        plan = replace(changed, spec=placed(changed)).plan()
    except PlacementError:
        return None
    return Change(" and ".join(edit.text for edit in edits), plan) if plan.fits else None
