"""The critic's ranks: values that transformers gives, too, and the step that a plain training loop takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fakes.tiny_learner import make_critic, plain_adamw, run_critic, save_tiny_critic, with_values
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.training.critic import CriticRank
from rlhfless.spec import AdamWSpec, PPOSpec
from rlhfless.spec.errors import InputError

LARGE = AdamWSpec(learning_rate=0.5, eps=1.0, max_grad_norm=0.3)
"""SGD-like: with the usual eps, AdamW turns the sign of a gradient of 1e-9 into a step of its own."""


@pytest.fixture(scope="module")
def tiny_critic(tiny_model, tmp_path_factory) -> str:
    return save_tiny_critic(tiny_model, tmp_path_factory.mktemp("models") / "critic")


@pytest.fixture
def critic(tiny_critic, tiny_model, tmp_path) -> Any:
    """`with critic(**changes) as rank`: a critic of one rank."""
    count = 0

    @contextmanager
    def start(model: str = tiny_critic, **changes: Any) -> Iterator[CriticRank]:
        nonlocal count
        count += 1
        rank = make_critic(model, tmp_path / f"rendezvous{count}", tokenizer=tiny_model, **changes)
        try:
            yield rank
        finally:
            rank.close()

    return start


def plain_values(model: Any, batch: PackedBatch) -> list[torch.Tensor]:
    """The values of each sequence's tokens but the first, by transformers, a sequence at a time."""
    values = []
    for index in range(batch.sequences):
        tokens = torch.tensor(select(batch, np.array([index])).tokens)
        hidden = model.model(input_ids=tokens[None]).last_hidden_state[0]
        values.append(model.score(hidden)[:-1, 0])
    return values


def test_a_value_is_of_the_tokens_before_it(critic, tiny_critic, batch):
    with critic(micro_batch_tokens=64) as rank:
        ours, _ = rank.compute(batch)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_critic, dtype=torch.float32)
    for index, expected in enumerate(plain_values(model, batch)):
        first, length = batch.starts[index], batch.lengths[index]
        mask = batch.response_mask[first + 1 : first + length]
        np.testing.assert_allclose(
            ours[first + 1 : first + length][mask], expected.detach().numpy()[mask], atol=1e-5, err_msg=str(index)
        )
    assert np.abs(ours[batch.response_mask]).max() > 0.1, "values of 0 would prove nothing"
    assert not ours[~batch.response_mask].any()


def test_the_values_of_a_group_do_not_depend_on_what_came_with_it(critic, batch):
    with critic(micro_batch_tokens=64) as rank:
        together, _ = rank.compute(batch)
        for group in range(6):
            sequences = np.flatnonzero(batch.sequence_groups == group)
            alone, _ = rank.compute(select(batch, sequences))
            assert np.array_equal(alone, together[np.isin(batch.sequence_id, sequences)]), group


def test_a_critic_that_starts_from_the_policy_says_0_and_learns(critic, tiny_model, batch):
    with critic(tiny_model, new_head=True, optimizer=AdamWSpec(learning_rate=1e-2)) as rank:
        before, _ = rank.compute(batch)
        assert not before.any()
        goal = batch.with_columns(values=before, returns=np.ones(len(batch.tokens)))
        first = rank.learn(goal, Passes())
        for _ in range(19):
            last = rank.learn(goal, Passes())
    assert first["value_loss"] == pytest.approx(0.5)
    assert last["value_loss"] < 0.4, "the clip holds values at 0.2 of where they were: 0.5 * 0.8 ** 2 = 0.32"
    assert "explained_variance" not in first, "returns that are all equal have no variance to explain"


