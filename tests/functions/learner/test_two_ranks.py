"""Ranks in processes of their own take the step that one takes, and go on from each other's checkpoints."""

from __future__ import annotations

import multiprocessing
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.tiny_learner import PATIENCE_S, make_rank, save_tiny_model
from fakes.tiny_learner import run_learner as run
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.algorithms.passes import Passes
from rlhfless.functions import sharding
from rlhfless.functions.host_offload import HostOffload
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.training import checkpoint
from rlhfless.records.checkpoints import CheckpointError

pytestmark = pytest.mark.timeout(600)  # up to eight processes, one after the other

PROBE = (1, 7, 3, 22, 9)


def arrays(weights: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """As they pass through a queue."""
    return {name: value.numpy() for name, value in weights.items()}


def evaluate_and_learn(learner: LearnerRank, _: int, batch: PackedBatch, count: int) -> tuple:
    old = learner.evaluate(batch)
    metrics = learner.learn(batch.with_columns(old_logprobs=old), Passes(count))
    return old, metrics, arrays(learner.weights())


@pytest.mark.parametrize("sequences", [24, 1], ids=["all", "fewer than ranks"])
def test_two_ranks_are_one(tiny_model, batch, tmp_path, sequences):
    given = {"batch": select(batch, np.arange(sequences)), "count": 2 if sequences > 1 else 1}
    ((old, metrics, weights),) = run(evaluate_and_learn, tiny_model, tmp_path, 1, **given)
    both = run(evaluate_and_learn, tiny_model, tmp_path, 2, **given)
    for their_old, their_metrics, their_weights in both:
        np.testing.assert_allclose(their_old, old, atol=1e-6, rtol=1e-6)
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)
    first, second = both[0][2], both[1][2]
    assert all(np.array_equal(first[name], second[name]) for name in first), "ranks agree to the last bit"


def test_two_ranks_that_share_prefixes_are_one_that_does_not(tiny_model, shared_batch, tmp_path):
    given = {"batch": shared_batch, "count": 2}
    large = {"micro_batch_tokens": 300}
    alone = large | {"share_prefixes": False}
    ((old, metrics, weights),) = run(evaluate_and_learn, tiny_model, tmp_path, 1, changes=alone, **given)
    both = run(evaluate_and_learn, tiny_model, tmp_path, 2, changes=large, **given)
    for their_old, their_metrics, their_weights in both:
        np.testing.assert_allclose(their_old, old, atol=1e-5, rtol=1e-5)
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)
    first, second = both[0][2], both[1][2]
    assert all(np.array_equal(first[name], second[name]) for name in first), "ranks agree to the last bit"


def fed(learner: LearnerRank, _: int, batch: PackedBatch) -> tuple:
    """What each rank can give engines on its GPU, awake and asleep."""
    learner.learn(batch, Passes())
    awake = arrays(dict(learner.published_everywhere(None).tensors))
    held = HostOffload(learner.kept_on_device())
    held.offload()
    asleep = arrays(dict(learner.published_everywhere(held.lent).tensors))
    held.restore()
    return awake, asleep, arrays(learner.weights())


def test_every_rank_gives_all_weights_also_asleep(tiny_model, batch, tmp_path):
    for awake, asleep, weights in run(fed, tiny_model, tmp_path, 2, batch=batch):
        assert awake.keys() == asleep.keys() == weights.keys()
        for name, value in weights.items():
            assert np.array_equal(awake[name], value), name
            assert np.array_equal(asleep[name], value), name


