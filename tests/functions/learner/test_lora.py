"""Adapters: their gradients are those of the merged weights, ranks agree, and files are PEFT's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fakes.tiny_learner import make_pairs, make_rank, make_supervised
from fakes.tiny_learner import run_learner as run
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.supervised import pack_examples
from rlhfless.cli.main import app
from rlhfless.functions import sharding
from rlhfless.functions.host_offload import HostOffload
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.lora import adapters_of, add_adapters, is_adapter, peft_tensors, target_problems
from rlhfless.functions.sharding import whole
from rlhfless.functions.training.publishing import WeightsNotFinite
from rlhfless.records.checkpoints import CheckpointNotes
from rlhfless.spec import LoRASpec
from rlhfless.spec.errors import InputError
from rlhfless.weights.adapters import ALPHA, BASE, base_of
from rlhfless.weights.digest import digest_of

pytestmark = pytest.mark.timeout(600)

LORA = {"model_options": {"lora": {"rank": 4, "alpha": 8}}}
PROBE = (1, 7, 3, 22, 9)
CPU = torch.device("cpu")


def fill(learner: LearnerRank) -> None:
    """Give each B values, so that the adapters change the model and each A has a gradient."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for adapter in adapters_of(learner._model).values():
            adapter.up.copy_(torch.randn(adapter.up.shape, generator=random) / 10)


def alone(model: str, folder: Path, **changes) -> LearnerRank:
    return make_rank(model, folder, micro_batch_tokens=64, **changes)


def test_an_adapter_of_zeros_changes_no_bit(tiny_model, batch, tmp_path):
    def everything(learner: LearnerRank) -> tuple:
        try:
            return learner.evaluate(batch), learner.weights(), learner.probe_logprobs(PROBE)
        finally:
            learner.close()

    plain = everything(alone(tiny_model, tmp_path / "a"))
    with_adapter = everything(alone(tiny_model, tmp_path / "b", **LORA))
    assert np.array_equal(plain[0], with_adapter[0])
    assert plain[1].keys() == with_adapter[1].keys()
    assert all(torch.equal(plain[1][name], value) for name, value in with_adapter[1].items())
    assert plain[2] == with_adapter[2]


def test_gradients_are_those_of_the_merged_weights(tiny_model, shared_batch, tmp_path):
    """With W' = W + s B A, the chain rule gives dA = s B^T dW' and dB = s dW' A^T: dW' is of full fine-tuning."""
    learner = alone(tiny_model, tmp_path / "a", **LORA)
    fill(learner)
    learner._loss(shared_batch)[0].backward()
    adapters = {name: (each.down, each.up, each.scale) for name, each in adapters_of(learner._model).items()}
    merged, logprobs = learner.weights(), learner.evaluate(shared_batch)
    probe = learner.probe_logprobs(PROBE)
    assert all(parameter.grad is None for name, parameter in learner._model.named_parameters() if "lora" not in name)
    learner.close()
    assert len(adapters) == 2 * 7
    assert {scale for _, _, scale in adapters.values()} == {2.0}

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    weights = dict(model.named_parameters())
    for name, (down, up, scale) in adapters.items():
        plain = weights[name].detach().double() + scale * up.detach().double() @ down.detach().double()
        torch.testing.assert_close(merged[name].double(), plain, atol=1e-6, rtol=0)
    model.load_state_dict(merged, strict=False)
    model.save_pretrained(tmp_path / "merged")
    full = alone(str(_with_tokenizer(tmp_path / "merged", tiny_model)), tmp_path / "c")
    np.testing.assert_allclose(full.evaluate(shared_batch), logprobs, atol=2e-5)
    assert full.probe_logprobs(PROBE) == pytest.approx(probe, abs=2e-5)
    full._loss(shared_batch)[0].backward()
    full._policy.settle()
    slopes = {name: whole(parameter.grad, CPU) for name, parameter in full._model.named_parameters()}
    full.close()
    for name, (down, up, scale) in adapters.items():
        for ours, plain in ((down.grad, scale * up.T @ slopes[name]), (up.grad, scale * slopes[name] @ down.T)):
            assert float(plain.detach().norm()) > 0
            assert float((ours - plain).detach().norm() / plain.detach().norm()) < 1e-4, name


def _with_tokenizer(folder: Path, source: str) -> Path:
    for file in Path(source).glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def learned(learner: LearnerRank, _: int, batch: PackedBatch) -> tuple:
    fill(learner)
    metrics = [learner.learn(batch, Passes(2)) for _ in range(2)]
    weights = {name: value.numpy() for name, value in learner.weights().items()}
    held = HostOffload(learner.kept_on_device())
    held.offload()
    asleep = {name: value.numpy().copy() for name, value in learner.published_everywhere(held.lent).tensors}
    held.restore()
    assert all(np.array_equal(asleep[name], value) for name, value in weights.items())
    assert held.size_bytes >= sum(sharding.local(each.detach()).nbytes for each in learner._model.parameters())
    return metrics, weights, learner.probe_logprobs(PROBE)


