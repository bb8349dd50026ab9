"""Checkpoints in the background: copies through pinned buffers, whether they fit, and their deadlines."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.functions.training import checkpoint
from rlhfless.functions.training.saving import copy_in_pieces, enough
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.util.host import free_bytes

PIECE = 64
LATE_S = time.monotonic() + 3600


class Device:
    """A device that copies late: what it was asked to copy lies in a buffer only after its event was waited for."""

    def __init__(self, count: int) -> None:
        self.buffers = [LateBuffer(self, PIECE) for _ in range(count)]
        self.asked: list[Any] = []
        self.most = 0

    def recorded(self) -> Any:
        self.most = max(self.most, len(self.asked))
        work, looks = self.asked[-1], iter((False, True))
        return type("Event", (), {"query": staticmethod(lambda: next(looks) and self.done(work))})

    def done(self, work: Any) -> bool:
        buffer, values = work
        buffer.copy_(values)
        self.asked.remove(work)
        return True


class LateBuffer:
    """A pinned buffer of the device."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.memory = device, torch.zeros(size, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, part: slice) -> Any:
        return LatePart(self.device, self.memory[part])


class LatePart(torch.Tensor):
    """A part of a buffer, which is asked for a copy."""

    @staticmethod
    def __new__(cls: Any, device: Device, memory: torch.Tensor) -> Any:
        part = torch.Tensor._make_subclass(cls, memory)
        part.device_of = device
        return part

    def copy_(self, values: torch.Tensor, non_blocking: bool = False) -> Any:
        if non_blocking:
            work = (self, values)
            assert all(each is not self and not _overlap(each, self) for each, _ in self.device_of.asked), "in use"
            self.device_of.asked.append(work)
            return self
        return torch.Tensor.copy_(self.as_subclass(torch.Tensor), values)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17, 32, 100])
def test_pieces_arrive_and_no_buffer_is_filled_before_it_was_read(elements: int, buffers: int) -> None:
    """Float32: 16 to a piece."""
    device = Device(buffers)
    source = torch.randn(elements, 1) if elements != 100 else torch.randn(20, 5).T  # not contiguous
    target = torch.empty(source.shape)
    copy_in_pieces(source, target, device.buffers, device.recorded, LATE_S)  # type: ignore[arg-type]
    torch.testing.assert_close(target, source, atol=0, rtol=0)
    assert device.most == min(buffers, max(1, -(-elements // 16))), "the device fills one buffer while another is read"


def test_scalars_and_other_formats() -> None:
    for source in (torch.tensor(3.0), torch.arange(99, dtype=torch.int8), torch.randn(7, 9).bfloat16()):
        device, target = Device(2), torch.empty(source.shape, dtype=source.dtype)
        copy_in_pieces(source, target, device.buffers, device.recorded, LATE_S)  # type: ignore[arg-type]
        assert torch.equal(target, source)


def test_a_copy_that_does_not_end_is_given_up() -> None:
    hangs = SimpleNamespace(query=lambda: False)
    buffers = [torch.empty(PIECE, dtype=torch.uint8)]
    with pytest.raises(TimeoutError):
        copy_in_pieces(torch.ones(4), torch.empty(4), buffers, lambda: hangs, time.monotonic() + 0.05)


@pytest.mark.parametrize(
    ("ranks", "fits"),
    [
        ([("a", 10, 20)], True),
        ([("a", 11, 20)], False),
        ([("a", 5, 20), ("a", 5, 21)], True),
        ([("a", 6, 20), ("a", 5, 21)], False),
        ([("a", 6, 20), ("b", 5, 10)], True),
        ([("a", 6, 20), ("b", 5, 9)], False),
    ],
    ids=["half of one", "more than half", "two ranks", "two ranks, too much", "two nodes", "a small node"],
)
def test_copies_take_half_of_what_is_free_on_each_node(ranks: list[tuple[str, int, int]], fits: bool) -> None:
    assert enough(ranks) is fits


def test_some_memory_is_free() -> None:
    assert free_bytes() > 0


@pytest.mark.parametrize("background", [False, True])
def test_a_writer_that_hangs_is_given_up_with_its_place(learner, tmp_path, monkeypatch, background: bool) -> None:
    freed = threading.Event()
    monkeypatch.setattr(checkpoint, "write_file", lambda *_: freed.wait(60))
    location = str(tmp_path / "step-1")
    expected = rf"{location} was not written within 1 s \(0.9 of timeouts.call_s\): it stopped at model.safetensors"
    with learner() as rank:
        rank._background._limit_s = 1.0
        try:
            if background:
                assert rank.save(location, background=True)
            with pytest.raises(CheckpointError, match=expected):
                rank.wait_written() if background else rank.save(location)
            with pytest.raises(CheckpointError, match=expected):
                rank.save(location, background=background)
        finally:
            freed.set()
