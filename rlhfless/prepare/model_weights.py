"""Check before a run that a model's weights are complete and fit its configuration.

Covers local folders and fully cached hub models; other models are checked when they are loaded
(rlhfless.functions.loading). Files are chosen as transformers does: `model.safetensors`, else its index's shards, else
`pytorch_model.bin` or its shards. Only headers are read; a `.bin` file's pickle by torch's restricted unpickler.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhfless.spec import LoRASpec
from rlhfless.spec.data import is_path
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import counted
from rlhfless.util.errors import class_and_line

READ_BYTES = 256 * 2**20
"""Weights up to this size are searched for NaN and infinity here; larger ones when they are loaded."""

Head = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]
"""The transformers class that loads the model."""


def weight_problems(
    field: str,
    path: str,
    head: Head,
    *,
    trust_remote_code: bool,
    config_is_right: bool = True,
    lora: LoRASpec | None = None,
) -> list[Problem]:
    """Report why the weights at `path`, a folder or hub name, cannot be used. `field` is the spec's field that names
    it.

    Tensors are compared with the config, and the targets of `lora` with its layers, only if the config is right.
    """
    folder = _folder(path)
    if folder is None:
        return []
    try:
        files = read_model_files(folder, field)
        misfits = _misfits(field, path, files, head, trust_remote_code, lora) if config_is_right else []
    except InputError as error:
        return list(error.problems)
    return [*misfits, *_not_finite(field, files)]


def _folder(path: str) -> Path | None:
    """Return the folder of the files; None if they are not on this machine."""
    if is_path(path):
        return Path(path) if os.path.isfile(os.path.join(path, "config.json")) else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    snapshot = Path(config).parent if isinstance(config, str) else None
    return snapshot if snapshot is not None and all_there(snapshot) else None


def _misfits(
    field: str, path: str, files: ModelFiles, head: Head, trust_remote_code: bool, lora: LoRASpec | None
) -> list[Problem]:
    import transformers

    # Lazily: torch and transformers take seconds to import, and a broken file should not wait for them.
    from rlhfless.functions.loading import build_blank, misfit
    from rlhfless.functions.lora import target_problems

    config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        if (method := dict(quantised).get("quant_method")) in DEQUANTISE:
            what = f"its weights are in {method}, which is not trained, and engines would start with other layers"
            return [Problem(field, what, DEQUANTISE[method])]
        return []  # its tensors depend on the quantiser's kernels, so only the loader can judge them
    try:
        blank = build_blank(getattr(transformers, head), config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a model's own code may raise any error
        what = f"the model that config.json describes cannot be built: {class_and_line(error)}"
        return [Problem(field, what, "correct config.json, or take it again from where the model came from")]
    misfits = misfit(blank, config, {name: tensor.shape for name, tensor in files.tensors.items()})
    parameters = {name for name, parameter in blank.named_parameters() if parameter.is_floating_point()}
    whole = [name for name, tensor in sorted(files.tensors.items()) if name in parameters and not tensor.floating]
    problems = misfits.problems(field, files.holder)
    if lora is not None:
        problems += target_problems(blank, lora, path)
    if whole:
        names = counted("tensor", map(repr, whole))
        what = f"{files.holder(whole)} has {names} as integers, where the model has floating point"
        problems.append(Problem(field, what, RESTORE))
    return problems


def _not_finite(field: str, files: ModelFiles) -> list[Problem]:
    """Report NaN and infinity in files up to READ_BYTES."""
    if files.size_bytes > READ_BYTES:
        return []
    import torch
    from safetensors.torch import load_file

    from rlhfless.functions.loading import is_finite

    problems = []
    for file in files.files:
        held = torch.load(file, weights_only=True) if file.suffix == ".bin" else load_file(file)
        bad = [repr(name) for name, tensor in sorted(held.items()) if not is_finite(tensor)]
        if bad:
            what = f"{file.name} has NaN or infinite values in {counted('tensor', bad)}"
            problems.append(Problem(field, what, RESTORE))
    return problems


# -- files and headers


_DEQUANTISED = (
    "write it once in bfloat16: AutoModelForCausalLM.from_pretrained(PATH, dtype='bfloat16', "
    "quantization_config={config}(dequantize=True)).save_pretrained(FOLDER), with its tokenizer, and name FOLDER"
)

DEQUANTISE = {
    "mxfp4": _DEQUANTISED.format(config="transformers.Mxfp4Config"),
    "fp8": _DEQUANTISED.format(config="transformers.FineGrainedFP8Config"),
}
"""How to get a base that can be trained, by the format of its files."""

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""In the order of transformers; `<name>.index.json` is the index of a file's shards."""

RESTORE = "fetch the file again from where the model came from"

# What Git leaves in place of a large file that was not fetched (https://git-lfs.com).
_LFS_POINTER = b"version https://git-lfs"
# A safetensors file begins with the length of its header (https://github.com/huggingface/safetensors).
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    floating: bool