def test_a_step_of_two_mini_batches_is_that_of_a_plain_loop(critic, tiny_critic, batch):
    given = with_values(batch)
    with critic(optimizer=LARGE, micro_batch_tokens=64) as rank:
        metrics = rank.learn(given, Passes(2))
        ours = rank.weights()
    model = AutoModelForSequenceClassification.from_pretrained(tiny_critic, dtype=torch.float32)
    adamw = plain_adamw(model, LARGE)
    clip, losses, norms = PPOSpec().value_clip, [], []
    for part in Passes(2).over(given):
        loss = torch.zeros(())
        for index, values in enumerate(plain_values(model, part)):
            one = select(part, np.array([index]))
            old, goal = (torch.tensor(column[1:]) for column in (one.values, one.returns))
            near = torch.minimum(torch.maximum(values, old - clip), old + clip)
            squares = torch.maximum((values - goal) ** 2, (near - goal) ** 2) * torch.tensor(one.response_mask[1:])
            loss = loss + 0.5 * squares.sum() / int(part.response_mask.sum())
        adamw.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE.max_grad_norm)))
        adamw.step()
    tokens = [part.denominators.tokens for part in Passes(2).over(given)]
    assert metrics["value_loss"] == pytest.approx(np.average(losses, weights=tokens), rel=1e-5)
    assert metrics["critic_gradient_norm"] == pytest.approx(np.average(norms, weights=tokens), rel=1e-4)
    assert metrics["critic_learning_rate"] == LARGE.learning_rate
    assert metrics["critic_skipped_updates"] == 0
    assert 0 < metrics["value_clipped"] < 1
    assert ours.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), atol=1e-6, rtol=0, msg=name)


def test_the_explained_variance_is_of_the_values_before_the_step(critic, batch):
    given = with_values(batch)
    with critic() as rank:
        metrics = rank.learn(given, Passes(2))
    values, returns = (column[given.response_mask].astype(np.float64) for column in (given.values, given.returns))
    assert metrics["explained_variance"] == pytest.approx(1 - (returns - values).var() / returns.var(), rel=1e-5)


def compute_and_learn(rank: CriticRank, _: int, batch: PackedBatch, count: int) -> tuple:
    values, _ = rank.compute(batch)
    metrics = rank.learn(batch.with_columns(values=values), Passes(count))
    return values, metrics, {name: value.numpy() for name, value in rank.weights().items()}


@pytest.mark.parametrize(("sequences", "count"), [(24, 2), (1, 1)], ids=["all", "fewer than ranks"])
def test_two_ranks_are_one(tiny_critic, batch, tmp_path, sequences, count):
    given = {"batch": select(with_values(batch), np.arange(sequences)), "count": count}
    given |= {"changes": {"micro_batch_tokens": 64}}
    ((values, metrics, weights),) = run_critic(compute_and_learn, tiny_critic, tmp_path, 1, **given)
    for their_values, their_metrics, their_weights in run_critic(compute_and_learn, tiny_critic, tmp_path, 2, **given):
        assert np.array_equal(their_values, values), "each group is computed by itself, on whichever rank"
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)


def test_it_goes_on_from_a_checkpoint_bit_for_bit(critic, batch, tmp_path):
    given, folder = with_values(batch), tmp_path / "step-000001"
    with critic(optimizer=LARGE) as rank:
        rank.learn(given, Passes(2))
        rank.save(folder)
        rank.learn(given, Passes(2))
        expected, values = rank.weights(), rank.compute(batch)[0]
    with critic(optimizer=LARGE) as rank:
        rank.restore(folder)
        rank.learn(given, Passes(2))
        assert all(torch.equal(expected[name], value) for name, value in rank.weights().items())
        assert np.array_equal(rank.compute(batch)[0], values)


def test_its_checkpoint_is_a_model_that_a_critic_starts_from(critic, batch, tmp_path):
    folder = tmp_path / "step-000001"
    with critic(optimizer=LARGE) as rank:
        rank.learn(with_values(batch), Passes())
        rank.save(folder)
        expected, _ = rank.compute(batch)
    with critic(str(folder)) as rank:
        assert np.array_equal(rank.compute(batch)[0], expected)


@pytest.mark.parametrize(
    ("labels", "what"), [(0, r"the checkpoint lacks tensor 'score\.weight'"), (3, r"3 labels; a critic has one")]
)
def test_a_model_without_a_head_of_one_output_is_refused(tiny_model, tmp_path, labels, what):
    model = save_tiny_critic(tiny_model, tmp_path / "model", labels) if labels else tiny_model
    try:
        with pytest.raises(InputError, match=r"critic\.model: .*" + what):
            make_critic(model, tmp_path / "rendezvous")
    finally:
        torch.distributed.destroy_process_group()
