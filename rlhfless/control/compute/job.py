"""`python -m rlhfless.control.compute.job NAME`: one job; JSON on stdin, JSON on the last line of stdout."""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from rlhfless.control.compute import jobs
from rlhfless.spec.errors import InputError, SpecError, UserError

NICE = 10
"""Runs come first. The job asks for it itself: Python code between fork and exec of a service that has threads, and
libraries that must not be forked, can end the child."""

SHARE = 4
"""A job may have this part of the machine's, or the container's, memory: two of them run beside the service, and on
one machine beside runs. Without a limit, a scenario of many samples would have the kernel end any process it likes."""

LEAST_BYTES = 1 << 30
"""But at least so much, which the imports alone may take a third of."""

CONTAINER = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(machine: int, container: str) -> int:
    """What a job may have. `container`: the text of CONTAINER, which is `max` or empty where there is no limit."""
    there = min(machine, int(container)) if container.strip().isdecimal() else machine
    return max(there // SHARE, LEAST_BYTES)


def _limited() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_bytes(machine, CONTAINER.read_text() if CONTAINER.exists() else "")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def main(name: str) -> None:
    """Run the job."""
    os.nice(NICE)
    limit = _limited()
    question = json.load(sys.stdin)
    answer: dict[str, object]
    try:
        answer = {"found": jobs.JOBS[name](question)}
    except MemoryError:
        what = f"needs more than the {limit / 2**30:.1f} GiB of memory that a job may have here; ask for less"
        answer = {"source": name, "problems": [{"where": "", "what": what}]}
    except (InputError, SpecError) as error:
        answer = {"source": error.source, "problems": [asdict(problem) for problem in error.problems]}
    except UserError as error:
        answer = {"source": name, "problems": [{"where": "", "what": str(error)}]}
    except Exception as error:
        answer = {"fault": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    print("\n" + json.dumps(answer, allow_nan=False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
