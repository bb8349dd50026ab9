"""The batches of a run, from the trace that the runtime wrote."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import PREFIXES, FinishReason
from rlhfless.records.traces import read_tables
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.workloads.rows import WorkloadError

COLUMNS = ["step", "prompt_id", "sample_index", "prompt_tokens", "response_tokens", "finish_reason"]

Row = tuple[str, int, int, int, bool]  # prompt_id, sample_index, prompt_tokens, response_tokens, truncated


def read_runtime(folder: str | os.PathLike[str]) -> list[RolloutBatch]:
    """One batch per step that drew rollouts, in order.

    Raises TraceError for a trace that cannot be read; WorkloadError with file, row and reason for a bad row: a length
    below 1, a sample twice in a step, siblings whose prompts differ in length.
    """
    tables = read_tables(folder)
    table = tables["rollouts"].select(COLUMNS)
    shared = _prefixes(tables["decisions"])
    steps: dict[int, list[Row]] = defaultdict(list)
    seen: set[tuple[int, str, int]] = set()
    prompts: dict[tuple[int, str], int] = {}
    for number, row in enumerate(zip(*(table[name].to_pylist() for name in COLUMNS), strict=True), 1):
        step, prompt_id, sample_index, prompt, response, reason = row
        where = f"{Path(folder) / 'rollouts'}, row {number} (step {step}, prompt {prompt_id!r}, sample {sample_index})"
        if prompt < 1 or response < 1:
            raise WorkloadError(f"{where}: prompt_tokens {prompt}, response_tokens {response}; both must be at least 1")
        if (step, prompt_id, sample_index) in seen:
            raise WorkloadError(f"{where}: this sample was there before; a step that was done again must be cut out")
        if prompts.setdefault((step, prompt_id), prompt) != prompt:
            raise WorkloadError(f"{where}: prompt_tokens is {prompt}, and {prompts[step, prompt_id]} for its sibling")
        seen.add((step, prompt_id, sample_index))
        steps[step].append((prompt_id, sample_index, prompt, response, reason == FinishReason.LENGTH))
    return [_batch(step, sorted(rows), shared.get(step, {})) for step, rows in sorted(steps.items())]


def _prefixes(decisions: pa.Table) -> dict[int, dict[str, str]]:
    """By step and prompt, what it shares with others (`PrefixTree.text`)."""
    rows = decisions.select(["step", "kind", "inputs"]).to_pylist()
    return {row["step"]: json.loads(row["inputs"]) for row in rows if row["kind"] == PREFIXES}


def _batch(step: int, rows: list[Row], shared: Mapping[str, str]) -> RolloutBatch:
    names = np.array([row[0] for row in rows])
    prompt_ids, first, group = np.unique(names, return_index=True, return_inverse=True)
    return RolloutBatch(
        step=step,
        prompt_ids=tuple(str(name) for name in prompt_ids),
        prompt_tokens=np.array([rows[i][2] for i in first], dtype=np.int64),
        group=group.astype(np.int64),
        response_tokens=np.array([row[3] for row in rows], dtype=np.int64),
        truncated=np.array([row[4] for row in rows], dtype=np.bool_),
        prefixes=PrefixTree.parse([shared.get(str(name), "") for name in prompt_ids]) if shared else None,
    )
