"""Adapters: their gradients are those of the merged weights, ranks agree, and files are PEFT's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fakes.tiny_learner import make_rank
from fakes.tiny_learner import run_learner as run
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.cli.main import app
from rlhfless.functions import sharding
from rlhfless.functions.host_offload import HostOffload
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.lora import adapters_of, add_adapters
from rlhfless.functions.sharding import whole
from rlhfless.records.checkpoints import CheckpointNotes
from rlhfless.spec import LoRASpec
from rlhfless.spec.errors import InputError

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