def learn_exactly(learner: LearnerRank, _: int, batches: list[PackedBatch]) -> tuple:
    """A step per batch. With the last comes what an engine checks."""
    assert learner._model.dtype == torch.float64
    metrics = [learner.learn(batch, Passes()) for batch in batches]
    stream, samples = learner.published(PROBE)
    checkpoint.drain(stream)
    return metrics, arrays(learner.weights()), learner.probe_logprobs(PROBE), samples


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_in_float64_two_ranks_are_one_to_1e9(batch, tmp_path, tied):
    """Three updates: of a batch whose chunks are unequal, of one sequence (a rank has no work), and of two. Untied, the
    two ranks compute activations anew besides."""
    changes = {"gradient_checkpointing": not tied}
    model = save_tiny_model(tmp_path / "model", tied=tied)
    batches = [select(batch, np.arange(count)) for count in (23, 1, 2)]
    ((metrics, weights, probe, samples),) = run(learn_exactly, model, tmp_path, 1, exact=True, batches=batches)
    both = run(learn_exactly, model, tmp_path, 2, exact=True, changes=changes, batches=batches)
    for their_metrics, their_weights, their_probe, _ in both:
        for mine, theirs in zip(metrics, their_metrics, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-9, rel=1e-9)
        assert ("lm_head.weight" in their_weights) is not tied
        for name, value in weights.items():
            assert value.dtype == np.float64
            np.testing.assert_allclose(their_weights[name], value, atol=1e-9, rtol=0, err_msg=name)
        assert their_probe == pytest.approx(probe, abs=1e-9)
    theirs, of_the_other = both[0][3], both[1][3]
    assert theirs.keys() == samples.keys()
    for name, sample in samples.items():
        np.testing.assert_allclose(np.frombuffer(theirs[name].values), np.frombuffer(sample.values), atol=1e-9, rtol=0)
        np.testing.assert_allclose(
            *(np.frombuffer(each.row_maxima, np.float32) for each in (theirs[name], sample)), rtol=1e-6
        )
    assert not of_the_other, "they come from the rank that writes"


class Copies(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within it; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        new = isinstance(made, torch.Tensor) and not function.is_view and not any(made is given for given in args)
        self.size_bytes += made.nbytes if new and made.device.type != "meta" else 0
        return made


def publish(learner: LearnerRank, _: int) -> tuple:
    stream, _ = learner.published()
    with Copies() as copies:
        taken = [(name, tensor.numpy()) for name, tensor in stream.tensors]
    return dict(taken), copies.size_bytes, arrays(learner.weights())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_only_the_rank_that_writes_copies_what_is_published_and_once(tiny_model, tmp_path, ranks):
    first, *others = run(publish, tiny_model, tmp_path, ranks)
    published, copied_bytes, expected = first
    assert all(np.array_equal(published[name], value) for name, value in expected.items())
    assert published.keys() == expected.keys()
    size_bytes = sum(value.nbytes for value in published.values())
    assert copied_bytes == (size_bytes if ranks > 1 else 0)
    assert [(taken, copied) for taken, copied, _ in others] == [({}, 0)] * (ranks - 1)


@pytest.mark.long
def test_in_float64_ranks_that_split_a_copy_each_are_one_to_1e9(batch, tmp_path):
    """Four ranks: two copies, each split over two. In the second update three of them have no work, and the first has
    several micro-batches, after the last of which copies exchange gradients."""
    model = save_tiny_model(tmp_path / "model", tied=False)
    batches = [select(batch, np.arange(count)) for count in (23, 1)]
    ((metrics, weights, probe, samples),) = run(learn_exactly, model, tmp_path, 1, exact=True, batches=batches)
    changes = {"shard_ranks": 2, "micro_batch_tokens": 50}
    four = run(learn_exactly, model, tmp_path, 4, exact=True, changes=changes, batches=batches)
    for their_metrics, their_weights, their_probe, _ in four:
        for mine, theirs in zip(metrics, their_metrics, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-9, rel=1e-9)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-9, rtol=0, err_msg=name)
        assert their_probe == pytest.approx(probe, abs=1e-9)
        assert all(np.array_equal(value, four[0][1][name]) for name, value in their_weights.items()), "to the last bit"
    assert four[0][3].keys() == samples.keys()
    assert not any(one[3] for one in four[1:]), "they come from the rank that writes"


def save_and_learn(learner: LearnerRank, _: int, batch: PackedBatch, location: Path) -> tuple:
    """In the background: the step goes on before the first byte is written."""
    learner.learn(batch, Passes(2))
    save, learned = checkpoint.dcp.save, threading.Event()

    def held_up(*arguments: Any, **options: Any) -> Any:
        assert learned.wait(PATIENCE_S)
        return save(*arguments, **options)

    checkpoint.dcp.save = held_up
    assert learner.save(location, {"step": 1}, background=True)
    saved = arrays(learner.weights())
    learner.learn(batch, Passes(2))
    there = location.exists()
    learned.set()
    learner.wait_written()
    assert location.exists()
    assert not there
    return saved, arrays(learner.weights())


