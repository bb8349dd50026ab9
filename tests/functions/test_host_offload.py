"""What a sleeping function offloads comes back bit for bit, at the same tensors; and its memory is free meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhfless.algorithms.passes import Passes
from rlhfless.functions import host_offload as parking_module
from rlhfless.functions.host_offload import GIB, HostOffload, held_bytes, require_free
from rlhfless.functions.ranks import Asleep, RankActor
from rlhfless.weights.store import FolderStore

MIB = 2**20
CPU = torch.device("cpu")


def test_views_and_aliases_are_whole_again() -> None:
    whole = torch.arange(1000.0)
    row, tied = whole[100:200], whole.view(10, 100)
    held = HostOffload([whole, row, torch.empty(0)])
    assert held.size_bytes == 4000
    for _ in range(2):
        held.offload()
        held.offload()
        held.restore()
        held.restore()
        assert torch.equal(tied, torch.arange(1000.0).view(10, 100))
        assert torch.equal(row, torch.arange(100.0, 200.0))


def test_memory_is_free_while_it_is_parked_and_does_not_grow() -> None:
    tensors = [torch.full((4 * MIB,), 1.0) for _ in range(4)]
    held = HostOffload(tensors)
    before = held_bytes(CPU)
    held.offload()
    asleep = held_bytes(CPU)
    assert before - asleep >= 0.9 * 64 * MIB
    for _ in range(10):
        held.restore()
        held.offload()
    assert held_bytes(CPU) - asleep < 8 * MIB
    held.restore()
    assert all(bool((tensor == 1.0).all()) for tensor in tensors)


def test_a_learner_that_slept_goes_on_as_if_it_had_not(learner, batch, tmp_path) -> None:
    sleeper_store = FolderStore(tmp_path / "store")
    with learner() as awake:
        expected = [awake.learn(batch, Passes(2)) for _ in range(2)]
        weights, probe = awake.weights(), awake.probe_logprobs((1, 7, 3))
    with learner() as sleeper:
        size_bytes = HostOffload(sleeper.kept_on_device()).size_bytes
        for step in range(2):
            sleeper_store.put("run", 1, step, sleeper.published()[0])  # it reads the shards' own memory
            held = HostOffload(sleeper.kept_on_device())
            assert held.size_bytes == size_bytes
            held.offload()
            held.restore()
            assert sleeper.learn(batch, Passes(2)) == expected[step]
        for name, tensor in weights.items():
            assert torch.equal(tensor, sleeper.weights()[name]), name
        assert sleeper.probe_logprobs((1, 7, 3)) == probe


def test_what_is_parked_is_lent_for_a_while() -> None:
    tensors = [torch.full((2 * MIB,), float(number)) for number in range(5)]
    row, held = tensors[3][10:20], HostOffload(tensors)
    with held.lent([tensors[1]]):  # awake: nothing is done
        assert tensors[1].sum() == 2.0 * MIB
    held.offload()
    asleep = held_bytes(CPU)
    for _ in range(2):
        with held.lent([tensors[1], row, torch.ones(3)]):
            assert bool((tensors[1] == 1.0).all())
            assert bool((tensors[3] == 3.0).all()), "a view brings all of its storage"
            assert held_bytes(CPU) - asleep >= 0.9 * 16 * MIB
            tensors[1].zero_()
        assert held_bytes(CPU) - asleep < 8 * MIB
        assert held.offloaded
    held.restore()
    assert all(bool((tensor == float(number)).all()) for number, tensor in enumerate(tensors))


def test_a_sleeping_learner_publishes_what_it_did_awake(learner, batch) -> None:
    with learner() as rank:
        rank.learn(batch, Passes())
        expected = {name: tensor.clone() for name, tensor in rank.published_everywhere(None).tensors}
        held = HostOffload(rank.kept_on_device())
        held.offload()
        asleep = {name: tensor.clone() for name, tensor in rank.published_everywhere(held.lent).tensors}
        assert asleep.keys() == expected.keys()
        assert all(torch.equal(asleep[name], tensor) for name, tensor in expected.items())
        held.restore()
        assert all(torch.equal(rank.weights()[name], tensor) for name, tensor in expected.items())


def test_a_learner_keeps_weights_and_both_moments_on_its_device(learner) -> None:
    with learner() as rank:
        weights = sum(tensor.nbytes for tensor in rank.weights().values())
        assert HostOffload(rank.kept_on_device()).size_bytes == pytest.approx(3 * weights, rel=0.05)
    with learner(offload=True) as rank:
        assert HostOffload(rank.kept_on_device()).size_bytes < 0.01 * weights


class ReservationManager(RankActor):
    """A rank that keeps one tensor, and adds it up."""

    named = "keeper"

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(rank_bindings=[SimpleNamespace(bind=lambda: None)], planned={}), 0)
        self.kept = torch.full((8 * MIB,), 2.0)

    def kept_on_device(self) -> list[torch.Tensor]:
        return [self.kept]

    def add_up(self) -> float:
        with self._at_work("add up"):
            return float(self.kept.sum())


def test_a_sleeping_rank_refuses_work_and_says_what_it_gave_back() -> None:
    rank = ReservationManager()
    rank.wake()  # it is awake
    slept = rank.sleep()
    assert slept.freed_bytes >= 0.9 * 32 * MIB
    assert rank.sleep().freed_bytes < MIB
    with pytest.raises(Asleep, match="keeper rank 0 sleeps, and cannot add up; wake it first"):
        rank.add_up()
    rank.wake()
    assert rank.add_up() == 2.0 * 8 * MIB


def test_waking_waits_for_memory_that_a_killed_process_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1 * GIB, 2 * GIB, 8 * GIB])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(free), 80 * GIB))
    monkeypatch.setattr(parking_module.time, "sleep", lambda _s: None)
    require_free(torch.device("cuda"), 8 * GIB)


def test_waking_ends_with_both_figures_where_the_memory_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 * GIB, 80 * GIB))
    with pytest.raises(MemoryError, match=r"8\.00 GiB are needed to wake, but only 1\.00 of 80\.00 GiB are free"):
        require_free(torch.device("cuda"), 8 * GIB, wait_s=0.0)
