"""The files of a checkpoint beside the weights: copied as they are, and tried before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fakes.model_folders import edit_json
from rlhfless.functions.training import publishing
from rlhfless.functions.training.publishing import try_model_files, write_model_files
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"


@pytest.fixture
def folder(tiny_model: str, tmp_path: Path) -> Path:
    """A copy of the model, for the test to change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def written(path: str | Path, tmp_path: Path, **spec: Any) -> Path:
    out = tmp_path / "written"
    out.mkdir()
    spec = ModelSpec(path=str(path), **spec)
    write_model_files(out, spec, AutoConfig.from_pretrained(path), ARCHITECTURE)
    return out


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": 0.7},  # transformers refuses to write it without do_sample
        {"do_sample": False, "top_p": 0.8, "top_k": 5},
        {"num_return_sequences": 4, "do_sample": True, "top_h": 0.3},
        {"num_beams": 1, "early_stopping": True},
        {"eos_token_id": [1, 2], "pad_token_id": -1},
        {"cache_implementation": "static", "own": {"nested": [1.50]}},
    ],
)
def test_a_run_saves_a_model_whatever_its_generation_settings_are(
    learner: Any, folder: Path, tmp_path: Path, generation: dict[str, Any]
) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(generation, indent=3))
    with learner(str(folder)) as rank:
        rank.save(tmp_path / "checkpoint")
        rank.save(tmp_path / "again")
    assert (tmp_path / "checkpoint" / file.name).read_bytes() == file.read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "again")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.7, "max_length": 50},  # transformers refuses to write these, too
        {"attention_dropout": 0.1},  # switched off in training, and still the model's
        {"own_key": {"of": ["the", "author"]}},
        {"torch_dtype": "float16"},
        {"eos_token_id": [1, 2]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "own": 1}},
    ],
)
def test_config_json_is_the_models_but_for_the_format(learner: Any, folder: Path, tmp_path: Path, values: Any) -> None:
    edit_json(folder, "config.json", lambda config: config.update(values))
    with learner(str(folder), published_dtype="bfloat16") as rank:
        rank.save(tmp_path / "checkpoint")
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "checkpoint"))
    before.pop("torch_dtype", None)
    assert after == before | {"dtype": "bfloat16", "architectures": [ARCHITECTURE]}


def test_all_files_of_a_tokenizer_are_copied_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    copied = {
        "chat_template.jinja": "{{ messages }}\n",
        "special_tokens_map.json": '{ "eos_token":\n"w1" }',
        "added_tokens.json": '{"<x>": 40}',
        "merges.txt": "#version: 0.2\na b",
        "preprocessor_config.json": "{}",
        "vocab.json": "{}",
        "additional_chat_templates/tools.jinja": "tools",
    }
    left = {
        "README.md": "about",
        "picture.png": "x",
        "run.json": "{}",
        "pytorch_model.bin": "x",
        "model.safetensors.index.json": "{}",
        "learner_state/.metadata": "x",
        "original/params.json": "{}",
    }
    for name, text in (copied | left).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    out = written(folder, tmp_path)
    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert names == {*copied, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert all((out / name).read_text() == text for name, text in copied.items())
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_another_tokenizer_is_not_mixed_with_the_models(folder: Path, tiny_model: str, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("the model's")
    (folder / "generation_config.json").write_text('{"temperature": 2.0}')
    out = written(folder, tmp_path, tokenizer=tiny_model)
    assert not (out / "chat_template.jinja").exists()
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 2.0}


def test_a_hub_name_is_its_snapshot_whose_files_are_links(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--own--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    out = written("own/tiny", tmp_path)
    assert (out / "tokenizer.json").is_file()
    assert not (out / "tokenizer.json").is_symlink()


OWN_CODE = {
    "modeling_own.py": "from .parts import Part\nfrom transformers import Qwen3ForCausalLM\n"
    "from .configuration_own import OwnConfig\n"
    "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n    part = Part\n",
    "configuration_own.py": "from transformers import Qwen3Config\nclass OwnConfig(Qwen3Config):\n"
    "    model_type = 'own'\n",
    "parts.py": "class Part: pass\n",
}


@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_a_models_own_code_is_in_its_checkpoint(
    learner: Any, folder: Path, tiny_model: str, tmp_path: Path, own_tokenizer: bool
) -> None:
    for name, text in OWN_CODE.items():
        (folder / name).write_text(text)
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_json(folder, "config.json", lambda config: config.update(model_type="own", auto_map=auto))
    spec = {"trust_remote_code": True, "tokenizer": None if own_tokenizer else tiny_model}
    with learner(str(folder), model_options=spec) as rank:
        rank.save(tmp_path / "checkpoint")
    shutil.rmtree(folder)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"


def tried(folder: Path, **spec: Any) -> None:
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    try_model_files(ModelSpec(path=str(folder), **spec), config, ARCHITECTURE, tokenizer)


def test_the_trial_finds_a_file_that_cannot_be_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(folder)
    copy = shutil.copyfile

    def guarded(source: Path, target: Path) -> None:
        if target.name == "tokenizer_config.json":
            raise PermissionError(13, "Permission denied", str(source))
        copy(source, target)

    monkeypatch.setattr(publishing.shutil, "copyfile", guarded)
    with pytest.raises(CheckpointError, match=r"cannot write tokenizer_config.json to .*Permission denied"):
        tried(folder)


@pytest.mark.parametrize("settings", ['{"num_return_sequences": 4}', '{"cache_implementation": "none"}', "{,}"])
def test_the_trial_finds_generation_settings_that_no_one_can_read(folder: Path, settings: str) -> None:
    (folder / "generation_config.json").write_text(settings)
    with pytest.raises(CheckpointError, match=r"generation_config.json to a checkpoint, from .*correct that file"):
        tried(folder)


def test_the_trial_finds_a_tokenizer_whose_files_make_another(folder: Path, tiny_model: str) -> None:
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "set in memory"
    with pytest.raises(CheckpointError, match=r"the copy has another chat_template: .* instead of 'set in memory'"):
        try_model_files(ModelSpec(path=str(folder)), config, ARCHITECTURE, tokenizer)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="a tokenizer that can be read again"):
        try_model_files(ModelSpec(path=str(folder)), config, ARCHITECTURE, AutoTokenizer.from_pretrained(tiny_model))


def test_a_learner_tries_the_files_when_it_starts(learner: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing.shutil, "copyfile", full)
    try:
        with pytest.raises(CheckpointError, match=r"no checkpoint of this run could be written .*No space left"):
            learner(str(folder)).__enter__()
    finally:
        dist.destroy_process_group()
