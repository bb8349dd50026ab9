"""Read batches from recorded lengths: public traces of Azure and Mooncake, and traces of rlhfless itself.

Unusable rows are refused with file, row and reason.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import PREFIXES, FinishReason
from rlhfless.records.traces import read_tables
from rlhfless.sim.samples import EpisodeTurns, RolloutBatch
from rlhfless.util.errors import UserError
from rlhfless.util.text import parsed_json


class WorkloadError(UserError):
    """A trace that cannot be used. The message names the file, the row and the reason."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One row: the lengths of a prompt and its answer."""

    name: str
    prompt_tokens: int
    response_tokens: int


def refuse(path: Path, row: int, reason: str) -> NoReturn:
    """Raise WorkloadError. Rows count from 1, as in editors."""
    raise WorkloadError(f"{path}, row {row}: {reason}; correct the row or take it out")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that is not empty. Raises WorkloadError if the file cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}; name the trace's own file") from error


def whole_number(path: Path, row: int, column: str, value: object, least: int) -> int:
    """Return a count from a row. Raises WorkloadError for a value that is no whole number, or less than `least`."""
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
    """Return requests as steps of `prompts_per_step` prompts, in file order, without an incomplete last step.

    A trace has one answer per prompt, and a group has several: the other answers are taken from the prompts of the step
    with the nearest prompt lengths, so that lengths still depend on the prompt. Raises ValueError if there are fewer
    requests than prompts in a step.
    """
    if len(requests) < prompts_per_step:
        raise ValueError(f"the trace has {len(requests)} requests, and a step takes {prompts_per_step}; lower it")
    steps = len(requests) // prompts_per_step
    seeds = np.random.SeedSequence(seed).spawn(steps)
    return [
        _batch_of_requests(
            step + 1, requests[step * prompts_per_step :][:prompts_per_step], samples_per_prompt, seeds[step]
        )
        for step in range(steps)
    ]


