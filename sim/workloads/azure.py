"""Request traces in the format of Azure LLM inference 2023: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from rlhfless.sim.workloads.rows import WorkloadError, WorkloadRequest, read_lines, refuse, whole_number

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_azure(path: str | os.PathLike[str]) -> list[WorkloadRequest]:
    """The requests of a file, in its order. Times are not used: a step submits all its prompts at once.

    Raises WorkloadError with file, row and reason for a bad row.
    """
    path = Path(path)
    lines = read_lines(path)
    _, header = next(lines, (1, ""))
    if header.lstrip("\ufeff").split(",") != COLUMNS:
        raise WorkloadError(f"{path}, row 1: the header is {header!r}; it must be {','.join(COLUMNS)!r}")
    requests = []
    for row, line in lines:
        fields = next(csv.reader([line]))
        if len(fields) != len(COLUMNS):
            refuse(path, row, f"it has {len(fields)} fields, not {len(COLUMNS)}")
        prompt = whole_number(path, row, COLUMNS[1], fields[1], least=1)
        response = whole_number(path, row, COLUMNS[2], fields[2], least=1)
        requests.append(WorkloadRequest(f"row-{row}", prompt, response))
    return requests
