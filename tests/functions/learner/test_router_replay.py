"""Replayed routes: whose experts compute a token, what that changes, and what it must not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from fakes.tiny_learner import make_batch, run_learner, save_tiny_experts
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.algorithms.passes import Passes
from rlhfless.functions import sharding
from rlhfless.functions.batching import cut
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.policy import logprob_outputs, recorded_outputs
from rlhfless.records.routes import Rows, stored, write_routes
from rlhfless.spec import AdamWSpec, GRPOSpec

STEP = AdamWSpec(learning_rate=0.1, eps=1.0)
ENGINE, RECORDED = GRPOSpec(router_replay="engine"), GRPOSpec(router_replay="recorded")


def own_routes(rank: LearnerRank, batch: PackedBatch, tokens: int = 64) -> Rows:
    """Return the routes of all fed tokens that the rank's routers choose, `[tokens, layers, k]`."""
    outputs = logprob_outputs(rank._policy, 0.8)
    return recorded_outputs(rank._policy, batch, outputs, cut(batch, tokens, packing=rank._policy.packing).parts)[1]


def with_routes(batch: PackedBatch, rows: Rows, folder: Path, experts: int = 8) -> PackedBatch:
    """Return a batch whose generated tokens have the routes `rows` [tokens, layers, k], one file per sequence."""
    file, row, names = np.zeros_like(batch.tokens), np.zeros_like(batch.tokens), []
    for sequence in range(batch.sequences):
        generated = np.flatnonzero((batch.sequence_id == sequence) & batch.response_mask)
        names.append(f"step-000001/{sequence}.npy")
        write_routes(folder / names[-1], stored(rows[generated], experts))
        file[generated], row[generated] = len(names), 1 + np.arange(len(generated))
    return dataclasses.replace(batch, route_file=file, route_row=row, route_files=tuple(names))


def shifted(rows: Rows, experts: int = 8) -> Rows:
    """Return routes of which each names other experts, all different."""
    return np.where(rows < 0, -1, (rows + 3) % experts).astype(np.int16)


def learned(rank: LearnerRank, batch: PackedBatch, passes: Passes = Passes()) -> tuple:  # noqa: B008
    old = rank.evaluate(batch)
    metrics = rank.learn(batch.with_columns(old_logprobs=old) if passes.updates > 1 else batch, passes)
    return old, metrics, rank.weights()