@pytest.mark.parametrize("exact", [False, True], ids=["float32, one group", "float64, a group for each layer"])
def test_two_ranks_are_one(tiny_model, batch, tmp_path, exact):
    tolerance = 1e-9 if exact else 1e-5
    given = {"exact": exact, "changes": LORA, "batch": batch}
    ((metrics, weights, probe),) = run(learned, tiny_model, tmp_path, 1, **given)
    both = run(learned, tiny_model, tmp_path, 2, **given)
    for their_metrics, their_weights, their_probe in both:
        for mine, theirs in zip(metrics, their_metrics, strict=True):
            assert theirs == pytest.approx(mine, abs=tolerance, rel=tolerance)
        for name, value in weights.items():
            np.testing.assert_allclose(their_weights[name], value, atol=tolerance, err_msg=name)
        assert their_probe == pytest.approx(probe, abs=10 * tolerance)
    first, second = both[0][1], both[1][1]
    assert all(np.array_equal(first[name], second[name]) for name in first), "ranks agree to the last bit"


def test_a_frozen_base_is_kept_in_the_published_format(tiny_model, batch, tmp_path, monkeypatch):
    """Two bytes for each number in layers; embeddings and head stay exact, for the head's float32."""
    monkeypatch.setattr(sharding, "ONE_GROUP_PARAMETERS", 0)
    formats = {"dtype": "bfloat16", "published_dtype": "bfloat16", "head_dtype": "float32"}
    learner = alone(tiny_model, tmp_path / "a", **LORA, **formats)
    kept = {name: parameter.dtype for name, parameter in learner._model.named_parameters()}
    assert kept["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert kept["model.layers.0.mlp.up_proj.lora_A"] == torch.float32
    assert kept["model.embed_tokens.weight"] == torch.float32
    before = learner.weights()
    metrics = learner.learn(batch, Passes(2))
    after = learner.weights()
    learner.close()
    assert metrics["skipped_updates"] == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, base[name]) for name, value in before.items())
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if name.endswith("_proj.weight")}


def test_a_checkpoint_is_an_adapter_that_is_resumed_to_the_last_bit(tiny_model, batch, tmp_path):
    learner = alone(tiny_model, tmp_path / "a", ema_decay=0.9, **LORA)
    before = learner.weights()
    learner.learn(batch, Passes(2))
    learner.save(tmp_path / "step", CheckpointNotes("r", 0, 1, "d", None, {}).as_json())
    learner.learn(batch, Passes(2))
    expected = learner.weights()
    learner.close()

    files = {file.name for file in (tmp_path / "step").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "learner_state", "run.json"} <= files
    assert not files & {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "step" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, tiny_model)
    targets = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == targets
    adapter = load_file(tmp_path / "step" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 2
    prefix = "base_model.model.model.layers.1.mlp.down_proj."
    assert adapter[f"{prefix}lora_A.weight"].shape == (4, 48)
    assert adapter[f"{prefix}lora_B.weight"].shape == (32, 4)

    resumed = alone(tiny_model, tmp_path / "b", ema_decay=0.9, **LORA)
    resumed.restore(tmp_path / "step")
    with resumed.averaged():  # the files hold the average
        name = "model.layers.1.mlp.down_proj.weight"
        of_file = before[name] + 2 * adapter[f"{prefix}lora_B.weight"] @ adapter[f"{prefix}lora_A.weight"]
        averaged = resumed.weights()
        torch.testing.assert_close(averaged[name], of_file)
    ran = CliRunner().invoke(
        app, ["models", "export", str(tmp_path / "step"), "--merged", "--out", str(tmp_path / "m")]
    )
    assert ran.exit_code == 0, ran.output
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in averaged.items())
    resumed.learn(batch, Passes(2))
    assert all(torch.equal(value, expected[name]) for name, value in resumed.weights().items())
    resumed.close()


def test_targets(tmp_path, tiny_model):
    learner = alone(tiny_model, tmp_path / "a", model_options={"lora": {"targets": ["q_proj", "*_proj"]}})
    assert len(adapters_of(learner._model)) == 14
    learner.close()
    with pytest.raises(InputError, match=r"targets: 'w1' matches no linear layer of .*\n    it has down_proj, gate"):
        add_adapters(AutoModelForCausalLM.from_pretrained(tiny_model), LoRASpec(targets=["q_proj", "w1"]), CPU, "it")


