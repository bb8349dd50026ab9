"""Search the cheapest placement, ranks, batches and passes of a run that fit on its devices. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhfless.planning.memory_plan import (
    FRACTIONS,
    TENSOR_PARALLEL_SIZES,
    Question,
    edited,
    is_set,
    more_ranks,
    nodes_of,
)
from rlhfless.scaling.memory import GIB
from rlhfless.scaling.placement import CPU_KIND, NODE_DEVICES, PlacementError
from rlhfless.spec import RunSpec
from rlhfless.spec.learner import PASS_TOKENS

LOGITS_MIB = (2048, 1024, 512, 256)
"""Candidate sizes of a block of float32 logits. Each block reads and writes the head's gradient once, 6.5 GB for 7 B
parameters: 2 ms by an H100's data sheet, compared with matrix products of 1.2 ms at 128 MiB and 19 ms at 2048 MiB. Not
measured.
"""

PASS_STEP, MOST_PASS_TOKENS = 1024, 65_536
"""Step and maximum of the tokens per forward pass that `auto` chooses from; larger matrix products are no faster."""

SPARE_TOKENS = 1.25
"""A pass has room if a pass with this many times its tokens fits: torch reserves 10 to 25 % more than it allocates
(docs/gpus.md), and activations are most of a pass's memory."""

MOST = "scaling.generation.max_actors"
TENSOR_PARALLEL = "generation.engine.tensor_parallel_size"
FRACTION = "generation.engine.gpu_memory_fraction"
TURNS = "placement.turns"
MAX_SEQUENCES = "generation.engine.max_sequences"
BATCH_TOKENS = "generation.engine.max_batch_tokens"

LARGE_BATCHES = (1024, 512)
LARGE_BATCH_TOKENS, LARGE_GPU_BYTES, SMALLER_BATCHES = 16_384, 70 * GIB, ("a100-40gb", "a100-80gb")
"""vLLM's default batch tokens for engines of large GPUs, the memory from which it applies, and the kinds on which such
batches are slower (`get_batch_defaults`, vllm/engine/arg_utils.py). Other GPUs use USUAL_BATCH_TOKENS."""

BATCH_SEQUENCES = 32
"""Sequences that an actor's KV cache should hold. With fewer, an engine reads its weights for few tokens at a time, so
more devices per actor, turns or a larger fraction are tried first."""


def placed(asked: Question) -> RunSpec:
    """Resolve what a spec leaves open: `placement.mode`, ranks, actors, devices per actor, turns and offload.

    Takes the first candidate of `_candidates` that fits with room for a batch of sequences, or else the first that fits
    at all. Offload slows steps down, so it is tried only if nothing else fits. These choices are made with activation
    checkpointing and with forward passes of PASS_TOKENS. Afterwards, states are sharded within nodes if that fits too,
    and remaining memory goes to kept activations, larger passes and larger blocks of logits.
    """
    open_keys = {f"{name}.gradient_checkpointing": True for name in open_checkpointing(asked.spec)}
    small = replace(asked, spec=edited(asked.spec, open_keys))
    spec = _inside_nodes(small, _with_large_batches(small, _with_all_ranks(small)))
    if not _fits(asked, spec):
        open_passes = (name for name, part in spec.trained.items() if part.micro_batch_tokens == "auto")
        return edited(spec, {f"{name}.micro_batch_tokens": PASS_TOKENS for name in open_passes})
    return _with_large_logits(asked, _with_large_passes(asked, _with_kept_activations(asked, spec)))


def open_checkpointing(spec: RunSpec) -> tuple[str, ...]:
    return tuple(name for name, part in spec.trained.items() if part.gradient_checkpointing == "auto")


def _with_kept_activations(asked: Question, spec: RunSpec) -> RunSpec:
    """Disable activation checkpointing for each trained model that leaves it open and has room.

    If needed, engines are shrunk, as long as their KV cache still holds all samples of a step.
    """
    for name in open_checkpointing(asked.spec):
        tokens, kept = spec.trained[name].pass_tokens, {f"{name}.gradient_checkpointing": False}
        changed = (edited(each, kept) for each in _with_smaller_engines(asked, spec))
        spec = next((each for each in changed if _has_room(asked, each, name, tokens)), spec)
    return spec


