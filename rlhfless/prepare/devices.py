"""The devices of this machine. Without Ray, so that a spec can be checked before anything of it is imported."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from rlhfless.scaling.accelerators import kind_of, type_of
from rlhfless.scaling.placement import Node


def local_node(kinds: Collection[str]) -> Node:
    """This machine as a node: its GPUs, and the CPU cores that this process may use. `kinds` are those that the price
    book has.

    Raises UnknownAccelerator for GPUs that the book has no kind for.
    """
    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return Node("", "this machine", cores, cores)
    kind = kind_of(type_of(torch.cuda.get_device_name(0)), kinds, first_gpu_bytes())
    gpus = torch.cuda.device_count()
    return Node("", "this machine", cores, cores, kind, gpus, gpus)


def first_gpu_bytes() -> int:
    """Memory of this machine's first GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory)
