"""Whether a checkpoint of a run could be written, found out before the run starts: its files, and room for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlhfless.prepare.model import PolicyModel, read_config
from rlhfless.records.checkpoints import CheckpointError, is_url
from rlhfless.scaling.memory import GIB, kept_bytes, version_bytes
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import Problem


def checkpoint_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    """Write a checkpoint's files but weights and state to a temporary folder, and compare its size with what is free
    where it will be."""
    # Here: it imports transformers, which takes long, and a fault found earlier should not wait for that.
    from rlhfless.functions.training.model_files import try_model_files

    config = read_config(spec.model)
    architecture = next(iter(getattr(config, "architectures", None) or ()), type(config).__name__)
    problems = []
    try:
        try_model_files(spec.model, config, architecture, policy.tokenizer)
    except CheckpointError as error:
        what, _, hint = str(error).rpartition("; ")
        problems.append(Problem("model.tokenizer" if spec.model.tokenizer else "model.path", what, hint))
    return problems + _room_problems(spec, policy)


def _room_problems(spec: RunSpec, policy: PolicyModel) -> list[Problem]:
    field, where = ("checkpoint.url", spec.checkpoint.url) if spec.checkpoint.url else ("output", spec.output)
    if is_url(where) or policy.shape is None:
        return []
    existing = Path(where).absolute()
    while not existing.exists():
        existing = existing.parent
    optimizer, averaged = spec.optimizer, spec.learner.average_decay is not None
    state = kept_bytes(4 * policy.shape.parameters, optimizer.moment_bits, averaged=averaged)
    needed, free = version_bytes(policy.shape, spec.model.dtype) + state, shutil.disk_usage(existing).free
    if needed <= free:
        return []
    what = f"{str(existing)!r} has {free / GIB:.3g} GiB free, and a checkpoint takes {needed / GIB:.3g} GiB"
    return [Problem(field, what, "free some space there, or name a folder with more room")]
