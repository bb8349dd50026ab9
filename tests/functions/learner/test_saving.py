"""Whether copies of the learner's state fit into the memory of its nodes, and the deadline of their writing."""

from __future__ import annotations

import threading

import pytest

from rlhfless.functions.training import checkpoint
from rlhfless.functions.training.saving import enough
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.util.free_memory import free_bytes


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
