"""Requests of a public trace, one per row; and rows that cannot be used, refused with file, row and reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from rlhfless.sim.samples import RolloutBatch
from rlhfless.util.errors import UserError


class WorkloadError(UserError):
    """A trace that cannot be used. The message names the file, the row and the reason."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One row: the lengths of a prompt and its answer."""

    name: str
    prompt_tokens: int
    response_tokens: int


def refuse(path: Path, row: int, reason: str) -> NoReturn:
    """Raises WorkloadError. Rows count from 1, as editors show them."""
    raise WorkloadError(f"{path}, row {row}: {reason}; correct the row or take it out")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not empty. Raises WorkloadError if the file cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}; name the trace's own file") from error


def whole_number(path: Path, row: int, column: str, value: object, least: int) -> int:
    """A count from a row. Raises WorkloadError for a value that is no whole number, or less than `least`."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int):
        refuse(path, row, f"{column} is {value!r}, not a whole number")
    if number < least:
        refuse(path, row, f"{column} is {number}, less than {least}")
    return number


def batches_of(
    requests: Sequence[WorkloadRequest], *, prompts_per_step: int, samples_per_prompt: int, seed: int
) -> list[RolloutBatch]:
    """Requests as steps of `prompts_per_step` prompts, in the order of the file, without a last step that is not full.

    A trace has one answer per prompt, and a group has several: the other answers are drawn from the prompts of the step
    with the nearest prompt lengths, so that lengths still depend on the prompt.
    Raises ValueError if there are fewer requests than a step has prompts.
    """
    if len(requests) < prompts_per_step:
        raise ValueError(f"the trace has {len(requests)} requests, and a step takes {prompts_per_step}; lower it")
    steps = len(requests) // prompts_per_step
    seeds = np.random.SeedSequence(seed).spawn(steps)
    return [
        _batch(step + 1, requests[step * prompts_per_step :][:prompts_per_step], samples_per_prompt, seeds[step])
        for step in range(steps)
    ]


def _batch(
    step: int, requests: Sequence[WorkloadRequest], samples_per_prompt: int, seed: np.random.SeedSequence
) -> RolloutBatch:
    random = np.random.default_rng(seed)
    count = len(requests)
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    answers = np.array([request.response_tokens for request in requests], dtype=np.int64)
    by_length = np.argsort(prompts, kind="stable")
    place = np.empty(count, dtype=np.int64)
    place[by_length] = np.arange(count)
    reach = max(1, round(math.sqrt(count)))
    near = place[:, None] + random.integers(-reach, reach + 1, size=(count, samples_per_prompt))
    drawn = answers[by_length[np.clip(near, 0, count - 1)]]
    drawn[:, 0] = answers
    return RolloutBatch(
        step=step,
        prompt_ids=tuple(request.name for request in requests),
        prompt_tokens=prompts,
        group=np.repeat(np.arange(count), samples_per_prompt),
        response_tokens=drawn.ravel(),
    )