CHANGES = [{}, {"share_prefixes": False}, {"gradient_checkpointing": True}, {"micro_batch_tokens": 30}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_routers_own_routes_change_nothing_to_the_last_bit(tiny_experts, learner, shared_batch, tmp_path, changes):
    options = {"optimizer": STEP, "micro_batch_tokens": 300} | changes
    with learner(tiny_experts, **options) as rank:
        rows = own_routes(rank, shared_batch, 300)
        expected = learned(rank, shared_batch)
    assert "differing_routes" not in expected[1]
    given = with_routes(shared_batch, rows[..., ::-1], tmp_path)  # in another order
    with learner(tiny_experts, algorithm=ENGINE, routes_folder=str(tmp_path), **options) as rank:
        old, metrics, weights = learned(rank, given)
    np.testing.assert_array_equal(old, expected[0])
    assert all(torch.equal(weights[name], value) for name, value in expected[2].items())
    assert metrics["differing_routes"] == 0
    # The last token of a response is fed to no pass, and every other one has a route.
    assert metrics["missing_routes"] == 0
    assert {name: metrics[name] for name in expected[1]} == expected[1]


@contextmanager
def forced(routes: Callable[[], Iterator[Any]]) -> Iterator[None]:
    """Make transformers' router take given experts `[tokens, k]`, -1 for its own, one call after the other."""
    kind = modeling_qwen3_moe.Qwen3MoeTopKRouter
    own, given = kind.forward, routes()

    def forward(self: Any, hidden: torch.Tensor) -> tuple:
        logits, _, indices = own(self, hidden)
        experts = torch.as_tensor(next(given)).long()
        indices = torch.where(experts < 0, indices, experts)
        scores = logits.softmax(-1, dtype=torch.float32).gather(-1, indices)
        return logits, scores / scores.sum(-1, keepdim=True), indices

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = own


def plain(model: str, batch: PackedBatch, rows: Rows, advantages: bool = True) -> tuple[np.ndarray, dict]:
    """Return the logprobs of generated tokens and the gradient of their weighted mean, a sequence at a time."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    logprobs, loss = np.zeros(len(batch.tokens)), torch.zeros(())
    for sequence in range(batch.sequences):
        of = batch.sequence_id == sequence
        tokens, mask = torch.tensor(batch.tokens[of]), torch.tensor(batch.response_mask[of])
        given = np.where(batch.response_mask[of][:, None, None], rows[of], -1)
        with forced(lambda given=given: (given[:, layer] for layer in range(rows.shape[1]))):
            logits = network(input_ids=tokens[None]).logits[0, :-1] / 0.8
        values = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        logprobs[np.flatnonzero(of)[1:]] = np.where(mask[1:], values.detach(), 0)
        if advantages:
            weight = torch.tensor(batch.advantages[of][1:]) * mask[1:]
            loss = loss - (weight * (values - values.detach()).exp()).sum() / batch.denominators.tokens
    if advantages:
        loss.backward()
    return logprobs, {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_routes_are_those_of_a_plain_loop(tiny_experts, learner, batch, tmp_path, checkpointing):
    """Scores come from the live routers, so these have a gradient."""
    batch = select(batch, np.arange(6))
    algorithm = ENGINE.model_copy(update={"importance": None})
    options = {"optimizer": STEP, "gradient_checkpointing": checkpointing, "routes_folder": str(tmp_path)}
    with learner(tiny_experts, algorithm=algorithm, **options) as rank:
        own = own_routes(rank, batch)
        rows = shifted(own)
        given = with_routes(batch, rows, tmp_path)
        gradients = kept_gradients(rank)
        old, metrics, _ = learned(rank, given)
    expected, gradient = plain(tiny_experts, batch, rows)
    np.testing.assert_allclose(old, expected, atol=1e-5, rtol=0)
    without, _ = plain(tiny_experts, batch, np.full_like(rows, -1), advantages=False)
    assert np.abs(old - without).max() > 0.1, "other experts must matter, or this says nothing"
    for name, value in gradients.items():
        torch.testing.assert_close(value, gradient[name], atol=1e-6, rtol=1e-4, msg=name)
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 1e-4
    # Other experts in the first layer may lead to the given ones in the second.
    assert 0.9 < metrics["differing_routes"] <= 1
    assert metrics["missing_routes"] == 0


def kept_gradients(rank: LearnerRank) -> dict[str, torch.Tensor]:
    """Return a mapping that the rank's next update fills with its gradient."""
    kept: dict[str, torch.Tensor] = {}
    norm_of = rank._optimizer.gradient_norm

    def keeping() -> float:
        for name, parameter in rank._model.named_parameters():
            kept.setdefault(name, sharding.whole(parameter.grad, torch.device("cpu")).clone())
        return norm_of()

    rank._optimizer.gradient_norm = keeping  # type: ignore[method-assign]
    return kept


def test_routes_that_cannot_be_replayed_fall_back_token_by_token(tiny_experts, learner, batch, tmp_path, caplog):
    """Experts named twice, out of range or unknown, rows that a file lacks, and a file that is gone."""
    batch = select(batch, np.arange(8))
    with learner(tiny_experts, algorithm=ENGINE, routes_folder=str(tmp_path)) as rank:
        own = own_routes(rank, batch)
        rows = shifted(own)
        generated = np.flatnonzero(batch.response_mask)
        rows[generated[0], 0] = rows[generated[0], 0, 0]  # twice
        rows[generated[1], 1, 0] = 9
        rows[generated[2]] = -1
        given = with_routes(batch, rows, tmp_path)
        last = batch.sequences - 1
        (tmp_path / given.route_files[last]).unlink()
        ours = rank.evaluate(given)
        metrics = rank.learn(given, Passes())
        broken = dataclasses.replace(given, route_row=np.where(given.route_row > 0, given.route_row + 1000, 0))
        native = rank.evaluate(dataclasses.replace(batch, route_file=None))
        np.testing.assert_array_equal(rank.evaluate(broken), native)
    usable = rows.copy()
    usable[generated[0], 0], usable[generated[1], 1] = -1, -1
    usable[batch.sequence_id == last] = -1
    expected, _ = plain(tiny_experts, batch, usable, advantages=False)
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)
    fed = batch.response_mask & (batch.positions < batch.lengths[batch.sequence_id] - 1)
    missing = 1 + (fed & (batch.sequence_id == last)).sum()
    assert metrics["missing_routes"] == pytest.approx(missing / fed.sum())
    assert 0.9 < metrics["differing_routes"] <= 1
    assert "routes in" in caplog.text
    assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize("passes", [Passes(3), Passes(2, epochs=2, seed=(7, 3))])
