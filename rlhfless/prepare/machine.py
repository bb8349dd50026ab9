"""This machine: its devices, and whether its cores, memory and disk hold what a spec asks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from rlhfless.prepare.model import PolicyModel, read_config
from rlhfless.records.checkpoints import CheckpointError, is_url
from rlhfless.scaling.latency.devices import kind_of, type_of
from rlhfless.scaling.memory import CPU_KV_GIB, GIB, FrozenBase, kept_bytes, version_bytes
from rlhfless.scaling.placement import Node
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import Problem


def local_node(kinds: Collection[str]) -> Node:
    """Describe this machine as a node: its GPUs, and the CPU cores of this process. `kinds`: device kinds of the price
    book.

    Raises UnknownAccelerator for GPUs without a kind.
    """
    import torch  # takes seconds: a fault found earlier should not wait for it

    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return Node("", "this machine", cores, cores)
    kind = kind_of(type_of(torch.cuda.get_device_name(0)), kinds, first_gpu_bytes())
    gpus = torch.cuda.device_count()
    return Node("", "this machine", cores, cores, kind, gpus, gpus)


def first_gpu_bytes() -> int:
    """Memory of this machine's first GPU."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


WORKER_GIB = 1 / 16
"""Least memory of a scoring worker: Python with its reward's modules."""

HIGH_LEARNING_RATE = 0.01
"""AdamW changes each weight by about the learning rate per step; weights are about 0.02."""

LOW_ADAPTER_RATE = 1e-5
"""Adapters learn with about ten times the rate of all weights: RLHF with 1e-5 to 1e-4 (Thinking Machines, LoRA Without
Regret, 2025)."""


def capacity_problems(spec: RunSpec, memory_bytes: int) -> list[Problem]:
    """Report processes that do not fit the memory of a CPU machine."""
    memory_gib = memory_bytes / 2**30
    kv_gib = spec.generation.engine.kv_cache_gib or CPU_KV_GIB
    asked = (
        ("scaling.generation.max_actors", spec.scaling.generation.most_actors, kv_gib, "for its KV cache"),
        ("scaling.prefill.max_actors", spec.scaling.prefill.max_actors, kv_gib, "for its KV cache"),
        ("scoring.workers", spec.scoring.workers, WORKER_GIB, "for its process"),
    )
    return [
        Problem(
            where,
            f"{count} x at least {each_gib:g} GiB ({why}) is {count * each_gib:,.0f} GiB, and this machine has "
            f"{memory_gib:,.1f} GiB",
            f"set it to at most {max(int(memory_gib / each_gib), 1)}",
        )
        for where, count, each_gib, why in (() if spec.supervised else asked)
        if count > 1 and count * each_gib > memory_gib
    ]


def capacity_warnings(spec: RunSpec, devices: int) -> Iterator[str]:
    """Warn about more processes than cores help."""
    if spec.supervised:
        return
    bounds = spec.scaling.generation
    for name, actors in (("min_actors", bounds.min_actors), ("max_actors", bounds.most_actors)):
        if actors > devices:
            yield (
                f"scaling.generation.{name}: {actors} actors share {devices} core(s); more actors than cores generate "
                "no faster, and each has a model and a KV cache of its own"
            )
    if spec.scoring.workers > max(devices, 2):
        yield f"scoring.workers: {spec.scoring.workers} workers share {devices} core(s); set it to at most a core each"


def learning_rate_warnings(spec: RunSpec) -> Iterator[str]:
    """Warn about a learning rate that overwrites weights."""
    rate = spec.optimizer.learning_rate
    if rate > HIGH_LEARNING_RATE:
        yield (
            f"optimizer.learning_rate: {rate:g} moves each weight by about as much in every step, and weights are "
            "about 0.02; usual are 1e-7 to 1e-5 for RLHF and 1e-6 to 1e-4 for supervised learning"
        )
    if spec.model.lora is not None and rate < LOW_ADAPTER_RATE:
        yield (
            f"optimizer.learning_rate: {rate:g} is low for an adapter (model.lora), which learns best with about ten "
            f"times the rate of full fine-tuning; try {10 * rate:g}"
        )


def checkpoint_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    """Check that a checkpoint could be written: try its small files in a temporary folder, and compare its size with
    free space."""
    # Here: it imports transformers, which takes long, and a fault found earlier should not wait for that.
    from rlhfless.functions.training.publishing import try_model_files

    config = read_config(spec.model)
    architecture = next(iter(getattr(config, "architectures", None) or ()), type(config).__name__)
    problems = []
    try:
        try_model_files(spec.model, config, architecture, policy.tokenizer)
    except CheckpointError as error:
        what, _, hint = str(error).rpartition("; ")
        problems.append(Problem("model.tokenizer" if spec.model.tokenizer else "model.path", what, hint))
    return problems + _room_problems(spec, policy)


def _room_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    field, where = ("checkpoint.url", spec.checkpoint.url) if spec.checkpoint.url else ("output", spec.output)
    if is_url(where) or policy.shape is None:
        return []
    existing = Path(where).absolute()
    while not existing.exists():
        existing = existing.parent
    averaged = spec.learner.average_decay is not None
    base = FrozenBase.of(policy.shape, spec.model)
    model = version_bytes(policy.shape, spec.model.dtype) if base is None else 4 * base.parameters
    trained = policy.shape.parameters if base is None else base.parameters
    needed, free = model + kept_bytes(4 * trained, averaged=averaged), shutil.disk_usage(existing).free
    if needed <= free:
        return []
    what = f"{str(existing)!r} has {free / GIB:.3g} GiB free, and a checkpoint takes {needed / GIB:.3g} GiB"
    return [Problem(field, what, "free some space there, or name a folder with more room")]
