"""One rank: it takes the step that a plain training loop takes, and what leaves it is right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fakes.tiny_learner import plain_adamw
from rlhfless.algorithms.batch import select
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.training.rank import default_threads
from rlhfless.records.checkpoints import CheckpointError, files_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import learner_states_bytes
from rlhfless.spec import AdamWSpec, GRPOSpec, KLSpec

PROBE = (1, 7, 3, 22, 9)


def plain_loop(model_path: str, batch, algorithm: GRPOSpec, optimizer: AdamWSpec, temperature: float, passes: Passes):
    """Weights after one training step by the obvious code (a sequence at a time, one formula, torch's AdamW), and the
    norm of each gradient."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adamw = plain_adamw(model, optimizer)
    norms = []
    for part in passes.over(batch):
        loss = torch.zeros(())
        for index in range(part.sequences):
            one = select(part, np.array([index]))
            tokens = torch.tensor(one.tokens)
            logits = model(input_ids=tokens[None]).logits[0, :-1] / temperature
            logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
            mask = torch.tensor(one.response_mask[1:])
            old, rollout, advantage, reference = (
                torch.tensor(values[1:])
                for values in (one.old_logprobs, one.rollout_logprobs, one.advantages, one.reference_logprobs)
            )
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            policy = -torch.minimum(ratio * advantage, clipped * advantage)
            policy = policy * (old - rollout).exp().clamp(max=algorithm.importance.high)
            x = reference - logprobs
            kl = x.exp() - x - 1
            loss = loss + ((policy + algorithm.kl.coefficient * kl) * mask).sum() / part.response_mask.sum().item()
        adamw.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)))
        adamw.step()
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize("passes", [Passes(2), Passes(2, epochs=2, seed=(7, 3))])
def test_a_step_of_several_updates_is_that_of_a_plain_loop(learner, tiny_model, batch, passes):
    algorithm = GRPOSpec(kl=KLSpec(coefficient=0.1))
    # SGD-like: with the usual eps, AdamW turns the sign of a gradient of 1e-9 into a step of its own.
    optimizer = AdamWSpec(learning_rate=0.5, eps=1.0, max_grad_norm=0.3)
    with learner(algorithm=algorithm, optimizer=optimizer) as rank:
        old = rank.evaluate(batch)
        given = batch.with_columns(old_logprobs=old).with_columns(reference_logprobs=old + 0.1)
        metrics = rank.learn(given, passes)
        ours = rank.weights()
    expected, norms = plain_loop(tiny_model, given, algorithm, optimizer, 0.8, passes)
    assert metrics["clipped_low"] + metrics["clipped_high"] > 0, "the second mini-batch must meet the clip"
    assert metrics["gradient_norm"] > 0.3, "the gradient must be clipped"
    tokens = [part.denominators.tokens for part in passes.over(given)]
    assert metrics["gradient_norm"] == pytest.approx(np.average(norms, weights=tokens), rel=1e-5)
    assert metrics["gradient_norm_max"] == pytest.approx(max(norms), rel=1e-5)
    assert max(norms) > 1.001 * metrics["gradient_norm"], "the two gradients must differ, or this says nothing"
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name].detach(), atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    "change", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 64}, {"gradient_checkpointing": True}]
)
def test_how_the_batch_is_cut_does_not_matter(learner, batch, change):
    results = []
    optimizer = AdamWSpec(learning_rate=0.1, eps=1.0)
    for changes in ({}, change):
        with learner(optimizer=optimizer, **changes) as rank:
            metrics = rank.learn(batch, Passes())
            results.append((metrics, rank.weights()))
    _assert_same(*results)


def test_the_order_of_sequences_does_not_matter(learner, batch):
    results = []
    optimizer = AdamWSpec(learning_rate=0.1, eps=1.0)
    for order in (np.arange(batch.sequences), np.random.default_rng(3).permutation(batch.sequences)):
        with learner(optimizer=optimizer, micro_batch_tokens=64) as rank:
            metrics = rank.learn(select(batch, order), Passes())
            results.append((metrics, rank.weights()))
    _assert_same(*results)


