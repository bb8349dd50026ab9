"""Checks, before anything starts, that the weights of a model are complete and fit its configuration.

The check covers a folder on this machine, and a hub model whose files are all in the local cache. Any other model is
checked when the functions load it (rlhfless.functions.loading), by the same report of the same loader.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from rlhfless.prepare.model_files import RESTORE, ModelFiles, all_there, read_model_files
from rlhfless.spec.data import is_path
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import counted
from rlhfless.util.errors import class_and_line

READ_BYTES = 256 * 2**20
"""Weights up to this size are searched for NaN and infinity here, in well under a second. Larger ones are searched when
they are loaded, where each value is read anyway."""

Head = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]
"""Class of transformers that loads the model."""


def weight_problems(
    field: str, path: str, head: Head, *, trust_remote_code: bool, config_is_right: bool = True
) -> list[Problem]:
    """Why the weights at `path`, a folder or a hub name, cannot be used. `field` is the spec's field that names it.

    The files are read in any case; whether the tensors fit the config is checked only if the config is right.
    """
    folder = _folder(path)
    if folder is None:
        return []
    try:
        files = read_model_files(folder, field)
        misfits = _misfits(field, path, files, head, trust_remote_code) if config_is_right else []
    except InputError as error:
        return list(error.problems)
    return [*misfits, *_not_finite(field, files)]


def _folder(path: str) -> Path | None:
    """The folder of the files; None if they are not on this machine."""
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


def _misfits(field: str, path: str, files: ModelFiles, head: Head, trust_remote_code: bool) -> list[Problem]:
    import transformers

    # Lazily: torch and transformers take seconds to import, and a broken file should not wait for them.
    from rlhfless.functions.loading import build_blank, misfit

    config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
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
    if whole:
        names = counted("tensor", map(repr, whole))
        what = f"{files.holder(whole)} has {names} in whole numbers, where the model has floating point"
        problems.append(Problem(field, what, RESTORE))
    return problems


def _not_finite(field: str, files: ModelFiles) -> list[Problem]:
    """NaN and infinity in files that are small enough to be read here."""
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
