"""Resolve spec values that depend on the devices: number formats, checkpointing, placement, timeouts. Pure.

Keys set by the user are never changed. The resolved values are written to the run's own spec.yaml, so a resumed run
keeps them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rlhfless.planning.memory_plan import (
    FRACTIONS,
    TENSOR_PARALLEL_SIZES,
    MemoryPlan,
    Question,
    edited,
    more_ranks,
    nodes_of,
)
from rlhfless.scaling.memory import GIB, version_bytes
from rlhfless.scaling.placement import CPU_KIND, NODE_DEVICES, PlacementError
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import Problem
from rlhfless.spec.learner import PASS_TOKENS

SLOWEST_BYTES_PER_S = 1e8
"""Rate of the slowest network by which weights reach a node: 1 Gbit/s minus its overhead. This machine's store was
measured at 5 to 16 times that (docs/benchmarks.md)."""

SMALL_SHARE, MINUTE_S = 0.1, 60.0
"""Timeouts grow with the model only if that adds at least this share, and in whole minutes: 601 s would look like a
mistake."""

SLOWEST_SHARE = 0.05
"""Lowest share of a device's peak at which a learner counts as working rather than hanging. Learners reach 20 to 50 %.
"""


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


MOST_DRAFTING_SEQUENCES = 32
"""Maximum sequences of an actor on a GPU that drafts from other responses. vLLM's older model runner launches a noise
kernel per seeded row, estimated from its code at 3 to 6 ms per iteration at 256 rows, as long as a small model's pass.
"""


def resolve_for_kind(spec: RunSpec, kind: str) -> RunSpec:
    """Return the spec with the defaults for devices of a kind, such as bfloat16 on GPUs.

    `placed` resolves the values that depend on memory.
    """
    learning = spec.placement.kind_of_learner(kind)
    wanted: dict[str, Any] = {} if kind == CPU_KIND else {"model.dtype": "bfloat16"}
    if kind == CPU_KIND:
        engine = spec.generation.engine
        open_keys = {TENSOR_PARALLEL: engine.devices_per_actor, MAX_SEQUENCES: engine.sequence_limit}
        spec = edited(spec, open_keys | {BATCH_TOKENS: engine.batch_tokens})
    wanted |= {f"{name}.dtype": "bfloat16" for name in spec.trained if learning != CPU_KIND}
    spec = edited(spec, {key: value for key, value in wanted.items() if not is_set(spec, key)})
    if learning == CPU_KIND:
        spec = edited(spec, dict.fromkeys(_open_ranks(spec), 1))
        for name, part in spec.trained.items():
            passes = {"micro_batch_tokens": part.pass_tokens, "gradient_checkpointing": part.recomputes}
            spec = edited(spec, {f"{name}.{key}": value for key, value in passes.items()})
    if kind != CPU_KIND:
        return spec
    return _with_fewest(edited(spec, {"placement.mode": "colocated"}) if spec.placement.mode == "auto" else spec)


def unplanned(spec: RunSpec, kind: str) -> RunSpec:
    """Resolve a spec for a model of unknown size: GPUs recompute activations, which works for every model that fits."""
    spec = resolve_for_kind(spec, kind)
    return edited(spec, {f"{name}.gradient_checkpointing": True for name in _open_checkpointing(spec)})


SETTLED = (
    "model.dtype",
    "learner.dtype",
    "learner.gradient_checkpointing",
    "learner.offload",
    "learner.micro_batch_tokens",
    "learner.logits_mib",
    "learner.ranks",
    "learner.shard_ranks",
    "critic.dtype",
    "critic.gradient_checkpointing",
    "critic.offload",
    "critic.micro_batch_tokens",
    "critic.ranks",
    "critic.shard_ranks",
    "reference.ranks",
    "scoring.reward_model_ranks",
    TENSOR_PARALLEL,
    MOST,
)
"""Keys whose resolved values are kept for the rest of the run."""


def keep_resolved(spec: RunSpec, before: RunSpec) -> RunSpec:
    """Return the spec of a resumed run, keeping resolved values of open keys from `before`, the run's own spec."""
    kept = {}
    for key in SETTLED:
        section = key.partition(".")[0]
        if getattr(spec, section) is None or getattr(before, section) is None:
            continue
        value = attrgetter(key)(spec)
        if value == "auto" or not is_set(spec, key):
            kept[key] = attrgetter(key)(before)
    return edited(spec, kept)


