"""Experts divided over ranks: they take the step that one rank takes, whoever gets the tokens."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.tiny_learner import make_rank, run_processes, save_tiny_experts
from fakes.tiny_learner import run_learner as run
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.algorithms.passes import Passes
from rlhfless.functions import sharding
from rlhfless.functions.expert_parallel import expert_modules, is_expert
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.training import shared_writing
from rlhfless.functions.training.shared_writing import SharedWriting, all_see
from rlhfless.spec.errors import InputError
from rlhfless.weights.digest import digest_of
from rlhfless.weights.files import TensorStream
from rlhfless.weights.samples import weight_sample
from rlhfless.weights.store import FolderStore, StoreFull, known_hashes

pytestmark = pytest.mark.timeout(600)

CPU = torch.device("cpu")
PROBE = (1, 7, 3, 22, 9)


def updated(learner: LearnerRank, _: int, batch: PackedBatch) -> tuple:
    """Old logprobs, the gradient of the first update, metrics, the weights afterwards, and the probe's logprobs."""
    old = learner.evaluate(batch)
    gradients: dict[str, np.ndarray] = {}
    norm_of = learner._optimizer.gradient_norm

    def keeping() -> float:
        for name, parameter in learner._model.named_parameters():
            gradients.setdefault(name, sharding.whole(parameter.grad, CPU).clone().numpy())
        return norm_of()

    learner._optimizer.gradient_norm = keeping  # type: ignore[method-assign]
    metrics = learner.learn(batch.with_columns(old_logprobs=old), Passes(2 if batch.sequences > 1 else 1))
    weights = {name: value.numpy() for name, value in learner.weights().items()}
    return old, gradients, metrics, weights, learner.probe_logprobs(PROBE)


def assert_same(theirs: Any, expected: tuple) -> None:
    assert not isinstance(theirs, Exception), theirs
    np.testing.assert_allclose(theirs[0], expected[0], atol=1e-6, rtol=1e-6)
    for ours, wanted in ((theirs[1], expected[1]), (theirs[3], expected[3])):
        assert ours.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-6, rtol=1e-5, err_msg=name)
    assert theirs[2] == pytest.approx(expected[2], abs=1e-5, rel=1e-5)
    assert theirs[4] == pytest.approx(expected[4], abs=1e-5)


LAYOUTS = {
    "two ranks": (2, {"expert_parallel": 2}),
    "activations computed anew": (2, {"expert_parallel": 2, "gradient_checkpointing": True}),
    "offloaded": (2, {"expert_parallel": 2, "offload": True}),
    "each expert rank twice": (4, {"expert_parallel": 2}),
    "two copies": (4, {"expert_parallel": 2, "shard_ranks": 2}),
}


@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_ranks_with_divided_experts_are_one(tiny_experts, batch, tmp_path, layout):
    ranks, changes = LAYOUTS[layout]
    (expected,) = run(updated, tiny_experts, tmp_path, 1, batch=batch)
    for theirs in run(updated, tiny_experts, tmp_path, ranks, changes=changes, batch=batch):
        assert_same(theirs, expected)


def test_a_rank_without_sequences_takes_part(tiny_experts, batch, tmp_path):
    one = select(batch, np.arange(1))
    (expected,) = run(updated, tiny_experts, tmp_path, 1, batch=one)
    for theirs in run(updated, tiny_experts, tmp_path, 2, changes={"expert_parallel": 2}, batch=one):
        assert_same(theirs, expected)


def test_fewer_experts_than_ranks_that_share_them_are_split_inside(batch, tmp_path):
    """Two experts over two ranks leave one for each pair of ranks, whose rows they split."""
    model = save_tiny_experts(tmp_path / "model", experts=2)
    (expected,) = run(updated, model, tmp_path, 1, batch=batch)
    for theirs in run(updated, model, tmp_path, 4, changes={"expert_parallel": 2}, batch=batch):
        assert_same(theirs, expected)


def held(learner: LearnerRank, rank: int) -> tuple:
    """The experts of a rank, by the rows that it holds, and the number of parameters that it holds."""
    parameters = dict(learner._model.named_parameters())
    experts = {name: sharding.local(value.detach()).numpy() for name, value in parameters.items() if is_expert(value)}
    return experts, sum(sharding.local(value).numel() for value in parameters.values())


def test_each_rank_holds_its_own_experts(tiny_experts, tmp_path):
    whole = {name: value for name, value in _weights(tiny_experts).items() if ".experts." in name}
    results = run(held, tiny_experts, tmp_path, 4, changes={"expert_parallel": 2})
    assert len(whole) == 4
    # Neighbours are a group: 0 and 1 have four experts each, of which 0 and 2 keep two each.
    for rank, first in enumerate((0, 4, 2, 6)):
        assert results[rank][0].keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_array_equal(results[rank][0][name], value[first : first + 2])
    assert len({count for _, count in results}) == 1, "parameters are split evenly"


def _weights(model: str) -> dict[str, np.ndarray]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert len(expert_modules(loaded)) == 2
    return {name: value.detach().numpy() for name, value in loaded.named_parameters()}


def save_and_learn(learner: LearnerRank, _: int, batch: PackedBatch, taken: Path | None, given: Path) -> tuple:
    if taken is not None:
        learner.learn(batch, Passes())  # what it overwrites
        learner.restore(taken)
    learner.learn(batch, Passes(2))
    state = learner._state()
    tensors = {
        f"{part}/{name}": sharding.whole(tensor, CPU).numpy()
        for part in sorted(state)
        if isinstance(state[part], dict)
        for name, tensor in state[part].items()
        if tensor.ndim
    }
    assert learner.save(given, background=True)
    learner.wait_written()
    return tensors, {name: value.numpy() for name, value in learner.weights().items()}


