"""One job, in a process of its own: a question in JSON comes over a connection, and the answer goes back over it."""

from __future__ import annotations

import json
import os
import resource
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from rlhfless.control.compute import jobs
from rlhfless.spec.errors import InputError, SpecError, UserError

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


def main(connection: Connection, name: str) -> None:
    """Run the job. What it and its libraries print goes nowhere."""
    os.setsid()  # the service ends the job together with what the job has started
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    limit = _limited()
    question = json.loads(connection.recv_bytes())
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
    connection.send_bytes(json.dumps(answer, allow_nan=False).encode())