def test_the_same_batch_gives_the_same_bits(learner, batch):
    results = []
    for _ in range(2):
        with learner(micro_batch_tokens=64) as rank:
            rank.learn(batch.with_columns(old_logprobs=rank.evaluate(batch)), Passes(3))
            results.append(rank.weights())
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize(("count", "epochs"), [(2, 1), (3, 1), (2, 2), (1, 3)])
def test_a_batch_without_old_logprobs_is_evaluated_before_its_first_update(learner, batch, count, epochs):
    results = []
    optimizer = AdamWSpec(learning_rate=0.5, eps=1.0)
    for evaluate in (True, False):
        with learner(optimizer=optimizer, micro_batch_tokens=64) as rank:
            given = batch.with_columns(old_logprobs=rank.evaluate(batch)) if evaluate else batch
            metrics = rank.learn(given, Passes(count, epochs))
            results.append((metrics, rank.weights()))
    assert results[1][0]["old_kl"] > 1e-4, "the updates before it must move the policy of a later mini-batch"
    _assert_same(*results)


def test_without_old_logprobs_the_ratio_is_exactly_one(learner, batch):
    with learner() as rank:
        metrics = rank.learn(batch, Passes())
    assert metrics["ratio"] == 1
    assert metrics["clipped_low"] == metrics["clipped_high"] == metrics["old_kl"] == metrics["skipped_updates"] == 0
    assert 0 < metrics["entropy"] < np.log(40)


def test_what_is_missing_is_named(learner, batch):
    with learner() as rank, pytest.raises(ValueError, match="no advantages"):
        rank.learn(dataclasses.replace(batch, advantages=None), Passes())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(learner, batch):
    broken = batch.advantages.copy()
    broken[np.flatnonzero(batch.response_mask)[0]] = np.inf  # in the first of two mini-batches
    with learner() as rank:
        before = rank.weights()
        given = dataclasses.replace(batch.with_columns(old_logprobs=rank.evaluate(batch)), advantages=broken)
        assert rank.learn(dataclasses.replace(given, old_logprobs=None), Passes()) == {"skipped_updates": 1}
        assert all(torch.equal(before[name], value) for name, value in rank.weights().items())
        metrics = rank.learn(given, Passes(2))
        assert metrics["skipped_updates"] == 1
        assert all(np.isfinite(value) for value in metrics.values())
        after = rank.weights()
    assert all(value.isfinite().all() for value in after.values())
    assert not all(torch.equal(before[name], value) for name, value in after.items())