def restore_and_learn(learner: LearnerRank, _: int, batch: PackedBatch, location: Path) -> tuple:
    learner.learn(batch, Passes())  # what it overwrites
    learner.restore(location)
    restored = arrays(learner.weights())
    learner.learn(batch, Passes(2))
    return restored, arrays(learner.weights())


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_two_and_three(tiny_model, batch, tmp_path):
    given = {"batch": batch, "location": tmp_path / "runs" / "checkpoint"}
    (saved, expected), _ = run(save_and_learn, tiny_model, tmp_path, 2, **given)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["checkpoint"], "nothing half-written is left"
    for ranks in (1, 2, 3):
        for restored, resumed in run(restore_and_learn, tiny_model, tmp_path, ranks, **given):
            for name, value in saved.items():
                np.testing.assert_array_equal(restored[name], value, err_msg=name)
            for name, value in expected.items():
                atol = 0 if ranks == 2 else 1e-6
                np.testing.assert_allclose(resumed[name], value, atol=atol, rtol=0, err_msg=name)


@pytest.mark.long
def test_a_checkpoint_of_two_copies_is_resumed_by_one_rank_and_by_copies(tiny_model, batch, tmp_path):
    given = {"batch": batch, "location": tmp_path / "runs" / "checkpoint"}
    copies = {"shard_ranks": 2}
    ((saved, expected), *_) = run(save_and_learn, tiny_model, tmp_path, 4, changes=copies, **given)
    for ranks, changes in ((1, {}), (4, copies)):
        for restored, resumed in run(restore_and_learn, tiny_model, tmp_path, ranks, changes=changes, **given):
            for name, value in saved.items():
                np.testing.assert_array_equal(restored[name], value, err_msg=name)
            for name, value in expected.items():
                np.testing.assert_allclose(resumed[name], value, atol=0 if changes else 1e-6, rtol=0, err_msg=name)


def save_to_a_full_disk(learner: LearnerRank, rank: int, location: Path) -> None:
    if rank == 1:

        def full(*_: object, **__: object) -> None:
            raise OSError("no space left on device")

        torch.save = full
    assert learner.save(location, background=True)
    learner.wait_written()


def test_a_rank_that_cannot_write_is_an_error_of_all(tiny_model, tmp_path):
    folder = tmp_path / "runs" / "checkpoint"
    for error in run(save_to_a_full_disk, tiny_model, tmp_path, 2, location=folder):
        assert isinstance(error, CheckpointError)
        assert "no space left" in str(error)
    assert not list(folder.parent.iterdir())


def _wait_for_another(model: str, rendezvous: Path, queue) -> None:
    try:
        make_rank(model, rendezvous, 0, 2, timeout_s=2)
    except (torch.distributed.DistError, RuntimeError) as error:
        queue.put(str(error))


def test_a_rank_that_never_comes_is_an_error_not_a_wait(tiny_model, tmp_path):
    """In a process of its own: what is left of half a group would be in the way of the next one."""
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=_wait_for_another, args=(tiny_model, tmp_path / "rendezvous", queue))
    process.start()
    try:
        assert re.search(r"(?i)time|wait", queue.get(timeout=PATIENCE_S))
    finally:
        process.join(timeout=10)
        process.kill()


def learn_and_save(learner: LearnerRank, rank: int, batch: PackedBatch, taken: Path | None, given: Path) -> tuple:
    if taken is not None:
        learner.restore(taken)
    learner.learn(batch, Passes())
    state = learner._state()
    tensors = {
        f"{part}/{name}": whole_tensor.numpy()
        for part in sorted(state)
        if isinstance(state[part], dict)
        for name, tensor in state[part].items()
        if (whole_tensor := sharding.whole(tensor, torch.device("cpu"))).ndim
    }
    learner.save(given)
    return tensors


@pytest.mark.long
def test_one_rank_then_two_then_one_are_one_rank_to_the_last_moment(tiny_model, batch, tmp_path):
    """Each group continues from the checkpoint of the one before it: weights, moments and average."""
    last: dict[str, dict[str, np.ndarray]] = {}
    for name, sizes in {"fixed": (1, 1, 1), "elastic": (1, 2, 1)}.items():
        taken = None
        for number, ranks in enumerate(sizes):
            given = tmp_path / f"{name}-{number}"
            options = {"batch": batch, "taken": taken, "given": given}
            results = run(learn_and_save, tiny_model, tmp_path, ranks, changes={"ema_decay": 0.5}, **options)
            taken, last[name] = given, results[0]
    assert {key.partition("/")[0] for key in last["fixed"]} >= {"master_weights", "average"}
    assert len({key.partition("/")[0] for key in last["fixed"]}) == 4, "and two moments"
    for key, value in last["fixed"].items():
        np.testing.assert_allclose(last["elastic"][key], value, atol=1e-6, rtol=0, err_msg=key)