def _batch_of_requests(
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


AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_azure(path: str | os.PathLike[str]) -> list[WorkloadRequest]:
    """Return the requests of a file, in its order. Times are not used: a step submits all its prompts at once.

    Raises WorkloadError with file, row and reason for a bad row.
    """
    path = Path(path)
    lines = read_lines(path)
    _, header = next(lines, (1, ""))
    if header.lstrip("\ufeff").split(",") != AZURE_COLUMNS:
        raise WorkloadError(f"{path}, row 1: the header is {header!r}; it must be {','.join(AZURE_COLUMNS)!r}")
    requests = []
    for row, line in lines:
        fields = next(csv.reader([line]))
        if len(fields) != len(AZURE_COLUMNS):
            refuse(path, row, f"it has {len(fields)} fields, not {len(AZURE_COLUMNS)}")
        prompt = whole_number(path, row, AZURE_COLUMNS[1], fields[1], least=1)
        response = whole_number(path, row, AZURE_COLUMNS[2], fields[2], least=1)
        requests.append(WorkloadRequest(f"row-{row}", prompt, response))
    return requests


def read_mooncake(path: str | os.PathLike[str]) -> list[WorkloadRequest]:
    """Return the requests of a file, in its order. Times are not used: a step submits all its prompts at once.

    Raises WorkloadError with file, row and reason for a bad row.
    """
    path = Path(path)
    requests = []
    for row, line in read_lines(path):
        try:
            fields = parsed_json(line)
        except ValueError as error:
            refuse(path, row, f"it is not JSON ({error})")
        if not isinstance(fields, dict):
            refuse(path, row, f"it is a {type(fields).__name__}, not an object")
        missing = [name for name in ("input_length", "output_length", "hash_ids") if name not in fields]
        if missing:
            refuse(path, row, f"it has no {missing[0]}")
        if not isinstance(fields["hash_ids"], list):
            refuse(path, row, f"hash_ids is a {type(fields['hash_ids']).__name__}, not a list")
        prompt = whole_number(path, row, "input_length", fields["input_length"], least=1)
        response = whole_number(path, row, "output_length", fields["output_length"], least=1)
        requests.append(WorkloadRequest(f"row-{row}", prompt, response))
    return requests


RECORDED_COLUMNS = ["step", "prompt_id", "sample_index", "prompt_tokens", "response_tokens", "finish_reason"]
EPISODE_COLUMNS = ["turns", "started_s", "finished_s", "turn_spans"]

Row = tuple[str, int, int, int, bool, EpisodeTurns | None]
"""prompt_id, sample_index, prompt_tokens, response_tokens, truncated, the turns of an episode"""


def read_runtime(folder: str | os.PathLike[str]) -> list[RolloutBatch]:
    """Return one batch per step that generated rollouts, in order.

    Raises TraceError for a trace that cannot be read; WorkloadError with file, row and reason for a bad row: a length
    below 1, a sample twice in a step, siblings whose prompts differ in length.
    """
    tables = read_tables(folder)
    table = tables["rollouts"].select(RECORDED_COLUMNS + EPISODE_COLUMNS)
    shared = _prefixes(tables["decisions"])
    steps: dict[int, list[Row]] = defaultdict(list)
    seen: set[tuple[int, str, int]] = set()
    prompts: dict[tuple[int, str], int] = {}
    for number, row in enumerate(zip(*(table[name].to_pylist() for name in table.column_names), strict=True), 1):
        step, prompt_id, sample_index, prompt, response, reason, *episode = row
        where = f"{Path(folder) / 'rollouts'}, row {number} (step {step}, prompt {prompt_id!r}, sample {sample_index})"
        if prompt < 1 or response < 1:
            raise WorkloadError(f"{where}: prompt_tokens {prompt}, response_tokens {response}; both must be at least 1")
        if (step, prompt_id, sample_index) in seen:
            raise WorkloadError(f"{where}: this sample was there before; a step that was done again must be cut out")
        if prompts.setdefault((step, prompt_id), prompt) != prompt:
            raise WorkloadError(f"{where}: prompt_tokens is {prompt}, and {prompts[step, prompt_id]} for its sibling")
        seen.add((step, prompt_id, sample_index))
        turns = _recorded_turns(where, response, *episode)
        steps[step].append((prompt_id, sample_index, prompt, response, reason == FinishReason.LENGTH, turns))
    return [_recorded_batch(step, sorted(rows), shared.get(step, {})) for step, rows in sorted(steps.items())]


def _recorded_turns(
    where: str, response: int, count: int, started_s: float, finished_s: float, spans: Sequence[Mapping[str, Any]]
) -> EpisodeTurns | None:
    """Return the turns of an episode, with its context before the first as `opening`; None without an environment.

    A sample waits from the end of a turn to the start of the next one, which includes reading and writing tokens.
    """
    if not spans:
        if count > 1:
            raise WorkloadError(f"{where}: {count} turns, and the trace of an older version has no times of turns")
        return None
    start, end, context, begun_s, ended_s = (
        np.array([span[name] for span in spans]) for name in ("start", "end", "context_tokens", "started_s", "ended_s")
    )
    return EpisodeTurns(
        np.array([len(spans)]),
        np.array([context[0]]),
        end - start[0],
        np.append(start[1:], response) - end,
        np.maximum(np.append(begun_s[1:], finished_s) - ended_s, 0.0),
        np.array([max(begun_s[0] - started_s, 0.0)]),
    )


def _prefixes(decisions: pa.Table) -> dict[int, dict[str, str]]:
    """Return the prefixes that each prompt shares with others (`PrefixTree.text`), by step and prompt."""
    rows = decisions.select(["step", "kind", "inputs"]).to_pylist()
    return {row["step"]: json.loads(row["inputs"]) for row in rows if row["kind"] == PREFIXES}


def _recorded_batch(step: int, rows: list[Row], shared: Mapping[str, str]) -> RolloutBatch:
    names = np.array([row[0] for row in rows])
    prompt_ids, first, group = np.unique(names, return_index=True, return_inverse=True)
    prompt_tokens = np.array([rows[i][2] for i in first], dtype=np.int64)
    turns = None
    if any(row[5] is not None for row in rows):
        turns = EpisodeTurns.joined([row[5] or EpisodeTurns.one(row[2], row[3]) for row in rows])
        shortest = np.full(len(prompt_ids), np.iinfo(np.int64).max)
        np.minimum.at(shortest, group, turns.opening)  # the opening of an episode has its prompt, as siblings share it
        prompt_tokens, turns = shortest, replace(turns, opening=turns.opening - shortest[group])
    return RolloutBatch(
        step=step,
        prompt_ids=tuple(str(name) for name in prompt_ids),
        prompt_tokens=prompt_tokens,
        group=group.astype(np.int64),
        response_tokens=np.array([row[3] for row in rows], dtype=np.int64),
        truncated=np.array([row[4] for row in rows], dtype=np.bool_),
        # An episode's opening differs from its prompt, so the prompts' shared prefixes say nothing about it.
        prefixes=PrefixTree.parse([shared.get(str(name), "") for name in prompt_ids]) if shared and not turns else None,
        turns=turns,
    )
