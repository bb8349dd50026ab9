"""The files of a checkpoint beside the weights: configuration, tokenizer, generation settings, a model's own code.

They are copied as they are. transformers would write them anew, and refuses to write some that it reads: a
`generation_config.json` with a temperature and without `do_sample`, for example. config.json is the model's, too, but
for the values that follow from the weights that were saved.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from rlhfless.records.checkpoints import NOTES_FILE, CheckpointError
from rlhfless.spec import ModelSpec
from rlhfless.spec.explain import shown
from rlhfless.util.errors import class_and_line
from rlhfless.util.text import parsed_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_OF_WEIGHTS = (".index.json", ".safetensors.json")
_TEXT_FILES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".bpe", ".spm", ".py")
"""Endings of files beside the weights. Others (weights in any format, pictures, README.md) are no part of a model."""

_FOLDERS = ("additional_chat_templates",)


def write_model_files(folder: Path, spec: ModelSpec, config: Any, architecture: str, own_code: Any = None) -> None:
    """Write to `folder` what a model needs beside its weights.

    `config`: of the model that is saved, whose class is named `architecture`. `own_code`: that class, if it is not in
    transformers. Raises CheckpointError naming the file that cannot be written.
    """
    source = files_of_model(spec.path)
    tokenizer = files_of_model(spec.tokenizer) if spec.tokenizer else source
    if tokenizer is not None:
        for name, file in _beside_weights(tokenizer):
            if name not in (CONFIG_FILE, GENERATION_FILE):
                with _writing(name, file):
                    (folder / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, folder / name)
    if source is not None and (generation := source / GENERATION_FILE).is_file():
        with _writing(GENERATION_FILE, generation):
            shutil.copyfile(generation, folder / GENERATION_FILE)
    if own_code is not None:
        with _writing("the model's own code", spec.path):
            custom_object_save(own_code.__new__(own_code), folder, config=config)
            if config._auto_class is not None:  # so is its configuration's class
                custom_object_save(config, folder, config=config)
    with _writing(CONFIG_FILE, spec.path):
        values = _config_values(spec, config, source) | {"architectures": [architecture]}
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")


def try_model_files(spec: ModelSpec, config: Any, architecture: str, tokenizer: Any) -> None:
    """Write them to a temporary folder, and read them again: `config` and `tokenizer` are those of the model. Its own
    code is left to the learner. Raises CheckpointError."""
    with TemporaryDirectory(prefix="rlhfless-trial-") as folder:
        write_model_files(Path(folder), spec, config, architecture)
        if (Path(folder) / GENERATION_FILE).is_file():
            with _writing(GENERATION_FILE, spec.path):
                GenerationConfig.from_pretrained(folder)
        if spec.trust_remote_code:
            return
        with _writing(CONFIG_FILE, spec.path):
            AutoConfig.from_pretrained(folder)
        with _writing("a tokenizer that can be read again", spec.tokenizer or spec.path):
            saved = AutoTokenizer.from_pretrained(folder)
            for what in ("vocab_size", "eos_token_id", "pad_token_id", "chat_template"):
                if (kept := getattr(saved, what, None)) != (own := getattr(tokenizer, what, None)):
                    raise ValueError(f"the copy has another {what}: {shown(kept)} instead of {shown(own)}")


def files_of_model(path: str) -> Path | None:
    """The folder with the files of a model: itself, or the local snapshot of a hub name. None without a config.json or
    tokenizer_config.json there."""
    for name in (CONFIG_FILE, "tokenizer_config.json", "tokenizer.json"):
        with contextlib.suppress(OSError):  # it has no such file
            if found := cached_file(path, name):
                return Path(found).parent
    return None


def _beside_weights(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of the files that are copied."""
    for file in sorted([*folder.iterdir(), *(each for name in _FOLDERS for each in (folder / name).glob("*"))]):
        name = str(file.relative_to(folder))
        if file.is_file() and name.endswith(_TEXT_FILES) and not name.endswith(_OF_WEIGHTS) and name != NOTES_FILE:
            yield name, file


def _config_values(spec: ModelSpec, config: Any, source: Path | None) -> dict[str, Any]:
    """The values of config.json: those of the model's file, if it is of this model and not of a larger one around it,
    with what differs in the weights that are saved."""
    own: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    values = parsed_json((source / CONFIG_FILE).read_text()) if source and (source / CONFIG_FILE).is_file() else own
    if values.get("model_type") != config.model_type:
        values = own
    for name in ("id2label", "label2id", "auto_map"):
        if own.get(name) != values.get(name) and name in own:
            values[name] = own[name]
    values.pop("quantization_config", None)  # weights are saved in `dtype`
    return {name: value for name, value in values.items() if name != "torch_dtype"} | {"dtype": spec.dtype}


@contextlib.contextmanager
def _writing(name: str, source: str | Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # file systems, tokenizers and a model's own code have errors of their own
        raise CheckpointError(
            f"a checkpoint could not have {name}, from {str(source)!r}: {class_and_line(error)}; correct that file, or "
            "take it again from where the model came from"
        ) from error