def test_other_ranks_go_on_from_a_checkpoint(tiny_experts, batch, tmp_path):
    """One rank, then two and four that divide the experts, then one: weights, moments and average go with them."""
    from safetensors.numpy import load_file

    divided = {"expert_parallel": 2}
    chains = {"fixed": [(1, {})] * 4, "elastic": [(1, {}), (2, divided), (4, divided), (1, {})]}
    last: dict[str, dict[str, np.ndarray]] = {}
    for chain, sizes in chains.items():
        taken = None
        for number, (ranks, changes) in enumerate(sizes):
            given = tmp_path / f"{chain}-{number}"
            changes = changes | {"ema_decay": 0.5}
            options = {"batch": batch, "taken": taken, "given": given}
            results = run(save_and_learn, tiny_experts, tmp_path, ranks, changes=changes, **options)
            assert not isinstance(results[0], Exception), results[0]
            taken, last[chain] = given, results[0][0]
            saved = load_file(given / "model.safetensors")
            averages = {name.partition("/")[2]: value for name, value in last[chain].items() if "average/" in name}
            assert len(saved) > len(averages), "experts are saved one by one"
            for name, value in averages.items():
                if ".experts.down_proj" in name:
                    one = [saved[name.replace("down_proj", f"{expert}.down_proj.weight")] for expert in range(8)]
                    np.testing.assert_array_equal(np.stack(one), value)
    for key, value in last["fixed"].items():
        np.testing.assert_allclose(last["elastic"][key], value, atol=2e-6, rtol=0, err_msg=key)


def publish(learner: LearnerRank, rank: int, into: Path, full: bool = False) -> tuple:
    """Publish as the learner's actors do. `full`: rank 1 finds the folder full at the first time."""
    store, ranks = FolderStore(into), learner.writers
    assert ranks is not None
    assert all_see(into, ranks)
    failures, stored, copied = [], None, []
    for step in (1, 2) if full else (1,):
        if full and rank == 1 and step == 1:
            write_share, shared_writing.write_share = shared_writing.write_share, _full
        stream, samples = learner.published(PROBE, own_experts=True)
        together = SharedWriting(_noting(stream, copied), samples, store.of_piece, ranks)
        try:
            if rank == 0:
                stored = store.put("run", 1, step, together._stream, together)
        except StoreFull as error:
            failures.append(str(error))
        finally:
            together.end()
        if full and rank == 1 and step == 1:
            shared_writing.write_share = write_share
    return stored, samples, copied, failures, {name: value.numpy() for name, value in learner.weights().items()}


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def _noting(stream: TensorStream, names: list[str]) -> TensorStream:
    def noted() -> Any:
        for name, tensor in stream.tensors:
            names.append(name)
            yield name, tensor

    return TensorStream(stream.layout, noted())


@pytest.mark.parametrize(("ranks", "changes"), [(2, {}), (4, {}), (4, {"shard_ranks": 2})], ids=["2", "4", "copies"])
def test_each_rank_publishes_its_own_experts(tiny_experts, tmp_path, ranks, changes):
    folder = tmp_path / "store"
    changes = changes | {"expert_parallel": 2}
    first, *others = run(publish, tiny_experts, tmp_path, ranks, changes=changes, into=folder)
    assert not isinstance(first, Exception), first
    stored, samples, names, _, weights = first
    published = dict(FolderStore(folder).read(stored.location))
    assert published.keys() == weights.keys() == samples.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(published[name].numpy(), value, err_msg=name)
        assert samples[name] == weight_sample(torch.from_numpy(value), PROBE, torch.float32)
    assert digest_of(published.items()) == stored.version.digest
    assert known_hashes(Path(stored.location), stored.version.digest).keys() == weights.keys()
    # Two layers of eight experts, of three matrices each; a second copy writes nothing.
    writers = 2 if changes.get("shard_ranks") else ranks
    per_rank = [sum(".experts." in name for name in each[2]) for each in (first, *others)]
    assert per_rank == [48 // writers] * writers + [0] * (ranks - writers)
    assert all(".experts." in name for each in others for name in each[2])
    assert len(names) == len(weights) - 48 + 48 // writers


def test_a_rank_that_cannot_write_its_experts_is_an_error_of_the_version(tiny_experts, tmp_path):
    options = {"into": tmp_path / "store", "full": True}
    first, second = run(publish, tiny_experts, tmp_path, 2, changes={"expert_parallel": 2}, **options)
    assert not isinstance(first, Exception), first
    assert "does not fit" in first[3][0]
    assert second[3] == []
    assert [version.step for version in FolderStore(tmp_path / "store").versions()] == [2], "the next one is whole"
    assert dict(FolderStore(tmp_path / "store").read(first[0].location)).keys() == first[4].keys()


def _refusal(rendezvous: Path, rank: int, ranks: int, model: str, number: int, queue: Any) -> None:
    try:
        make_rank(model, rendezvous, rank, ranks, expert_parallel=number).close()
        queue.put((rank, "started"))
    except InputError as error:
        queue.put((rank, str(error)))


def test_a_number_that_does_not_divide_the_experts_is_refused(tiny_model, tiny_experts, tmp_path):
    for error in run_processes(_refusal, tmp_path, 3, tiny_experts, 3):
        assert "learner.expert_parallel" in error
        assert "does not divide the 8 experts" in error
    for error in run_processes(_refusal, tmp_path, 2, tiny_model, 2):
        assert "no plan to send tokens to the experts" in error