def test_recorded_routes_are_those_before_the_first_update(tiny_experts, learner, batch, passes):
    """Updates move the routers far; with the recorded routes, the experts of a token stay."""
    options = {"optimizer": AdamWSpec(learning_rate=0.5, eps=1.0), "micro_batch_tokens": 64}
    with learner(tiny_experts, algorithm=RECORDED, **options) as rank:
        rows = own_routes(rank, batch)
        seen: list[tuple[PackedBatch, Rows]] = []
        routed = rank._policy.routers.routed

        def noting(part: PackedBatch, place: Any, positions: int, device: torch.device) -> Any:
            result = routed(part, place, positions, device)
            if torch.is_grad_enabled() and result.rows is not None:
                seen.append((part, result.rows.numpy()[place]))
            return result

        rank._policy.routers.routed = noting  # type: ignore[method-assign]
        metrics = rank.learn(batch, passes)
        assert rank._policy.routers.source is None
    with learner(tiny_experts, **options) as rank:
        without = rank.learn(batch, passes)
    assert metrics["differing_routes"] > 0.01
    assert metrics["missing_routes"] == 0
    assert metrics["old_kl"] < without["old_kl"]
    by_tokens = {tuple(batch.tokens[batch.sequence_id == each]): each for each in range(batch.sequences)}
    assert seen
    for part, found in seen:
        fed = part.positions < part.lengths[part.sequence_id] - 1
        for sequence in range(part.sequences):
            whole = by_tokens[tuple(part.tokens[part.sequence_id == sequence])]
            expected = rows[batch.sequence_id == whole][:-1]
            np.testing.assert_array_equal(found[part.sequence_id[fed] == sequence], expected)


def test_one_update_needs_no_recorded_routes(tiny_experts, learner, batch):
    results = []
    for algorithm in (GRPOSpec(), RECORDED):
        with learner(tiny_experts, optimizer=STEP, algorithm=algorithm) as rank:
            results.append((rank.learn(batch, Passes()), rank.weights()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], value) for name, value in results[1][1].items())


def replayed(rank: LearnerRank, _: int, batch: PackedBatch) -> tuple:
    old, metrics, weights = learned(rank, batch, Passes(2))
    return old, metrics, {name: value.numpy() for name, value in weights.items()}


@pytest.mark.timeout(300)
def test_ranks_that_divide_the_experts_replay_as_one(tiny_experts, learner, tmp_path):
    batch = make_batch()
    with learner(tiny_experts) as rank:
        rows = shifted(own_routes(rank, batch))
    rows[::3] = -1
    options = {"batch": with_routes(batch, rows, tmp_path)}
    changes = {"algorithm": ENGINE, "routes_folder": str(tmp_path)}
    (expected,) = run_learner(replayed, tiny_experts, tmp_path, 1, changes=changes, **options)
    changes |= {"expert_parallel": 2}
    for old, metrics, weights in run_learner(replayed, tiny_experts, tmp_path, 2, changes=changes, **options):
        np.testing.assert_allclose(old, expected[0], atol=1e-5, rtol=1e-5)
        assert metrics == pytest.approx(expected[1], abs=1e-5, rel=1e-5)
        for name, value in expected[2].items():
            np.testing.assert_allclose(weights[name], value, atol=1e-6, rtol=1e-5, err_msg=name)


def test_metrics_count_generated_tokens_by_expert(tmp_path, learner, batch):
    """Worked by hand: a router of zeros has the entropy of all experts, and takes the first ones of each token."""
    model = save_tiny_experts(tmp_path / "model", experts=4)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("gate.weight"):
                parameter.zero_()
    network.save_pretrained(model)
    with learner(model) as rank:
        metrics = rank.learn(batch, Passes())
        again = rank.learn(batch, Passes())
    assert metrics["router_entropy"] == pytest.approx(np.log(4), rel=1e-5)
    assert metrics["expert_load_max"] == 2
    assert metrics["idle_experts"] == 0.5
    assert again["expert_load_max"] > 1, "each step counts anew"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_router_stays_and_is_saved(tiny_experts, learner, batch, tmp_path, dtype):
    with learner(tiny_experts, optimizer=STEP, freeze_router=True, router_dtype="float32", dtype=dtype) as rank:
        before, seen = rank.weights(), []
        gate = rank._model.model.layers[0].mlp.gate
        gate.register_forward_hook(lambda _, __, output: seen.append(output[0].dtype))
        rank.learn(batch, Passes())
        after = rank.weights()
        rank.save(tmp_path / "saved")
        rank.restore(tmp_path / "saved")
    assert set(seen) == {torch.float32}
    gates = {name for name in after if name.endswith("gate.weight")}
    assert len(gates) == 2
    for name, value in after.items():
        assert torch.equal(value, before[name]) is (name in gates), name
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    for name in gates:
        assert torch.equal(saved[name], after[name])


def test_a_model_without_experts_has_nothing_to_replay(learner, tmp_path):
    from rlhfless.spec.errors import InputError

    for changes, key in (
        ({"algorithm": ENGINE}, "algorithm.router_replay"),
        ({"freeze_router": True}, "learner.freeze_router"),
        ({"router_dtype": "float32"}, "learner.router_dtype"),
    ):
        with pytest.raises(InputError, match=key), learner(**changes):
            pass
        torch.distributed.destroy_process_group()
