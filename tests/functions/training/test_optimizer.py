"""AdamW over shards, its learning rate, and the moving average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from fakes.tiny_learner import (
    make_batch,
    make_pairs,
    make_rank,
    make_supervised,
    plain_adamw,
    run_learner,
    run_supervised,
)
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes, learning_rate
from rlhfless.algorithms.supervised import pack_examples
from rlhfless.functions.training.optimizer import ShardedAdamW, WeightAverage
from rlhfless.spec import AdamWSpec


def rates(planned: int, **settings: object) -> list[float]:
    spec = AdamWSpec(learning_rate=1.0, **settings)
    return [learning_rate(spec, update, planned) for update in range(1, planned + 3)]


def test_learning_rates_by_hand() -> None:
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert rates(4, rate_schedule="linear") == [1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(4, rate_schedule="linear", warmup_steps=2, rate_floor=0.2) == pytest.approx([0.5, 1, 1, 0.6, 0.2, 0.2])
    cosine = rates(4, rate_schedule="cosine", rate_floor=0.5)
    half = np.sqrt(0.5)
    assert cosine == pytest.approx([1, 0.75 + 0.25 * half, 0.75, 0.75 - 0.25 * half, 0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_learning_rates_fall_as_those_of_transformers(name, theirs) -> None:
    """After the warm-up, whose first update is 0 there."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = theirs(optimizer, 5, 40)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(40, rate_schedule=name, warmup_steps=5)[5:40] == pytest.approx(expected[5:], abs=1e-12)


def made() -> tuple[torch.nn.Module, ShardedAdamW]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    return model, ShardedAdamW(model, AdamWSpec(learning_rate=0.5, weight_decay=0.2))


def test_weight_decay_is_for_matrices_alone() -> None:
    model, optimizer = made()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert optimizer.step(norm=0.0, planned=1) == 0.5
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.2 if parameter.ndim > 1 else 1)
        torch.testing.assert_close(parameter.detach(), expected)


def test_groups_are_those_of_a_plain_optimizer() -> None:
    model, optimizer = made()
    groups, plain = optimizer._adamw.param_groups, plain_adamw(model, optimizer._spec).param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(p) for p in g["params"]] for g in plain]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]


DECAY = 0.75


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def test_the_average_of_three_weights_by_hand() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    average = WeightAverage(model, DECAY)
    for value in (4.0, 8.0):
        torch.nn.init.constant_(model.weight, value)
        average.update()
    # 0, then 0.25 x 4 = 1, then 0.75 x 1 + 0.25 x 8 = 2.75.
    assert average.tensors["weight"].tolist() == [[2.75, 2.75]]
    with average.in_place():
        assert model.weight.tolist() == [[2.75, 2.75]]
        assert average.tensors["weight"].tolist() == [[8.0, 8.0]]
    assert model.weight.tolist() == [[8.0, 8.0]]


