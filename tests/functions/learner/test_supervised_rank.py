"""Ranks that learn from written responses: the step that a plain loop takes, however it is cut and shared out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fakes.tiny_learner import make_pairs, make_supervised, run_supervised
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.supervised import pack_examples
from rlhfless.records.rollouts import Example
from rlhfless.spec import AdamWSpec, DPOSpec

PLAIN = AdamWSpec(learning_rate=0.5, eps=1.0, weight_decay=0.0, max_grad_norm=0.3)
"""SGD-like: with the usual eps, AdamW turns the sign of a gradient of 1e-9 into a step of its own."""

PASSES = Passes(2, epochs=2, seed=(3,))
BETA = 0.4


def batch_for(run_type: str) -> PackedBatch:
    """For a reward model, a token that stands for the score follows each sequence."""
    examples = make_pairs()
    if run_type == "sft":
        examples = [
            Example(e.prompt_id, e.token_ids, "", {}, "", e.sequences[:1], e.learned_from[:1]) for e in examples
        ]
    if run_type == "reward_model":
        examples = [
            Example(
                e.prompt_id, e.token_ids, "", {}, "", tuple((*s, 0) for s in e.sequences), tuple(map(len, e.sequences))
            )
            for e in examples
        ]
    batch = pack_examples(examples)
    random = np.random.default_rng(0).random(len(batch.tokens))
    return batch.with_columns(reference_logprobs=-4 * random * batch.response_mask) if run_type == "dpo" else batch


def outputs_of(model: Any, run_type: str, batch: PackedBatch, index: int) -> tuple[torch.Tensor, PackedBatch]:
    """What a model of transformers gives for the learned tokens of one sequence, and that sequence."""
    one = select(batch, np.array([index]))
    tokens, mask = torch.tensor(one.tokens), torch.tensor(one.response_mask[1:])
    if run_type == "reward_model":
        hidden = model.model(input_ids=tokens[None]).last_hidden_state[0]
        return model.score(hidden)[:-1, 0][mask], one
    logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None]).squeeze(1)[mask], one


def plain_model(run_type: str, path: str) -> Any:
    if run_type != "reward_model":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    return model


def plain_loss(model: Any, run_type: str, part: PackedBatch) -> torch.Tensor:
    """The loss of a mini-batch by the formula, a sequence at a time."""
    given = [outputs_of(model, run_type, part, index) for index in range(part.sequences)]
    if run_type == "sft":
        return -sum(values.sum() for values, _ in given) / part.response_mask.sum()
    rewards = [values.sum() for values, _ in given]
    if run_type == "dpo":
        references = [one.reference_logprobs[one.response_mask].sum() for _, one in given]
        rewards = [BETA * (reward - float(of)) for reward, of in zip(rewards, references, strict=True)]
    losses = [-(a - b).sigmoid().log() for a, b in zip(rewards[0::2], rewards[1::2], strict=True)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("run_type", ["sft", "dpo", "reward_model"])
def test_a_step_is_that_of_a_plain_loop(tiny_model: str, tmp_path: Any, run_type: str) -> None:
    batch = batch_for(run_type)
    rank = make_supervised(
        tiny_model, tmp_path / "r", run_type=run_type, dpo=DPOSpec(beta=BETA), optimizer=PLAIN, micro_batch_tokens=64
    )
    try:
        metrics, ours = rank.learn(batch, PASSES), rank.weights()
        after = rank.evaluate(batch)
    finally:
        rank.close()
    model = plain_model(run_type, tiny_model)
    adamw = torch.optim.AdamW(model.parameters(), PLAIN.learning_rate, PLAIN.betas, PLAIN.eps, PLAIN.weight_decay)
    losses, weights = [], []
    for part in PASSES.over(batch):
        loss = plain_loss(model, run_type, part)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), PLAIN.max_grad_norm)
        adamw.step()
        losses.append(loss.item())
        weights.append(part.denominators.tokens if run_type == "sft" else part.denominators.groups)
    assert metrics["loss"] == pytest.approx(np.average(losses, weights=weights), abs=1e-5)
    expected = dict(model.named_parameters())
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name].detach(), atol=1e-6, rtol=0, msg=name)
    given = torch.cat([outputs_of(model, run_type, batch, index)[0] for index in range(batch.sequences)])
    np.testing.assert_allclose(after[batch.response_mask], given.detach().numpy(), atol=1e-4)
    assert not after[~batch.response_mask].any()


@pytest.mark.parametrize("change", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 500, "share_prefixes": False}])
def test_how_pairs_are_cut_does_not_matter(tiny_model: str, tmp_path: Any, change: dict[str, Any]) -> None:
    results = []
    for number, changes in enumerate(({"micro_batch_tokens": 500}, change)):
        rank = make_supervised(tiny_model, tmp_path / f"r{number}", optimizer=PLAIN, **changes)
        try:
            metrics = rank.learn(batch_for("dpo"), Passes(1))
            results.append((metrics, rank.weights(), rank.shared_prompt_tokens))
        finally:
            rank.close()
    (metrics, weights, shared), (other_metrics, other_weights, other_shared) = results
    assert shared > 0, "the two sequences of a pair have a prompt in common, which is computed once"
    assert other_shared == (shared if change.get("share_prefixes", True) else 0)
    assert other_metrics == pytest.approx(metrics, abs=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(other_weights[name], value, atol=1e-6, rtol=0, msg=name)


def learn(rank: Any, _: int, batch: PackedBatch) -> tuple:
    return rank.learn(batch, Passes(2)), {name: value.numpy() for name, value in rank.weights().items()}


@pytest.mark.parametrize("run_type", ["sft", "dpo", "reward_model"])
def test_two_ranks_are_one(tiny_model: str, tmp_path: Any, run_type: str) -> None:
    given = {"batch": batch_for(run_type), "changes": {"run_type": run_type}}
    ((metrics, weights),) = run_supervised(learn, tiny_model, tmp_path, 1, **given)
    for their_metrics, their_weights in run_supervised(learn, tiny_model, tmp_path, 2, **given):
        assert their_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=1e-6, err_msg=name)


def test_a_rank_goes_on_from_its_checkpoint_bit_for_bit(tiny_model: str, tmp_path: Any) -> None:
    batch, ends = batch_for("reward_model"), []
    for stops in (False, True):
        rank = make_supervised(tiny_model, tmp_path / f"a{stops}", run_type="reward_model")
        rank.learn(batch, Passes(2, seed=(0, 1)))
        if stops:
            rank.save(tmp_path / "saved")
            rank.close()
            rank = make_supervised(tiny_model, tmp_path / "again", run_type="reward_model")
            rank.restore(tmp_path / "saved")
        rank.learn(batch, Passes(2, seed=(0, 2)))
        ends.append(rank.weights())
        rank.close()
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert saved.config.num_labels == 1, "as a reward model is loaded"