def test_the_reference_is_the_policy_without_its_adapters(tiny_model, shared_batch, tmp_path):
    plain = alone(tiny_model, tmp_path / "a")
    expected, saved = plain.compute(shared_batch)
    plain.close()
    learner = alone(tiny_model, tmp_path / "b", **LORA)
    fill(learner)
    before = learner.evaluate(shared_batch)
    reference, saved_here = learner.compute(shared_batch)
    assert np.array_equal(reference, expected)
    assert saved_here == saved > 0
    assert float(np.abs(before - reference).max()) > 0.1
    assert np.array_equal(learner.evaluate(shared_batch), before), "the adapters are back"
    learner.close()

    pairs = pack_examples(make_pairs())
    plain_pairs = make_supervised(tiny_model, tmp_path / "c", micro_batch_tokens=200)
    expected = plain_pairs.evaluate(pairs)
    plain_pairs.close()
    of_pairs = make_supervised(tiny_model, tmp_path / "d", micro_batch_tokens=200, **LORA)
    fill(of_pairs)
    np.testing.assert_allclose(of_pairs.compute(pairs)[0], expected, atol=2e-5)
    of_pairs.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_published_alone(tiny_model, tmp_path, dtype):
    """Its digest covers the base's; the probe is of the base with what was published, in float32."""
    formats = {"published_dtype": dtype, "publishes_adapters": True}
    learner = alone(tiny_model, tmp_path / "a", **LORA, **formats)
    fill(learner)
    stream, samples = learner.published(PROBE)
    published = dict(stream.tensors)
    base, probe = learner.base(PROBE), learner.probe_logprobs(PROBE)
    learner.close()
    plain = alone(tiny_model, tmp_path / "b", published_dtype=dtype)
    weights = plain.weights()
    plain.close()
    assert base.digest == digest_of(weights.items())
    assert base.samples.keys() == weights.keys()
    assert base_of(published.pop(BASE)) == base.digest
    assert published.pop(ALPHA).tolist() == [8]
    assert samples.keys() == published.keys() | {BASE, ALPHA}
    assert len(published) == 2 * 7 * 2
    assert {tensor.dtype for tensor in published.values()} == {getattr(torch, dtype)}

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
        for name, down in published.items():
            if "lora_A" in name:
                path = name.removeprefix("base_model.model.").replace(".lora_A", "")
                up = published[name.replace("lora_A", "lora_B")]
                dict(model.named_parameters())[path] += 2.0 * up.float() @ down.float()
        logits = model(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].tolist()
    assert probe == pytest.approx(expected, abs=1e-4)


def test_an_adapter_that_is_not_finite_is_not_published(tiny_model, tmp_path):
    learner = alone(tiny_model, tmp_path / "a", **LORA, published_dtype="float16", publishes_adapters=True)
    with torch.no_grad():
        next(iter(adapters_of(learner._model).values())).up.fill_(1e6)  # finite in float32 only
    with pytest.raises(WeightsNotFinite, match=r"1 tensors of the adapter .* not finite in float16, .*lora_B"):
        learner.published()
    learner.close()


def test_a_run_starts_from_an_adapter_which_is_its_reference(tiny_model, batch, tmp_path):
    first = alone(tiny_model, tmp_path / "a", **LORA)
    fill(first)
    before = first.evaluate(batch)
    first.save(tmp_path / "step", CheckpointNotes("r", 0, 1, "d", None, {}).as_json())
    first.close()
    lora = {"rank": 4, "alpha": 8, "path": str(tmp_path / "step")}
    second = alone(tiny_model, tmp_path / "b", model_options={"lora": lora})
    assert np.array_equal(second.evaluate(batch), before)
    reference, _ = second.compute(batch)
    np.testing.assert_allclose(reference, before, atol=2e-5)
    second.learn(batch, Passes(1))
    assert np.array_equal(second.compute(batch)[0], reference)
    assert not np.array_equal(second.evaluate(batch), before)
    second.close()


@pytest.mark.parametrize(
    ("changes", "where", "text"),
    [
        ({"rank": 8}, "model.lora.rank", "8, but the adapter in .* has 4"),
        ({"alpha": 4}, "model.lora.alpha", "4, but the adapter in .* has 8"),
        ({"targets": ["q_proj"]}, "model.lora.path", "24 tensors of the adapter .* are not those of the targets"),
        ({"path": "/nowhere"}, "model.lora.path", "'/nowhere' has no adapter_config.json and no adapter_model"),
        ({"config": {"use_dora": True}}, "model.lora.path", "uses use_dora, which adapters here do not have"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tiny_model, tmp_path, changes, where, text):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    add_adapters(model, LoRASpec(rank=4, alpha=8), CPU, "it")
    named = {name: value for name, value in model.named_parameters() if is_adapter(name)}
    save_file(peft_tensors(named), tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | changes.pop("config", {})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    spec = LoRASpec(**({"rank": 4, "alpha": 8, "path": str(tmp_path)} | changes))
    (problem,) = target_problems(AutoModelForCausalLM.from_pretrained(tiny_model), spec, "it")
    assert problem.where == where
    assert re.search(text, problem.what)
    assert problem.hint