def test_warmup_grows_the_learning_rate_linearly(learner, batch):
    with learner(optimizer=AdamWSpec(learning_rate=1e-3, warmup_steps=4)) as rank:
        rates = [rank.learn(batch, Passes())["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_falls_over_the_planned_updates_and_is_resumed(learner, batch, tmp_path, schedule):
    optimizer = AdamWSpec(learning_rate=1e-3, warmup_steps=2, rate_schedule=schedule, rate_floor=0.1)
    passes = Passes(2, planned_updates=6)
    with learner(optimizer=optimizer) as rank:
        first = rank.learn(batch, passes)
        rank.save(tmp_path / "step-000001")
        later = [rank.learn(batch, passes) for _ in range(2)]
    with learner(optimizer=optimizer) as rank:
        rank.restore(tmp_path / "step-000001")
        assert [rank.learn(batch, passes) for _ in range(2)] == later
    assert first["learning_rate"] <= 1e-3
    assert later[0]["learning_rate"] > later[1]["learning_rate"] > 1e-4


def test_learning_raises_the_reward_that_the_advantages_stand_for(learner, batch):
    def objective(rank):
        return float((batch.advantages * rank.evaluate(batch)).sum())

    with learner(optimizer=AdamWSpec(learning_rate=1e-3), dtype="bfloat16") as rank:
        before = objective(rank)
        for _ in range(3):
            rank.learn(batch, Passes())
        assert objective(rank) > before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_those_of_a_checkpoint(learner, tiny_model, dtype):
    with learner(published_dtype=dtype) as rank:
        weights = rank.weights()
        again = rank.weights()
    stored = load_file(f"{tiny_model}/model.safetensors")
    assert weights.keys() == stored.keys()  # tied: no lm_head.weight
    for name, value in stored.items():
        assert torch.equal(weights[name], value.to(getattr(torch, dtype)))
        assert weights[name].data_ptr() != again[name].data_ptr(), "a copy: learning must not write to it"


@pytest.mark.parametrize("kind", ["untied", "experts"])
def test_names_are_those_of_the_checkpoint_for_other_layouts(learner, tmp_path, kind):
    shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    shape |= {"num_key_value_heads": 1, "intermediate_size": 24, "tie_word_embeddings": False}
    if kind == "untied":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shape, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
        )
    model.save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" in stored
    with learner(str(tmp_path / "model")) as rank:
        weights = rank.weights()
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], value) for name, value in stored.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probe_is_of_the_published_weights_at_temperature_one(learner, tiny_model, batch, dtype):
    with learner(published_dtype=dtype) as rank:
        rank.learn(batch, Passes())
        before = rank.evaluate(batch)
        probe = rank.probe_logprobs(PROBE)
        weights = rank.weights()
        np.testing.assert_array_equal(rank.evaluate(batch), before)
    served = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    served.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    with torch.no_grad():
        logprobs = served(input_ids=torch.tensor([PROBE])).logits[0].log_softmax(-1)
    expected = [logprobs[index, token].item() for index, token in enumerate(PROBE[1:])]
    assert probe == pytest.approx(expected, abs=1e-5)


def test_the_probe_of_quantised_engines_is_of_codes_by_an_independent_calculation(learner, tiny_model):
    """fp8 by hand: x / s to the nearest code, s = max |x| / 448 of each row, for weights and for inputs of layers."""

    def rounded(values):
        rows = values.detach()
        scale = rows.abs().amax(-1, keepdim=True) / torch.tensor(448.0)
        size = (rows / scale).abs()
        # Three bits of mantissa: the spacing of codes is 2^-3 of the power of two below, and 2^-9 below 2^-6.
        spacing = torch.exp2(torch.floor(torch.log2(size.clamp_min(2.0**-6))) - 3)
        return torch.sign(rows) * torch.round(size / spacing) * spacing * scale

    with learner(quantization="fp8") as rank:
        probe = rank.probe_logprobs(PROBE)
        assert rank.probe_logprobs(PROBE) == probe
    served = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for layer in served.get_decoder().layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight)
            layer.register_forward_pre_hook(lambda _, taken: (rounded(taken[0]),))
    with torch.no_grad():
        logprobs = served(input_ids=torch.tensor([PROBE[:-1]])).logits[0].log_softmax(-1)
        plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(
            input_ids=torch.tensor([PROBE[:-1]])
        ).logits[0].log_softmax(-1)  # fmt: skip
    assert probe == pytest.approx([logprobs[at, token].item() for at, token in enumerate(PROBE[1:])], abs=2e-4)
    assert probe != pytest.approx([plain[at, token].item() for at, token in enumerate(PROBE[1:])], abs=2e-4)


def test_checkpoint_loads_anywhere_and_resumes_bit_for_bit(learner, batch, tmp_path):
    folder = tmp_path / "runs" / "checkpoint"
    with learner(published_dtype="bfloat16") as rank:
        rank.save(folder)
        rank.learn(batch, Passes())
        rank.save(folder)  # replaces the first
        saved = rank.weights()
        rank.learn(batch, Passes())
        expected = rank.weights()
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"], "nothing half-written is left"
    assert (folder / "tokenizer.json").is_file()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(saved[name], value) for name, value in loaded.named_parameters())
    with learner(published_dtype="bfloat16") as rank:
        rank.restore(folder)
        rank.learn(batch, Passes())
        resumed = rank.weights()
    assert all(torch.equal(expected[name], value) for name, value in resumed.items())