@dataclass(frozen=True, slots=True)
class ModelFiles:
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def holder(self, names: Iterable[str]) -> str:
        """Return the name of the file that holds these tensors; `the checkpoint` if several files or none do."""
        holders = {self.tensors[name].file for name in names if name in self.tensors}
        if len(self.files) == 1 or len(holders) == 1:
            return next(iter(holders), self.files[0]).name
        return f"the checkpoint of {len(self.files)} files"


def read_model_files(folder: Path, field: str) -> ModelFiles:
    """Read the headers. `field` is the spec's field that names the folder. Raises InputError with all problems."""
    files, index = _chosen(folder, field)
    problems: list[Problem] = []
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        what = f"{str(folder)!r} lacks {len(missing)} of {len(files)} weight files, such as {missing[0]}"
        problems.append(Problem(field, what, "download the model again"))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if file.is_file():
            held = _tensors(file, field, problems)
            if held is None:
                continue
            if index is not None:
                problems += _index_problems(file, held, index, field)
            for name in tensors.keys() & held.keys():
                what = f"tensor {name!r} is both in {tensors[name].file.name} and in {file.name}"
                problems.append(Problem(field, what, "download the model again"))
            tensors |= held
    if problems:
        raise InputError("model", problems)
    return ModelFiles(files, tensors)


def all_there(folder: Path) -> bool:
    """Whether the folder has all indexed weight files; a hub cache may have only some."""
    try:
        return all(file.is_file() for file in _chosen(folder, "")[0])
    except InputError:
        return False


def _chosen(folder: Path, field: str) -> tuple[tuple[Path, ...], Mapping[str, str] | None]:
    """Return the files to load, and their index (tensor to file) if any. Raises InputError."""
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return (folder / name,), None
        index = folder / f"{name}.index.json"
        if index.exists():
            weight_map = _weight_map(index, field)
            return tuple(folder / file for file in sorted(set(weight_map.values()))), weight_map
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    what = f"{str(folder)!r} has no weights ({' or '.join(WEIGHT_FILES)}, in one file or in shards with an index)"
    hint = f"{others[0]} has a name that no loader looks for" if others else "name the folder that holds them"
    raise InputError("model", [Problem(field, what, hint)])


def _weight_map(index: Path, field: str) -> dict[str, str]:
    """Read an index, tensor to file. Raises InputError."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # transformers would open what leads out of the folder, too.
        if weight_map and all(isinstance(file, str) and file == Path(file).name for file in weight_map.values()):
            return dict(weight_map)
        what = "its `weight_map` names no files of its folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
    raise InputError("model", [Problem(field, f"{index.name} is not an index of weight files: {what}", RESTORE)])


def _index_problems(
    file: Path, held: Mapping[str, StoredTensor], index: Mapping[str, str], field: str
) -> list[Problem]:
    problems = []
    hint = "the index and its files are of different models, or a file was changed: download the model again"
    lacking = [repr(name) for name in sorted(index) if index[name] == file.name and name not in held]
    if lacking:
        problems.append(
            Problem(field, f"{file.name} lacks {counted('tensor', lacking)}, which the index says it holds", hint)
        )
    strange = [repr(name) for name in sorted(held) if index.get(name) != file.name]
    if strange:
        what = f"{file.name} holds {counted('tensor', strange)}, which the index does not place there"
        problems.append(Problem(field, what, hint))
    return problems


def _tensors(file: Path, field: str, problems: list[Problem]) -> dict[str, StoredTensor] | None:
    """Return a file's tensors; None, with a problem, if it cannot be read."""
    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            what = f"{str(file)!r} is a Git LFS pointer, not the weights"
            problems.append(Problem(field, what, "fetch the weights with `git lfs pull`"))
            return None
    try:
        return _of_pickle(file) if file.suffix == ".bin" else _of_safetensors(file)
    except _Unreadable as error:
        problems.append(Problem(field, f"{str(file)!r} {error}", RESTORE))
        return None


class _Unreadable(Exception):
    """A weight file cannot be read; the message says why."""


def _of_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Raises _Unreadable: the library checks that the header is whole and that its tensors fill the file exactly."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            slices: dict[str, Any] = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF")))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        wanted = _size_by_header(file)
        if wanted is not None and size < wanted:
            raise _Unreadable(f"is cut short: it has {size:,} of {wanted:,} bytes") from error
        raise _Unreadable(f"is not a safetensors file: {error}") from error


def _size_by_header(file: Path) -> int | None:
    """Return the size that a safetensors file should have; None if its header is damaged."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            return _LENGTH_BYTES + length if length < 100_000_000 else None  # the library's own limit of a header
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return _LENGTH_BYTES + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return None


def _of_pickle(file: Path) -> dict[str, StoredTensor]:
    """Raises _Unreadable."""
    import torch

    try:
        held = torch.load(file, map_location="meta", weights_only=True)
    except (RuntimeError, OSError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise _Unreadable(f"cannot be read as a torch checkpoint: {class_and_line(error)}") from error
    if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise _Unreadable("holds something other than tensors by name; save the model's `state_dict()`")
    return {name: StoredTensor(file, tuple(value.shape), value.dtype.is_floating_point) for name, value in held.items()}
