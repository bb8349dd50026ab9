"""One job, in a process of its own: a question in JSON comes over a connection, and the answer goes back over it."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection

from rlhfless.control.compute import jobs
from rlhfless.control.memory import limit_memory
from rlhfless.spec.errors import InputError, SpecError, UserError

LEAST_BYTES = 1 << 30
"""A job may have at least so much, which the imports alone may take a third of."""


def main(connection: Connection, name: str) -> None:
    """Run the job. What it and its libraries print goes nowhere."""
    os.setsid()  # the service ends the job together with what the job has started
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    limit = limit_memory(LEAST_BYTES)
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
        answer = {"source": name, "problems": [{"where": error.where, "what": str(error)}]}
    except Exception as error:
        answer = {"fault": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    connection.send_bytes(json.dumps(answer, allow_nan=False).encode())