def follow(rank: Any, _: int, batch: PackedBatch) -> dict[str, Any]:
    """What a rank has after each of three steps, and what it evaluates to with its average and without."""
    before = arrays(rank.weights())
    steps = []
    for step in range(3):
        rank.learn(batch, Passes(1, seed=(0, step)))
        steps.append(arrays(rank.weights()))
    with rank.averaged():
        average = arrays(rank.weights())
    after = arrays(rank.weights())
    return {"before": before, "steps": steps, "average": average, "after": after, "evaluated": rank.evaluate(batch)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_follow_their_own_weights_and_learn_as_without(tiny_model: str, tmp_path: Path, ranks: int) -> None:
    batch = pack_examples(make_pairs()).with_columns()
    batch = batch.with_columns(reference_logprobs=-2.0 * batch.response_mask)
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    found = run_supervised(follow, tiny_model, tmp_path / "with", ranks, batch=batch, changes={"ema_decay": DECAY})[0]
    without = run_supervised(follow, tiny_model, tmp_path / "without", ranks, batch=batch, changes={})[0]
    for name, value in found["before"].items():
        expected = value.astype(np.float64)
        for weights, same in zip(found["steps"], without["steps"], strict=True):
            assert np.array_equal(weights[name], same[name]), "it changes nothing of what is learned"
            expected = DECAY * expected + (1 - DECAY) * weights[name]
        np.testing.assert_allclose(found["average"][name], expected, atol=1e-6, err_msg=name)
        assert np.array_equal(found["after"][name], found["steps"][-1][name]), "and the weights come back"
    assert np.array_equal(without["average"]["model.norm.weight"], without["after"]["model.norm.weight"])
    assert not np.allclose(found["evaluated"], without["evaluated"], atol=1e-5), "a supervised run evaluates it"


def saved_and_on(tiny_model: str, folder: Path, batch: PackedBatch, *, stops: bool) -> tuple[Any, Any]:
    """Weights and average after two steps, between which the rank may be saved and restored."""
    folder.mkdir()
    rank = make_supervised(tiny_model, folder / "a", run_type="sft", ema_decay=DECAY)
    rank.learn(batch, Passes(2, seed=(0, 1)))
    if stops:
        rank.save(folder / "saved")
        rank.close()
        rank = make_supervised(tiny_model, folder / "b", run_type="sft", ema_decay=DECAY)
        rank.restore(folder / "saved")
    rank.learn(batch, Passes(2, seed=(0, 2)))
    try:
        with rank.averaged():
            average = arrays(rank.weights())
        return arrays(rank.weights()), average
    finally:
        rank.close()


def test_a_resumed_average_is_that_of_an_unbroken_run_bit_for_bit(tiny_model: str, tmp_path: Path) -> None:
    batch = pack_examples(make_pairs())
    unbroken = saved_and_on(tiny_model, tmp_path / "one", batch, stops=False)
    resumed = saved_and_on(tiny_model, tmp_path / "two", batch, stops=True)
    for ours, expected in zip(resumed, unbroken, strict=True):
        assert all(np.array_equal(ours[name], value) for name, value in expected.items())


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_has_the_average_as_its_model(tiny_model: str, tmp_path: Path, *, background: bool) -> None:
    batch = pack_examples(make_pairs())
    rank = make_supervised(tiny_model, tmp_path / "r", run_type="sft", ema_decay=DECAY)
    try:
        rank.learn(batch, Passes(2))
        assert rank.save(tmp_path / "saved", background=background) is background
        rank.wait_written()
        evaluated = rank.evaluate(batch)
        with rank.averaged():
            average = rank.weights()
        learned = rank.weights()
    finally:
        rank.close()
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    assert all(torch.equal(saved[name], value) for name, value in average.items())
    assert not all(torch.equal(saved[name], value) for name, value in learned.items())
    again = make_supervised(str(tmp_path / "saved"), tmp_path / "s", run_type="sft")
    try:
        np.testing.assert_array_equal(again.evaluate(batch), evaluated)
    finally:
        again.close()


def published(rank: Any, _: int, batch: PackedBatch, probe: tuple[int, ...]) -> dict[str, Any]:
    rank.learn(batch, Passes(2))
    found: dict[str, Any] = {"weights": arrays(rank.weights())}
    with rank.averaged():
        stream, _ = rank.published(probe)
        found["stream"] = {name: tensor.numpy().copy() for name, tensor in stream.tensors}
        found["probe"] = rank.probe_logprobs(probe)
    found["after"], found["probe_after"] = arrays(rank.weights()), rank.probe_logprobs(probe)
    return found


def test_the_average_is_published_with_its_own_probe(tiny_model: str, tmp_path: Path) -> None:
    batch, probe = make_batch(), (1, 7, 3, 22, 9)
    found = run_learner(published, tiny_model, tmp_path, 2, batch=batch, probe=probe, changes={"ema_decay": DECAY})
    first = found[0]
    assert not found[1]["stream"], "the first rank writes it"
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    moved, of_average = (np.abs(first[key][name] - start[name].detach().numpy()).max() for key in ("weights", "stream"))
    assert 0 < of_average < moved, "the average lags behind"
    assert all(np.array_equal(first["after"][key], value) for key, value in first["weights"].items())
    assert first["probe"] != first["probe_after"]
    alone = make_rank(tiny_model, tmp_path / "alone")
    try:
        with torch.no_grad():
            for key, parameter in alone._model.named_parameters():
                parameter.to_local().copy_(torch.from_numpy(first["stream"][key]))
        assert alone.probe_logprobs(probe) == pytest.approx(first["probe"], abs=1e-5)
    finally:
        alone.close()
