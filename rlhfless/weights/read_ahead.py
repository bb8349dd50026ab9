"""Copy a version's tensors from the host to a GPU, prefetching the next ones while one is in use.

A copy from unpinned pages, such as those of a mapped version, uses a single thread and a fraction of the bus
bandwidth. Here several threads copy pieces into pinned memory, and a stream copies from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from rlhfless.weights.digest import pieces

READERS = 4
"""Threads per GPU; this many together read about as fast as the bus."""

AHEAD_BYTES = 256 << 20
"""Bytes of tensors prefetched on the GPU and in pinned memory; no more than the engine's activations, which are idle
during a load."""

Arrived = Callable[[], torch.Tensor]
"""Return the copy, ready on the current stream; called by the consuming thread."""

Copy = Callable[[], Arrived]
"""Make a copy; called by a reading thread."""


def read_ahead(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors on `device` if it is a GPU. A tensor larger than AHEAD_BYTES stays where it is."""
    if device.type != "cuda":
        yield from tensors
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield from ahead(tensors, partial(_copy, device=device, stream=stream))


def ahead(
    tensors: Iterable[tuple[str, torch.Tensor]], begin: Callable[[torch.Tensor], Copy]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of tensors in order, while threads copy the next AHEAD_BYTES."""
    waiting: deque[tuple[str, torch.Tensor, Future[Arrived] | None]] = deque()
    held = 0
    with ThreadPoolExecutor(READERS, "read") as pool:

        def take() -> tuple[str, torch.Tensor]:
            nonlocal held
            name, tensor, copy = waiting.popleft()
            if copy is None:
                return name, tensor
            held -= tensor.nbytes
            return name, copy.result()()

        for name, tensor in tensors:
            size = tensor.nbytes
            if tensor.is_cuda or not 0 < size <= AHEAD_BYTES:
                waiting.append((name, tensor, None))
                continue
            while waiting and held + size > AHEAD_BYTES:
                yield take()
            waiting.append((name, tensor, pool.submit(begin(tensor))))
            held += size
        while waiting:
            yield take()


def _copy(tensor: torch.Tensor, device: torch.device, stream: torch.cuda.Stream) -> Copy:
    """Prepare the copy of a tensor to a GPU on `stream`.

    Its memory comes from the current stream's pool, and so returns to the activations afterwards.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy.record_stream(stream)
    empty = torch.cuda.current_stream(device).record_event()

    def made() -> Arrived:
        with torch.cuda.stream(stream):
            stream.wait_event(empty)
            left = copy.view(-1).view(torch.uint8)
            for piece in pieces(tensor):
                staged = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True).copy_(piece)
                left[: len(piece)].copy_(staged, non_blocking=True)  # torch keeps the staged data until it is read
                left = left[len(piece) :]
            done = stream.record_event()

        def arrived() -> torch.Tensor:
            torch.cuda.current_stream(device).wait_event(done)
            return copy

        return arrived

    return made