def _with_smaller_engines(asked: Question, spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec, then variants with smaller engines if co-located and open, down to the size that samples need."""
    yield spec
    if spec.supervised or spec.placement.mode != "colocated" or spec.placement.in_turns or is_set(asked.spec, FRACTION):
        return
    for fraction in FRACTIONS:
        smaller = edited(spec, {FRACTION: fraction})
        if fraction < spec.generation.engine.gpu_memory_fraction and _holds(asked, smaller, _samples_per_actor(spec)):
            yield smaller


def _samples_per_actor(spec: RunSpec) -> int:
    return math.ceil(spec.prompts_per_step * spec.sequences_per_prompt / spec.scaling.generation.most_actors)


def _with_large_passes(asked: Question, spec: RunSpec) -> RunSpec:
    """Resolve an open `micro_batch_tokens` of each trained model on GPUs: the most with room, in steps of PASS_STEP."""
    for name in (name for name, part in spec.trained.items() if part.micro_batch_tokens == "auto"):
        if asked.learner_sheet.kind == CPU_KIND:
            continue
        low, high = PASS_TOKENS // PASS_STEP, MOST_PASS_TOKENS // PASS_STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _has_room(asked, spec, name, PASS_STEP * middle) else (low, middle - 1)
        spec = edited(spec, {f"{name}.micro_batch_tokens": PASS_STEP * low})
    return spec


def _has_room(asked: Question, spec: RunSpec, name: str, tokens: int) -> bool:
    """Return whether passes with SPARE_TOKENS times `tokens` of a trained model fit."""
    return _fits(asked, edited(spec, {f"{name}.micro_batch_tokens": math.ceil(SPARE_TOKENS * tokens)}))


def _with_large_batches(asked: Question, spec: RunSpec) -> RunSpec:
    """Resolve `max_sequences: auto` and `max_batch_tokens: auto` on GPUs.

    Sequences: as many as an actor has samples in a step, in powers of two, provided the KV cache holds half of them at
    full length. Batch tokens: vLLM's value for the device, provided there is room for a batch of sequences as well.
    """
    engine, sheet = spec.generation.engine, asked.sheet
    if spec.supervised or sheet.kind == CPU_KIND or "auto" not in (engine.max_sequences, engine.max_batch_tokens):
        return spec
    large = LARGE_BATCHES if engine.max_sequences == "auto" else ()
    sequences = [size for size in large if size < 2 * _samples_per_actor(spec)]
    is_large = (
        sheet.visible_bytes or sheet.memory_bytes
    ).value >= LARGE_GPU_BYTES and sheet.kind not in SMALLER_BATCHES
    tokens = [LARGE_BATCH_TOKENS] if engine.max_batch_tokens == "auto" and is_large else []
    for size, batch in itertools.product((*sequences, engine.sequence_limit), (*tokens, engine.batch_tokens)):
        changed = edited(spec, {MAX_SEQUENCES: size, BATCH_TOKENS: batch})
        held = size // 2 if size in sequences else BATCH_SEQUENCES
        if _fits(asked, changed) and _holds(asked, changed, held):
            return changed
    return edited(spec, {MAX_SEQUENCES: engine.sequence_limit, BATCH_TOKENS: engine.batch_tokens})


def _with_large_logits(asked: Question, spec: RunSpec) -> RunSpec:
    """Resolve `learner.logits_mib: auto` on GPUs: the largest block for which twice its size still fits."""
    if asked.learner_sheet.kind == CPU_KIND or spec.learner.logits_mib != "auto":
        return spec
    key = "learner.logits_mib"
    large = (mib for mib in LOGITS_MIB if _fits(asked, edited(spec, {key: 2 * mib})))
    chosen = next(large, None)
    return spec if chosen is None else edited(spec, {key: chosen})


def _inside_nodes(asked: Question, spec: RunSpec) -> RunSpec:
    """Resolve `shard_ranks: auto` of each trained model whose ranks have a GPU each and span several nodes.

    Offloaded states are not replicated, because the memory of other hosts is unknown here.
    """
    for name, part in spec.trained.items():
        if asked.learner_sheet.kind == CPU_KIND or part.shard_ranks != "auto" or part.offload:
            continue
        nodes = nodes_of(spec, name, asked.sheet.kind, asked.count)
        if len(nodes) < 2 or sum(nodes) != part.world_size or math.gcd(*nodes) == 1:
            continue
        changed = edited(spec, {f"{name}.shard_ranks": math.gcd(*nodes)})
        spec = changed if _fits(asked, changed) else spec
    return spec


def _with_all_ranks(asked: Question) -> RunSpec:
    for question in _with_offload(asked):
        candidates = list(_candidates(question))
        fitting = None
        for candidate in (*(_filled(asked, each) for each in candidates), *map(with_fewest_actors, candidates)):
            changed = _with_others(asked, candidate)
            if changed is not None and _holds(asked, changed, BATCH_SEQUENCES):
                return changed
            fitting = fitting or changed
        if fitting is not None:
            return fitting
    # Nothing fits: return the placement that large models need, so that its problems and nearest change are reported.
    last = with_fewest_actors(_last_resort(asked))
    return edited(last, dict.fromkeys(open_ranks(last), _side(asked, last)))


def _with_offload(asked: Question) -> Iterator[Question]:
    """Yield the question, then a variant with trained states in host memory if the spec leaves that open."""
    yield asked
    open_keys = [key for key in (f"{name}.offload" for name in asked.spec.trained) if not is_set(asked.spec, key)]
    if open_keys and asked.learner_sheet.kind != CPU_KIND:
        yield replace(asked, spec=edited(asked.spec, dict.fromkeys(open_keys, True)))


def _holds(asked: Question, spec: RunSpec, sequences: int) -> bool:
    """Return whether an actor's KV cache holds this many sequences of maximum length."""
    plan = replace(asked, spec=spec).plan()
    return plan.kv_tokens is None or plan.kv_tokens >= sequences * plan.sequence_tokens


def _filled(asked: Question, spec: RunSpec) -> RunSpec:
    """Return the spec with as many actors as fit on its side of the devices, if their number is open."""
    if spec.supervised or spec.scaling.generation.max_actors != "auto":
        return spec
    shared = spec.placement.mode == "colocated" or spec.placement.learner_kind is not None
    side = asked.count if shared else asked.count - spec.placement.learner_devices
    room = side // spec.generation.engine.devices_per_actor
    return edited(spec, {MOST: max(room - spec.scaling.prefill.max_actors, spec.scaling.generation.min_actors)})


def with_fewest_actors(spec: RunSpec) -> RunSpec:
    if spec.supervised:
        return spec
    return edited(spec, {MOST: spec.scaling.generation.most_actors})


def _fits(asked: Question, spec: RunSpec) -> bool:
    try:
        return replace(asked, spec=spec).plan().fits
    except PlacementError:
        return False


def _side(asked: Question, spec: RunSpec) -> int:
    """Return the number of devices on the learner side."""
    return asked.count if spec.placement.mode == "colocated" else spec.placement.learner_devices


def _with_others(asked: Question, spec: RunSpec) -> RunSpec | None:
    """Resolve open ranks of critic, reference, teachers and reward models; return None if they do not fit.

    A critic learns while everything else waits, so it gets the most ranks that fit. The others get the ranks from
    `_with_frozen`, on the critic's devices or on those it leaves free.
    """
    side, keys = _side(asked, spec), open_ranks(spec)
    trained = [key for key in keys if key.partition(".")[0] in spec.trained]
    frozen = [key for key in keys if key not in trained]
    for count in reversed([*more_ranks(side)]) if trained else (0,):
        chosen = edited(spec, dict.fromkeys(trained, count))
        for most in (side, max((side - count) // max(len(frozen), 1), 1)):
            if _fits(asked, edited(chosen, dict.fromkeys(frozen, most))):
                return _with_frozen(asked, edited(chosen, dict.fromkeys(frozen, most)), frozen, most)
    return None


def _with_frozen(asked: Question, spec: RunSpec, keys: Sequence[str], most: int) -> RunSpec:
    """Return a spec that fits, given that `most` ranks for each of `keys` fit, preferring the ranks of one node.

    Each rank takes a share of the batch, and gathering weights within a node uses its own links. More ranks are used
    only if fewer do not fit.
    """
    for key in keys:
        counts = sorted(more_ranks(most), key=lambda ranks: (ranks > NODE_DEVICES, abs(NODE_DEVICES - ranks)))
        spec = next(each for each in (edited(spec, {key: ranks}) for ranks in counts) if _fits(asked, each))
    return spec


def _last_resort(asked: Question) -> RunSpec:
    spec = asked.spec
    apart = not spec.supervised and asked.count > spec.placement.learner_devices
    if spec.placement.mode == "auto":
        spec = edited(spec, {"placement.mode": "disaggregated" if apart else "colocated"})
    if spec.learner.ranks != "auto":
        return spec
    together = spec.placement.mode == "colocated"
    return list(_with_ranks(spec, asked.count if together else _apart(asked)))[-1]


def _apart(asked: Question) -> int:
    """Return the most devices that the learner can have, given the minimum of generation and prefill actors."""
    spec = asked.spec
    engines = spec.scaling.generation.min_actors + spec.scaling.prefill.max_actors
    return asked.count - engines * spec.generation.engine.devices_per_actor


def _candidates(asked: Question) -> Iterator[RunSpec]:
    """Yield the placements of a run, cheapest first.

    The order is co-located, larger engine fractions first; co-located with turns; disaggregated. Each comes with 1, 2,
    4 and 8 devices per actor if that is open.
    """
    spec = asked.spec
    for changes in _together(asked) if spec.placement.mode in ("auto", "colocated") else ():
        together = edited(spec, {"placement.mode": "colocated"} | changes)
        # A co-located learner has all devices.
        yield edited(together, {"learner.ranks": asked.count}) if spec.learner.ranks == "auto" else together
    if spec.placement.mode in ("auto", "disaggregated") and not spec.supervised:
        apart = edited(spec, {"placement.mode": "disaggregated"})
        for size in _devices_per_actor(asked):
            own = edited(apart, {TENSOR_PARALLEL: size})
            if (most := _apart(replace(asked, spec=own))) >= 1:
                yield from _with_ranks(own, most)


def _together(asked: Question) -> Iterator[dict[str, Any]]:
    """Yield the changes of a co-located run, in the order of `_candidates`."""
    spec = asked.spec
    if spec.supervised or asked.sheet.kind == CPU_KIND:
        yield {}
        return
    fractions = () if is_set(spec, FRACTION) else FRACTIONS
    sizes = _devices_per_actor(asked)
    for fraction in (spec.generation.engine.gpu_memory_fraction, *fractions):
        yield from ({TENSOR_PARALLEL: size, FRACTION: fraction} for size in sizes)
    if may_take_turns(spec) and not is_set(spec, TURNS):
        yield from ({TENSOR_PARALLEL: size, TURNS: True} for size in sizes)


def _devices_per_actor(asked: Question) -> tuple[int, ...]:
    """Return the tensor parallel sizes within one machine that divide the model's heads."""
    engine, shape = asked.spec.generation.engine, asked.shape
    if engine.tensor_parallel_size != "auto":
        return (engine.devices_per_actor,)
    most = 1 if asked.sheet.kind == CPU_KIND else min(asked.count, NODE_DEVICES)
    sizes = (size for size in (1, *TENSOR_PARALLEL_SIZES) if size <= most)
    return tuple(
        size for size in sizes
        if shape.heads % size == 0 and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
    )  # fmt: skip


def may_take_turns(spec: RunSpec) -> bool:
    """Return whether `placement.turns` is compatible with all other keys (the validators of RunSpec)."""
    return not (
        spec.schedule.steps_ahead
        or spec.scaling.prefill.on
        or spec.generation.speculation.has_weights
        or spec.weights.transport == "nccl"
    )


def _with_ranks(spec: RunSpec, most: int) -> Iterator[RunSpec]:
    """Yield the spec with each possible number of learner ranks, if open: one rank per device of the learner side."""
    if spec.learner.ranks != "auto":
        yield spec
    elif spec.placement.mode == "colocated":
        yield edited(spec, {"learner.ranks": most})
    elif is_set(spec, "placement.learner_devices") or spec.placement.learner_kind is not None:
        yield edited(spec, {"learner.ranks": spec.placement.learner_devices})
    else:
        for ranks in more_ranks(max(most, 1)):
            yield edited(spec, {"learner.ranks": ranks, "placement.learner_devices": ranks})


def open_ranks(spec: RunSpec) -> tuple[str, ...]:
    """Return the keys of rank counts that are `auto`."""
    values = {
        **{f"{name}.ranks": part.ranks for name, part in spec.trained.items()},
        "reference.ranks": spec.reference.ranks,
        "scoring.reward_model_ranks": spec.scoring.reward_model_ranks,
        **{f"teachers.{index}.ranks": each.ranks for index, each in enumerate(spec.teachers)},
    }
    return tuple(key for key, ranks in values.items() if ranks == "auto")
