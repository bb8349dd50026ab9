"""Fields of its spec that a resumed run may change.

A change that would make it a different run is refused, naming the field, because its journal, checkpoints and metrics
would no longer belong together. All other fields (number of steps, number of actors, prices, logging) may change.
"""

from __future__ import annotations

from typing import Any

from rlhfless.spec.document import dotted, walk
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.run import RunSpec

MAY_DIFFER = (
    "steps",
    "checkpoint",
    "critic.ranks",
    "critic.shard_ranks",
    "critic.micro_batch_tokens",
    "critic.threads",
    "critic.gradient_checkpointing",
    "evaluation",
    "generation.engine",
    "generation.progress_interval_s",
    "learner.compile",
    "learner.ranks",
    "learner.min_ranks",
    "learner.shard_ranks",
    "learner.logits_mib",
    "learner.micro_batch_tokens",
    "learner.threads",
    "learner.gradient_checkpointing",
    "limits",
    "logging",
    "metadata",
    "output",
    "placement",
    "priority",
    "recovery",
    "reference.ranks",
    "scaling",
    "scoring.http_hosts",
    "scoring.max_failed",
    "scoring.reward_model_ranks",
    "scoring.timeout_s",
    "scoring.workers",
    "timeouts",
    "weights",
)
"""Fields that a resumed run may change, including all fields below them. Changes to learner and critic fields and to
numbers of ranks affect the weights only by rounding."""


def check_resumable(before: RunSpec, now: RunSpec, source: str) -> None:
    """Raise InputError naming every field that differs but must not. `source` names the refused spec."""
    problems = [
        Problem(name, f"{new!r}, but the run started with {old!r}", "set it back, or start a run of its own")
        for name, old, new in differences(before, now)
        if not _may_differ(name)
    ]
    if problems:
        raise InputError(f"{source} cannot resume this run", problems)


def differences(before: RunSpec, now: RunSpec) -> list[tuple[str, Any, Any]]:
    """Return (field, value before, value now) for every field that differs; None means that the field is missing."""
    old, new = _leaves(before), _leaves(now)
    names = dict.fromkeys((*old, *new))
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _may_differ(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in MAY_DIFFER)


def _leaves(spec: RunSpec) -> dict[str, Any]:
    """Return the value of each field without fields of its own."""
    values = walk(spec.model_dump(mode="json"))
    return {dotted(path): value for path, value in values if not (isinstance(value, dict | list) and value)}
