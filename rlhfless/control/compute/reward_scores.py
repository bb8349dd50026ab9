"""Scores of given samples: rewards tried before a run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhfless.prepare.reward_trial import try_rewards
from rlhfless.spec import LengthPenaltySpec, RunSpec
from rlhfless.spec.errors import InputError, Problem


def scored(question: Mapping[str, Any]) -> dict[str, Any]:
    """By sample: the value of each part, the weighted sum, and what failed. Raises InputError."""
    values = {"model": {"path": "none"}, "prompts": {"path": "none"}, "rewards": question["rewards"]}
    spec = RunSpec.model_validate(values | {"scoring": {"http_hosts": question["http_hosts"]}})
    samples = [_counted(index, sample, spec) for index, sample in enumerate(question["samples"])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        file.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples), "utf-8")
        trial = try_rewards(spec, file)
    data = [
        {
            "parts": dict(score.parts),
            "reward": None if score.failures else score.total,
            "failures": dict(score.failures),
        }
        for score in trial.scores
    ]
    return {"data": data, "wall_s": trial.wall_s}


def _counted(index: int, sample: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """With a number of tokens: there is no tokenizer here. Raises InputError if a reward depends on it."""
    if "response_tokens" not in sample and any(isinstance(part, LengthPenaltySpec) for part in spec.rewards):
        what, hint = "missing, and a length_penalty needs it", "give the number of tokens of the response"
        raise InputError("the samples", [Problem(f"samples.{index}.response_tokens", what, hint)])
    return {"response_tokens": 0} | sample
