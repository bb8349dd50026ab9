"""Whether this machine's cores and memory hold the processes that a spec asks for. For GPUs the memory plan answers
that."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfless.scaling.memory import CPU_KV_GIB
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import Problem

WORKER_GIB = 1 / 16
"""Least memory of a scoring worker: Python with the modules of its reward."""

HIGH_LEARNING_RATE = 0.01
"""AdamW moves each weight by about the learning rate in a step; language models have weights of about 0.02."""


def capacity_problems(spec: RunSpec, memory_bytes: int) -> list[Problem]:
    """The processes that do not fit the memory of a machine whose cores are the run's devices."""
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
    """Numbers of processes that are too large for the cores."""
    if spec.supervised:
        return
    bounds = spec.scaling.generation
    for name, actors in (("min_actors", bounds.min_actors), ("max_actors", bounds.most_actors)):
        if actors > devices:
            yield (
                f"scaling.generation.{name}: {actors} actors share {devices} core(s); more actors than cores draw no "
                "faster, and each has a model and a KV cache of its own"
            )
    if spec.scoring.workers > max(devices, 2):
        yield f"scoring.workers: {spec.scoring.workers} workers share {devices} core(s); set it to at most a core each"


def learning_rate_warnings(spec: RunSpec) -> Iterator[str]:
    """A learning rate that overwrites weights rather than trains them."""
    rate = spec.optimizer.learning_rate
    if rate > HIGH_LEARNING_RATE:
        yield (
            f"optimizer.learning_rate: {rate:g} moves each weight by about as much in every step, and weights are "
            "about 0.02; usual are 1e-7 to 1e-5 for RLHF and 1e-6 to 1e-4 for supervised learning"
        )
