"""A job's memory is bounded, and a job that needs more says so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlhfless.control.compute.job import memory_bytes

GIB = 1 << 30

BIG = """
from rlhfless.control.compute import job, jobs
jobs.JOBS["big"] = lambda question: {"bytes": len(bytearray(question["bytes"]))}
job.main("big")
"""


@pytest.mark.parametrize(
    ("machine", "container", "found"),
    [(24 * GIB, "", 6 * GIB), (24 * GIB, "max\n", 6 * GIB), (256 * GIB, f"{8 * GIB}\n", 2 * GIB), (2 * GIB, "", GIB)],
)
def test_a_quarter_of_what_there_is(machine: int, container: str, found: int) -> None:
    assert memory_bytes(machine, container) == found


def test_a_job_that_needs_more_says_so() -> None:
    def answer(wanted: int) -> dict[str, object]:
        question = json.dumps({"bytes": wanted})
        ended = subprocess.run(
            [sys.executable, "-c", BIG], input=question, capture_output=True, text=True, timeout=120, check=True
        )
        return json.loads(ended.stdout.splitlines()[-1])

    assert answer(1 << 20) == {"found": {"bytes": 1 << 20}}
    (problem,) = answer(1 << 44)["problems"]  # 16 TiB
    assert "GiB of memory that a job may have here; ask for less" in problem["what"]