def test_the_memory_plan_knows_the_learners_states(learner, batch, tiny_model):
    """Weights, gradients and moments that are really there; norms are all that the plan leaves out."""
    shape = ModelShape.of_config(json.loads((Path(tiny_model) / "config.json").read_text()))
    planned = {part.name: part.size_bytes for part in learner_states_bytes(shape, averaged=True)}
    with learner(ema_decay=0.9) as rank:
        rank._loss(batch)[0].backward()
        rank._policy.settle()
        held = {
            "master weights": sum(parameter.nbytes for parameter in rank._model.parameters()),
            "gradients": sum(parameter.grad.nbytes for parameter in rank._model.parameters()),
            "AdamW": sum(moment.nbytes for moment in rank._optimizer.moments()),
            "average of the weights": sum(tensor.nbytes for tensor in rank._average.tensors.values()),
        }
    assert planned == pytest.approx(held, rel=0.1)
    assert sum(planned.values()) == 20 * shape.parameters


def test_a_checkpoint_in_an_object_store(learner, batch, tmp_path):
    """fsspec's own store in memory: the same files as in a folder, and the same weights from them."""
    location = f"memory://{tmp_path.name}/run/step-000001"
    files, path = files_of(location)
    with learner() as rank:
        for _ in range(2):  # the second replaces the first
            rank.save(location)
        rank.save(tmp_path / "here")
        expected = rank.weights()
    here = sorted(file.name for file in (tmp_path / "here").iterdir())
    assert sorted(name.rsplit("/", 1)[-1] for name in files.ls(path, detail=False)) == here
    with learner() as rank:
        rank.learn(batch, Passes())
        rank.restore(location)
        assert all(torch.equal(expected[name], value) for name, value in rank.weights().items())
        with pytest.raises(CheckpointError, match="step-000009 cannot be read"):
            rank.restore(f"{location[:-1]}9")


def test_a_failed_save_leaves_the_old_checkpoint(learner, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    with learner() as rank:
        rank.save(folder)
        before = sorted(path.name for path in folder.iterdir())

        def full_disk(*_, **__):
            raise OSError("no space left on device")

        monkeypatch.setattr(torch, "save", full_disk)
        with pytest.raises(CheckpointError, match="no space left"):
            rank.save(folder)
        with pytest.raises(FileNotFoundError, match="no learner wrote it"):
            rank.restore(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not list(tmp_path.glob(".checkpoint*"))


def test_threads_are_shared_out_unless_the_process_is_pinned(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [default_threads(ranks) for ranks in (1, 2, 3, 20)] == [8, 4, 2, 1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    assert default_threads(4) == 2


def _assert_same(first, second) -> None:
    for name, value in first[0].items():
        assert second[0][name] == pytest.approx(value, abs=1e-6, rel=1e-5), name
    for name, value in first[1].items():
        torch.testing.assert_close(second[1][name], value, atol=1e-6, rtol=0, msg=name)


def test_kl_holds_the_policy_near_its_reference(learner, batch):
    distance = {}
    for coefficient in (1e-6, 1.0):
        algorithm = GRPOSpec(kl=KLSpec(coefficient=coefficient))
        with learner(algorithm=algorithm, optimizer=AdamWSpec(learning_rate=3e-3)) as rank:
            reference = rank.evaluate(batch)  # the policy that the run begins with
            for _ in range(12):
                given = batch.with_columns(old_logprobs=rank.evaluate(batch)).with_columns(reference_logprobs=reference)
                metrics = rank.learn(given, Passes())
        distance[coefficient] = metrics["reference_kl"]
    assert distance[1e-6] > 0.1, "without a pull the policy must drift"
    assert distance[1.0] < 0.3 * distance[1e-6]
