"""Weights that are not whole, or are another model's, are refused before anything starts; whole ones never are."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.model_folders import FAMILIES, INDEX, SINGLE, edit, edit_json, save, save_reward_model, shards_of
from rlhfless.prepare import model_weights
from rlhfless.prepare.model_weights import weight_problems

UP = "model.layers.1.mlp.up_proj.weight"


def faults(folder, head="AutoModelForCausalLM", path=None, **options) -> str:
    problems = weight_problems("model.path", path or str(folder), head, trust_remote_code=False, **options)
    return "\n".join(map(str, problems))


@pytest.fixture
def llama(tmp_path):
    return save("llama", tmp_path / "llama")


@pytest.fixture
def sharded(tmp_path):
    return save("llama", tmp_path / "sharded", shards=4)


# -- whole models pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_whole_model_passes(family, shards, dtype, tmp_path):
    assert faults(save(family, tmp_path, dtype=dtype, shards=shards)) == ""


def test_a_whole_reward_model_passes(tmp_path):
    assert faults(save_reward_model(tmp_path), "AutoModelForSequenceClassification") == ""


def test_a_tied_head_may_be_stored_too(tmp_path):
    folder = save("llama_tied", tmp_path)
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert faults(folder) == ""


def test_buffers_of_old_checkpoints_are_left_alone(llama):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(llama, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert faults(llama) == ""


def test_the_bare_decoder_of_a_tied_model_passes(tmp_path):
    """Some checkpoints were saved without the prefix of the class with the head."""
    folder = save("llama_tied", tmp_path)
    tensors = load_file(folder / SINGLE)
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, folder / SINGLE)
    assert faults(folder) == ""


def test_pickled_weights_are_read_too(llama):
    torch.save(load_file(llama / SINGLE), llama / "pytorch_model.bin")
    (llama / SINGLE).unlink()
    assert faults(llama) == ""
    tensors = torch.load(llama / "pytorch_model.bin")
    del tensors[UP]
    torch.save(tensors, llama / "pytorch_model.bin")
    assert f"pytorch_model.bin lacks tensor '{UP}' [48, 32], which LlamaForCausalLM needs" in faults(llama)
    content = (llama / "pytorch_model.bin").read_bytes()
    (llama / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    assert "pytorch_model.bin' cannot be read as a torch checkpoint" in faults(llama)


def test_a_quantised_model_is_left_to_its_loader(llama):
    edit(llama, lambda tensors: tensors.pop(UP))
    edit_json(llama, "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
    assert faults(llama) == ""


@pytest.mark.parametrize(("method", "config"), [("mxfp4", "Mxfp4Config"), ("fp8", "FineGrainedFP8Config")])
def test_a_base_that_is_not_trained_in_its_format_is_refused_by_name(llama, method, config):
    edit_json(llama, "config.json", lambda values: values.update(quantization_config={"quant_method": method}))
    assert faults(llama).startswith(f"model.path: its weights are in {method}, which is not trained")
    assert f"quantization_config=transformers.{config}(dequantize=True)" in faults(llama)


# -- tensors


def test_a_missing_tensor(llama):
    edit(llama, lambda tensors: tensors.pop(UP))
    assert faults(llama) == (
        f"model.path: model.safetensors lacks tensor '{UP}' [48, 32], which LlamaForCausalLM needs\n"
        "    fetch the model again from where it came from"
    )


def test_a_tensor_that_the_model_does_not_have(llama):
    edit(llama, lambda tensors: tensors.update({"v_head.summary.weight": torch.zeros(1, 32)}))
    message = faults(llama)
    assert "model.safetensors has tensor 'v_head.summary.weight', which LlamaForCausalLM does not take" in message
    assert "config.json and the weights belong to different models" in message


def test_a_tensor_of_another_shape(llama):
    edit(llama, lambda tensors: tensors.update({UP: torch.zeros(48, 31)}))
    assert f"model.safetensors has tensor '{UP}' as [48, 31] instead of [48, 32]" in faults(llama)


def test_all_kinds_are_told_at_once_and_long_lists_are_counted(llama):
    def change(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[f"{name}.old"] = tensors.pop(name)
        tensors["lm_head.weight"] = torch.zeros(41, 32)

    edit(llama, change)
    message = faults(llama)
    assert "lacks 9 tensors: 'model.layers.1.input_layernorm.weight' [32], " in message
    assert " and 1 more, which LlamaForCausalLM needs" in message
    assert "'lm_head.weight' as [41, 32] instead of [40, 32]" in message
    assert "has 9 tensors: 'model.layers.1.input_layernorm.weight.old', " in message


def test_a_config_of_fewer_layers(llama):
    edit_json(llama, "config.json", lambda config: config.update(num_hidden_layers=1))
    assert "has 9 tensors: 'model.layers.1.input_layernorm.weight', " in faults(llama)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_expert_that_is_missing_is_told_by_its_name_in_the_file(family, tmp_path):
    folder = save(family, tmp_path)
    name = next(name for name in sorted(load_file(folder / SINGLE)) if ".experts.2." in name)
    edit(folder, lambda tensors: tensors.pop(name))
    assert f"model.safetensors lacks tensor '{name}' [" in faults(folder)
    of_layer = [name.replace(".experts.2.", f".experts.{expert}.") for expert in (0, 1, 3)]
    edit(folder, lambda tensors: [tensors.pop(other) for other in of_layer])
    assert "model.safetensors lacks " in faults(folder)
    assert name in faults(folder)


def test_an_expert_of_another_shape(tmp_path):
    folder = save("qwen3_moe", tmp_path)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(15, 32)}))
    assert f"tensor '{name}' as [15, 32] instead of [16, 32]" in faults(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(value, dtype, tmp_path):
    folder = save("llama", tmp_path, dtype=dtype)
    edit(folder, lambda tensors: tensors[UP].view(-1).__setitem__(77, value))
    assert f"model.safetensors has NaN or infinite values in tensor '{UP}'" in faults(folder)


def test_large_files_are_not_read_for_nan(llama, monkeypatch):
    edit(llama, lambda tensors: tensors[UP].fill_(float("nan")))
    monkeypatch.setattr(model_weights, "READ_BYTES", 1000)
    assert faults(llama) == ""


def test_whole_numbers_where_the_model_has_floating_point(llama):
    edit(llama, lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    assert f"has tensor '{UP}' as integers, where the model has floating point" in faults(llama)


def test_a_reward_model_without_its_score(tmp_path):
    folder = save_reward_model(tmp_path)
    edit(folder, lambda tensors: tensors.pop("score.weight"))
    message = faults(folder, "AutoModelForSequenceClassification")
    assert "lacks tensor 'score.weight' [1, 32], which LlamaForSequenceClassification needs" in message


def test_a_model_that_cannot_be_built(llama):
    edit_json(llama, "config.json", lambda config: config.update(hidden_act="none-such"))
    assert "the model that config.json describes cannot be built: KeyError: " in faults(llama)


# -- files


def test_a_file_that_is_cut_short(llama):
    content = (llama / SINGLE).read_bytes()
    (llama / SINGLE).write_bytes(content[:-100])
    assert f"model.safetensors' is cut short: it has {len(content) - 100:,} of {len(content):,} bytes" in faults(llama)
    (llama / SINGLE).write_bytes(content[:500])  # within the header
    assert "is cut short: it has 500 of " in faults(llama)
    (llama / SINGLE).write_bytes(b"")
    assert "is not a safetensors file" in faults(llama)


def test_a_file_with_more_than_its_tensors(llama):
    with (llama / SINGLE).open("ab") as stream:
        stream.write(b"more")
    assert "is not a safetensors file" in faults(llama)


def test_tensors_that_overlap_in_their_file(llama):
    content = (llama / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[UP]["data_offsets"] = header["lm_head.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    (llama / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert "is not a safetensors file" in faults(llama)


def test_a_page_in_place_of_a_file(llama):
    (llama / SINGLE).write_text("<html>404 Not Found</html>")
    assert "is not a safetensors file" in faults(llama)


def test_a_name_that_no_loader_looks_for(llama):
    (llama / SINGLE).rename(llama / "weights.safetensors")
    message = faults(llama)
    assert "has no weights (model.safetensors or pytorch_model.bin" in message
    assert "weights.safetensors has a name that no loader looks for" in message


def test_shards_that_are_missing_and_broken_are_told_together(sharded):
    first, second, *_ = shards_of(sharded)
    (sharded / first).unlink()
    (sharded / second).write_bytes((sharded / second).read_bytes()[:-1])
    message = faults(sharded)
    assert f"lacks 1 of {len(shards_of(sharded))} weight files, such as {first}" in message
    assert f"{second}' is cut short" in message


def test_a_shard_that_lacks_what_the_index_says_it_holds(sharded):
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][UP]
    edit(sharded, lambda tensors: tensors.pop(UP), shard)
    assert f"{shard} lacks tensor '{UP}', which the index says it holds" in faults(sharded)


def test_a_tensor_that_the_index_does_not_name(sharded):
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][UP]
    edit_json(sharded, INDEX, lambda index: index["weight_map"].pop(UP))
    assert f"{shard} holds tensor '{UP}', which the index does not place there" in faults(sharded)


def test_a_tensor_that_neither_the_index_nor_a_shard_has(sharded):
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][UP]
    edit(sharded, lambda tensors: tensors.pop(UP), shard)
    edit_json(sharded, INDEX, lambda index: index["weight_map"].pop(UP))
    count = len(shards_of(sharded))
    assert f"the checkpoint of {count} files lacks tensor '{UP}' [48, 32], which Llama" in faults(sharded)


def test_odd_tensors_are_told_with_their_shard(sharded):
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][UP]
    edit(sharded, lambda tensors: tensors.update({UP: torch.zeros(48, 31), "strange": torch.zeros(1)}), shard)
    edit_json(sharded, INDEX, lambda index: index["weight_map"].update(strange=shard))
    message = faults(sharded)
    assert f"{shard} has tensor '{UP}' as [48, 31] instead of [48, 32]" in message
    assert f"{shard} has tensor 'strange', which LlamaForCausalLM does not take" in message


def test_an_index_that_cannot_be_read(sharded):
    (sharded / INDEX).write_text("{")
    assert "model.safetensors.index.json is not an index of weight files: JSONDecodeError" in faults(sharded)
    for weight_map in ("{}", '{"a": "../other/model.safetensors"}', f'{{"a": "{sharded}/../x.safetensors"}}'):
        (sharded / INDEX).write_text(f'{{"weight_map": {weight_map}}}')
        assert "is not an index of weight files" in faults(sharded)


def test_files_are_read_although_the_config_is_wrong(llama):
    (llama / SINGLE).write_bytes((llama / SINGLE).read_bytes()[:-1])
    assert "is cut short" in faults(llama, config_is_right=False)


# -- the hub


def test_a_hub_model_is_judged_where_its_files_are_in_the_cache(llama, sharded, monkeypatch, tmp_path):
    def cached(folder):
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(folder / "config.json"))
        return faults(folder, path="some-user/some-model")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: FAMILIES["llama"])
    monkeypatch.chdir(tmp_path)
    assert cached(llama) == ""
    edit(llama, lambda tensors: tensors.pop(UP))
    assert f"lacks tensor '{UP}'" in cached(llama)
    (sharded / shards_of(sharded)[0]).unlink()
    assert cached(sharded) == "", "the loader fetches the rest"