def _open_ranks(spec: RunSpec) -> tuple[str, ...]:
    """Return the keys of rank counts that are `auto`."""
    values = {
        **{f"{name}.ranks": part.ranks for name, part in spec.trained.items()},
        "reference.ranks": spec.reference.ranks,
        "scoring.reward_model_ranks": spec.scoring.reward_model_ranks,
    }
    return tuple(key for key, ranks in values.items() if ranks == "auto")


def is_set(spec: RunSpec, key: str) -> bool:
    """Return whether the user set a dotted key."""
    section: Any = spec
    for name in key.split("."):
        if name not in section.model_fields_set:
            return False
        section = getattr(section, name)
    return True


def device_problems(spec: RunSpec, kind: str) -> list[Problem]:
    """Return the reasons to refuse devices of a kind for a spec, regardless of their number."""
    return [*_format_problems(spec, kind), *_speculation_problems(spec, kind)]


def _speculation_problems(spec: RunSpec, kind: str) -> list[Problem]:
    """Return the problem of drafting from other responses with many sequences on a GPU."""
    if spec.supervised or kind == CPU_KIND or not spec.generation.speculation.remembers:
        return []
    method, sequences = spec.generation.speculation.method, spec.generation.engine.sequence_limit
    if sequences <= MOST_DRAFTING_SEQUENCES:
        return []
    what = (
        f"{method} on {kind} with {sequences} sequences per actor: vLLM's older model runner samples each sequence by "
        "a kernel of its own and does not schedule ahead, which costs more than drafts save"
    )
    hint = f"set {MAX_SEQUENCES}: {MOST_DRAFTING_SEQUENCES}, or use ngram, draft_model, eagle3, mtp or off"
    return [Problem("generation.speculation.method", what, hint)]


def _format_problems(spec: RunSpec, kind: str) -> list[Problem]:
    """Return the problems of float32 on GPUs, which is useful only for comparisons."""
    if spec.placement.float32_on_gpus:
        return []
    learning = spec.placement.kind_of_learner(kind)
    kinds = {"model.dtype": kind} | {f"{name}.dtype": learning for name in spec.trained}
    return [
        Problem(
            key,
            f"float32 on {of}: twice the memory of bfloat16, and matrix products at an eighth of its rate or less",
            "leave it out, or set placement.float32_on_gpus: true",
        )
        for key, of in kinds.items()
        if of != CPU_KIND and getattr(spec, key.partition(".")[0]).dtype == "float32"
    ]


def plan_problems(asked: Question, plan: MemoryPlan) -> tuple[str, ...]:
    """Return the reasons to refuse a run on these devices: rejected settings and insufficient memory."""
    refused = (
        f"{problem.where}: {problem.what}; {problem.hint}" for problem in device_problems(asked.spec, asked.sheet.kind)
    )
    return (*refused, *plan.problems)


def placed(asked: Question) -> RunSpec:
    """Resolve what a spec leaves open: `placement.mode`, ranks, actors, devices per actor, turns and offload.

    Takes the first candidate of `_candidates` that fits with room for a batch of sequences, or else the first that fits
    at all. Offload slows steps down, so it is tried only if nothing else fits. These choices are made with activation
    checkpointing and with forward passes of PASS_TOKENS. Afterwards, states are sharded within nodes if that fits too,
    and remaining memory goes to kept activations, larger passes and larger blocks of logits.
    """
    open_keys = {f"{name}.gradient_checkpointing": True for name in _open_checkpointing(asked.spec)}
    small = replace(asked, spec=edited(asked.spec, open_keys))
    spec = _inside_nodes(small, _with_large_batches(small, _with_all_ranks(small)))
    if not _fits(asked, spec):
        open_passes = (name for name, part in spec.trained.items() if part.micro_batch_tokens == "auto")
        return edited(spec, {f"{name}.micro_batch_tokens": PASS_TOKENS for name in open_passes})
    return _with_large_logits(asked, _with_large_passes(asked, _with_kept_activations(asked, spec)))


def _open_checkpointing(spec: RunSpec) -> tuple[str, ...]:
    return tuple(name for name, part in spec.trained.items() if part.gradient_checkpointing == "auto")


