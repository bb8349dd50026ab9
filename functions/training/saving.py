"""Checkpoints written in the background, if the nodes have memory for a copy of the state.

The run waits only for the copy to host memory (master weights and moments: 12 bytes per parameter, 16 with an average
of the weights, over all ranks). GPU tensors are copied through two pinned buffers. A thread then writes the copy, on
its own process group. One checkpoint is written at a time, and none counts until it is complete
(rlhfless.functions.training.checkpoint). Copy and write each have a deadline shorter than that of the rank's call,
whose error could not name the cause of a hang.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlhfless.functions.expert_parallel import expert_mesh_of, is_expert
from rlhfless.functions.sharding import local, mesh_of
from rlhfless.functions.training.checkpoint import Savers
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.util.host import COPIES_SHARE, free_bytes

DEADLINE_SHARE = 0.9
"""Share of `timeouts.call_s` after which a copy or write is abandoned."""

_POLL_S = 1e-4

PIECE_BYTES = 2**26
"""Size of a pinned buffer: a power of two, because torch rounds such blocks up to one."""


class Background:
    """Writes one checkpoint at a time in a thread. All methods except `wait_written` are collective."""

    def __init__(self, savers: Savers, timeout_s: float, mesh: DeviceMesh, expert_ranks: int = 1) -> None:
        """`timeout_s` limits each call of a rank. `mesh`: the ranks that the state is split over; `expert_ranks` of
        them divide the experts."""
        self._savers = savers
        self._limit_s = DEADLINE_SHARE * timeout_s
        self._mesh = (
            DeviceMesh.from_group(savers.group, "cpu")
            if mesh.ndim == 1
            else mesh_of(torch.device("cpu"), mesh.size(), mesh.size(1), timedelta(seconds=timeout_s), "gloo")
        )
        cpu, shards = torch.device("cpu"), mesh.size(mesh.ndim - 1)
        self._experts = expert_mesh_of(cpu, mesh.size(), shards, expert_ranks, connected=False)
        self._writing: tuple[str, float, Future[None]] | None = None
        """Location, deadline (time.monotonic) and result."""
        self._buffers: list[torch.Tensor] = []

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return whether every node has memory for a copy of its ranks' shards. *Collective.*"""
        size = sum(local(tensor).nbytes for tensor in _tensors(state))
        return enough(self._savers.all((socket.gethostname(), size, free_bytes())))

    def copied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state to host memory, keeping its sharding. Raises CheckpointError if the device does not answer."""
        deadline_s = time.monotonic() + self._limit_s
        try:
            return {key: self._copy(part, deadline_s) for key, part in state.items()}
        except TimeoutError:
            raise CheckpointError(
                f"the copy of the learner's state from {torch.cuda.get_device_name()} for a checkpoint did not end "
                f"within {self._limit_s:.0f} s ({DEADLINE_SHARE:g} of timeouts.call_s); check that GPU, and resume "
                "the run"
            ) from None

    def _copy(self, value: Any, deadline_s: float) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copy(part, deadline_s) for key, part in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        copy = self._on_host(local(value.detach()), deadline_s)
        if not isinstance(value, DTensor):
            return copy
        mesh = self._experts if is_expert(value) else self._mesh
        return DTensor.from_local(
            copy, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    def _on_host(self, part: torch.Tensor, deadline_s: float) -> torch.Tensor:
        """Copy to pageable memory. Without pinned buffers, eight GPUs copy at 3 to 5 GB/s each."""
        if part.device.type != "cuda":
            return part.to("cpu", copy=True)
        if not self._buffers:
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copy = torch.empty(part.shape, dtype=part.dtype)
        copy_in_pieces(part, copy, self._buffers, lambda: torch.cuda.current_stream().record_event(), deadline_s)
        return copy

    def begin(self, location: str, write: Callable[[], None]) -> None:
        """Write the checkpoint at `location` by calling `write` in a thread.

        Raises the errors of `wait_written` for the previous checkpoint.
        """
        self.wait_written()
        threads = ThreadPoolExecutor(1, "checkpoint")
        self._writing = (location, time.monotonic() + self._limit_s, threads.submit(write))
        threads.shutdown(wait=False)

    def wait_written(self) -> None:
        """Wait for the current checkpoint. Raises CheckpointError at its deadline, and any error of the write."""
        if self._writing is None:
            return
        location, deadline_s, writing = self._writing
        wait([writing], max(0.0, deadline_s - time.monotonic()))
        if not writing.done():
            raise CheckpointError(
                f"the checkpoint {location} was not written within {self._limit_s:.0f} s ({DEADLINE_SHARE:g} of "
                f"timeouts.call_s): it stopped at {self._savers.phase}. Earlier checkpoints are untouched: check that "
                "storage, or raise timeouts.call_s, and resume the run"
            )
        self._writing = None
        writing.result()


def copy_in_pieces(
    source: torch.Tensor,
    target: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    recorded: Callable[[], Any],
    deadline_s: float,
) -> None:
    """Copy a tensor to a contiguous one in host memory through pinned buffers of equal size.

    Each piece is copied out while the device fills the next buffer. `recorded` returns an event after the device's work
    so far. Raises TimeoutError at `deadline_s` (time.monotonic).
    """
    flat = (each.reshape(-1).view(torch.uint8) for each in (source.contiguous(), target))
    filling: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()

    def copy_on() -> None:
        filled, buffer, place = filling.popleft()
        while not filled.query():
            if time.monotonic() > deadline_s:
                raise TimeoutError
            time.sleep(_POLL_S)
        place.copy_(buffer)

    pieces = zip(*(torch.split(each, len(buffers[0])) for each in flat), strict=True)
    for number, (piece, place) in enumerate(pieces):
        if len(filling) == len(buffers):
            copy_on()
        buffer = buffers[number % len(buffers)][: len(piece)]
        buffer.copy_(piece, non_blocking=True)
        filling.append((recorded(), buffer, place))
    while filling:
        copy_on()


def enough(ranks: Sequence[tuple[str, int, int]]) -> bool:
    """Return whether copies fit on all nodes. `ranks`: node, bytes of the copy, and free bytes of the node."""
    nodes = {node for node, _, _ in ranks}
    return all(
        sum(size for node, size, _ in ranks if node == each)
        <= COPIES_SHARE * min(free for node, _, free in ranks if node == each)
        for each in nodes
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []
