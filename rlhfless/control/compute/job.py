"""`python -m rlhfless.control.compute.job NAME`: one job; JSON on stdin, JSON on the last line of stdout."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from rlhfless.control.compute import jobs
from rlhfless.spec.errors import InputError, SpecError, UserError

NICE = 10
"""Runs come first. The job asks for it itself: Python code between fork and exec of a service that has threads, and
libraries that must not be forked, can end the child."""


def main(name: str) -> None:
    """Run the job."""
    os.nice(NICE)
    question = json.load(sys.stdin)
    answer: dict[str, object]
    try:
        answer = {"found": jobs.JOBS[name](question)}
    except (InputError, SpecError) as error:
        answer = {"source": error.source, "problems": [asdict(problem) for problem in error.problems]}
    except UserError as error:
        answer = {"source": name, "problems": [{"where": "", "what": str(error)}]}
    except Exception as error:
        answer = {"fault": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(answer, allow_nan=False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
