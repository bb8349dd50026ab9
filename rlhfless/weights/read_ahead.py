"""A version's tensors on their way from the host to a GPU: the next ones are copied while one is used.

A copy from pages that are not pinned, such as those of a mapped version, goes through one thread, at a fraction of what
the bus takes. Here several threads copy pieces into pinned memory, and a stream takes them from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from rlhfless.weights.digest import pieces

READERS = 4
"""Threads for one GPU; that many together read about as fast as its bus takes."""

AHEAD_BYTES = 256 << 20
"""Of tensors that are copied ahead, on the GPU and in pinned memory; an engine has as much for its activations, which
rest meanwhile."""

Arrived = Callable[[], torch.Tensor]
"""The copy, for the current stream; called by the thread that uses it."""

Copy = Callable[[], Arrived]
"""Makes a copy; called by a reading thread."""


def read_ahead(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the same tensors, on `device` if it is a GPU. One of more than AHEAD_BYTES stays where it is."""
    if device.type != "cuda":
        yield from tensors
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield from ahead(tensors, partial(_copy, device=device, stream=stream))


def ahead(
    tensors: Iterable[tuple[str, torch.Tensor]], begin: Callable[[torch.Tensor], Copy]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields copies of tensors in their order; threads make those of the next AHEAD_BYTES."""
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
    """The copy of a tensor to a GPU, which a thread makes on `stream`. Its memory is of the current stream's pool, and
    so comes back to the activations afterwards."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy.record_stream(stream)
    empty = torch.cuda.current_stream(device).record_event()

    def made() -> Arrived:
        with torch.cuda.stream(stream):
            stream.wait_event(empty)
            left = copy.view(-1).view(torch.uint8)
            for piece in pieces(tensor):
                staged = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True).copy_(piece)
                left[: len(piece)].copy_(staged, non_blocking=True)  # torch keeps what is staged until it was read
                left = left[len(piece) :]
            done = stream.record_event()

        def arrived() -> torch.Tensor:
            torch.cuda.current_stream(device).wait_event(done)
            return copy

        return arrived

    return made