def _with_kept_activations(asked: Question, spec: RunSpec) -> RunSpec:
    """Disable activation checkpointing for each trained model that leaves it open and has room.

    If needed, engines are shrunk, as long as their KV cache still holds all samples of a step.
    """
    for name in _open_checkpointing(asked.spec):
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
    """Return whether passes with SPARE_TOKENS times `tokens` of a trained model fit, with any number of its ranks."""
    spec = edited(spec, {f"{name}.micro_batch_tokens": math.ceil(SPARE_TOKENS * tokens)})
    fewest = edited(spec, {"learner.ranks": spec.learner.fewest_ranks})
    return _fits(asked, spec) and (fewest == spec or _fits(asked, fewest))


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
        for candidate in (*(_filled(asked, each) for each in candidates), *map(_with_fewest, candidates)):
            changed = _with_others(asked, candidate)
            if changed is not None and _holds(asked, changed, BATCH_SEQUENCES):
                return changed
            fitting = fitting or changed
        if fitting is not None:
            return fitting
    # Nothing fits: return the placement that large models need, so that its problems and nearest change are reported.
    last = _with_fewest(_last_resort(asked))
    return edited(last, dict.fromkeys(_open_ranks(last), _side(asked, last)))


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


def _open_actors(spec: RunSpec) -> bool:
    return not spec.supervised and spec.scaling.generation.max_actors == "auto"


def _filled(asked: Question, spec: RunSpec) -> RunSpec:
    """Return the spec with as many actors as fit on its side of the devices, if their number is open."""
    if not _open_actors(spec):
        return spec
    shared = spec.placement.mode == "colocated" or spec.placement.learner_kind is not None
    side = asked.count if shared else asked.count - spec.placement.learner_devices
    room = side // spec.generation.engine.devices_per_actor
    return edited(spec, {MOST: max(room - spec.scaling.prefill.max_actors, spec.scaling.generation.min_actors)})


def _with_fewest(spec: RunSpec) -> RunSpec:
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
    """Resolve open ranks of critic, reference and reward models; return None if they do not fit.

    A critic learns while everything else waits, so it gets the most ranks that fit. The others get the ranks from
    `_with_frozen`, on the critic's devices or on those it leaves free.
    """
    side, keys = _side(asked, spec), _open_ranks(spec)
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


def timed(asked: Question) -> RunSpec:
    """Resolve timeouts that a model of this size stays within even at the slowest rates above, in whole minutes.

    The defaults are for small models and stay if the size adds less than SMALL_SHARE to them.

        start_s      + b P / rate            reading the model
        sync_s       + 2 b P / rate          an actor's pull of the weights, and reading them again
        call_s       + b P / rate + 8 P T / (share of the ranks' peak)
                                             a learning step of T tokens, with activations computed twice, and its
                                             publication
        generate_s   + waves x longest response x b P / (share of the engine's bandwidth)
    """
    spec, shape, sheet, sequence_tokens = asked.spec, asked.shape, asked.sheet, asked.sequence_tokens
    size_s = version_bytes(shape, spec.model.dtype) / SLOWEST_BYTES_PER_S
    samples = spec.prompts_per_step * spec.sequences_per_prompt
    learned_tokens = samples * (sequence_tokens if spec.supervised else spec.generation.max_tokens)
    ranks = min(part.world_size for part in spec.trained.values())
    flops_per_s = SLOWEST_SHARE * asked.learner_sheet.flops_per_s.value * ranks
    learning_s = 8 * shape.active * learned_tokens / flops_per_s
    engine = spec.generation.engine
    waves = math.ceil(samples / (engine.sequence_limit * spec.scaling.generation.min_actors))
    bandwidth = SLOWEST_SHARE * sheet.memory_bytes_per_s.value * engine.devices_per_actor
    token_s = version_bytes(shape, spec.model.dtype) / bandwidth
    more_s = {
        "timeouts.start_s": size_s,
        "timeouts.sync_s": 2 * size_s,
        "timeouts.call_s": size_s + learning_s,
        "timeouts.generate_s": waves * spec.generation.max_tokens * token_s,
    }
    values = {}
    for key, more in more_s.items():
        default_s = getattr(spec.timeouts, key.partition(".")[2])
        if more >= SMALL_SHARE * default_s and not is_set(spec, key):
            values[key] = MINUTE_S * math.ceil((default_s + more) / MINUTE_S)
    return edited(spec, values)
