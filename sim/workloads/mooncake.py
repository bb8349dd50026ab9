"""Request traces in Mooncake's format: JSON lines with timestamp, input_length, output_length and hash_ids.

`hash_ids` name prefix blocks that requests share. They are checked and not used: the samples of one prompt share the
whole prompt, and engines find that out by themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlhfless.sim.workloads.rows import WorkloadRequest, read_lines, refuse, whole_number
from rlhfless.util.text import parsed_json


def read_mooncake(path: str | os.PathLike[str]) -> list[WorkloadRequest]:
    """The requests of a file, in its order. Times are not used: a step submits all its prompts at once.

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
