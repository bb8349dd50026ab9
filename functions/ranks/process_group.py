"""The process group of a function's ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.functions.policy import default_device
from rlhfless.functions.sharding import mesh_of


def join(
    init_method: str, rank: int, ranks: int, timeout_s: float, shard_ranks: int | None = None
) -> tuple[torch.device, DeviceMesh]:
    """Meet the other ranks at `init_method` (`tcp://host:port` or `file:///path`); this rank's device, and all ranks,
    of which `shard_ranks` neighbours split a model (by default all).

    `timeout_s` bounds the rendezvous and each collective operation; torch raises an error that names the operation.
    """
    device, timeout = default_device(), timedelta(seconds=timeout_s)
    dist.init_process_group(
        # What is kept in the host's memory is reduced there.
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )
    return device, mesh_of(device, ranks, shard_ranks, timeout)


def join_frozen(init_method: str, rank: int, ranks: int, timeout_s: float) -> DeviceMesh | None:
    """As `join`, for a model that is never trained. None for one rank: a group of one would gather a second copy of the
    weights, for nothing."""
    return join(init_method, rank, ranks, timeout_s)[1] if ranks > 1 else None
