"""Tensors that are copied to a GPU ahead of their use. Streams and pinned memory are replaced: not yet run on a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.weights import digest, files
from rlhfless.weights.files import Arrived, Copy, ahead


def tensors(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{n}", torch.randint(0, 256, (size,), dtype=torch.uint8)) for n, size in enumerate(sizes)]


def cloning(tensor: torch.Tensor) -> Copy:
    return lambda: lambda: tensor.clone()


def test_the_order_and_the_bytes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "AHEAD_BYTES", 100)
    given = tensors(10, 60, 50, 0, 101, 100, 1, 99, 30)
    came = list(ahead(given, cloning))
    assert [name for name, _ in came] == [name for name, _ in given]
    for (name, mine), (_, theirs) in zip(came, given, strict=True):
        assert torch.equal(mine, theirs)
        assert (mine is theirs) == (len(theirs) in (0, 101)), f"{name}: the empty and the large one stay"


def test_no_more_is_copied_ahead_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "AHEAD_BYTES", 100)
    begun: list[int] = []

    def begin(tensor: torch.Tensor) -> Copy:
        begun.append(len(tensor))
        return cloning(tensor)

    used = 0
    for _, tensor in ahead(tensors(*[30] * 20), begin):
        assert sum(begun) - used <= 100 + 30, "and the one that is used"
        used += len(tensor)
    assert used == sum(begun) == 600


def test_several_are_copied_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(files.READERS, timeout=30)

    def begin(tensor: torch.Tensor) -> Copy:
        def made() -> Arrived:
            meet.wait()
            return lambda: tensor

        return made

    assert len(list(ahead(tensors(*[5] * files.READERS), begin))) == files.READERS


def test_a_copy_that_fails_is_raised_and_one_that_is_not_wanted_any_more_ends() -> None:
    def fails(tensor: torch.Tensor) -> Copy:
        def made() -> Arrived:
            raise MemoryError("the GPU is full")

        return made

    with pytest.raises(MemoryError):
        list(ahead(tensors(5, 5), fails))
    reading = ahead(tensors(*[5] * 9), cloning)
    next(reading)
    reading.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read_")]


def test_on_cores_nothing_is_copied() -> None:
    given = tensors(3, 4)
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(
        files.read_ahead(given, torch.device("cpu")), given, strict=True))  # fmt: skip


class Stream:
    """Notes in which order streams wait for each other."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def record_event(self) -> str:
        self.said.append(f"{self.name} records")
        return self.name

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, list[str]]:
    said: list[str] = []
    side, current = Stream("side", said), Stream("current", said)
    blank = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            said.append("pinned")
        return blank(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: said.append("kept for the side stream"))
    return side, said


def test_a_copy_is_made_in_pinned_pieces_and_waited_for(
    streams: tuple[Stream, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, said = streams
    monkeypatch.setattr(digest, "PIECE_BYTES", 64)
    value = torch.randn(9, 7).bfloat16().t()
    made = files._copy(value, torch.device("cpu"), side)  # type: ignore[arg-type]
    arrived = made()
    before = [
        "kept for the side stream",
        "current records",
        "side waits for current",
        "pinned",
        "pinned",
        "side records",
    ]
    assert said == before
    assert torch.equal(arrived(), value)
    assert said == [*before, "current waits for side"]
    assert files._copy(torch.tensor(3.5), torch.device("cpu"), side)()().item() == 3.5  # type: ignore[arg-type]


def test_tensors_that_are_on_a_gpu_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = SimpleNamespace(is_cuda=True, nbytes=5)
    assert list(ahead([("w", there)], cloning)) == [("w", there)]
