"""Runs jobs in processes of their own, so that their imports do not block the service, and their faults do not end it.

A job takes and returns JSON. It is forked from a process that has its imports already, runs at low priority, and is
killed when it takes too long or its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import asdict
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from rlhfless.control.errors import ApiError, refused
from rlhfless.control.memory_limits import limit_memory
from rlhfless.spec.errors import InputError, Problem, SpecError
from rlhfless.util.errors import UserError

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Most jobs at a time: they take cores from runs."""

MOST_BYTES = 64 << 20
"""Largest answer of a job, in bytes."""

PRELOAD = ["rlhfless.control.compute.preload", "__main__"]
"""Modules that the process imports from which jobs are forked. Without `__main__` each job would import that."""

END_S = 5.0
"""Longest wait for the end of a process that has answered, or was killed."""

LEAST_BYTES = 1 << 30
"""Memory that a job may have at least; the imports alone may take a third of it."""

FORKS = multiprocessing.get_context("forkserver")


class Runner:
    """The jobs of one service."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._check_slots = asyncio.Semaphore(AT_ONCE)
        FORKS.set_forkserver_preload(PRELOAD)

    async def prepare(self) -> None:
        """Start the process that jobs are forked from, so that the first job need not wait for it."""
        await asyncio.to_thread(forkserver.ensure_running)

    async def run(self, job: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a job of rlhfless.control.compute.jobs.

        Raises ApiError: 422 for what the job refuses, 503 if it waits too long for its turn, 504 if it takes too long.
        """
        # A check refuses in milliseconds: it does not wait until a simulation of minutes has ended.
        slots = self._check_slots if job.startswith("check_") else self._slots
        try:
            async with asyncio.timeout(timeout_s), slots:
                return await self._run(job, question)
        except TimeoutError:
            message = f"{job} took longer than {timeout_s:.0f} s; ask for less, or again later"
            raise ApiError(504, "timeout", message) from None

    async def _run(self, job: str, question: dict[str, Any]) -> dict[str, Any]:
        exchange = _Exchange(job)
        try:
            answer = await asyncio.to_thread(exchange.answer, json.dumps(question).encode())
        except asyncio.CancelledError:
            exchange.end()
            raise
        if "problems" in answer:
            raise refused(answer["source"], [Problem(**problem) for problem in answer["problems"]])
        if "fault" in answer:
            log.error("%s: %s", job, answer["traceback"])
            raise ApiError(500, "internal_error", f"{answer['fault']}; the service's log has more")
        result: dict[str, Any] = answer["result"]
        return result


class _Exchange:
    """The exchange with a job's process: a question and its answer."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ours, self._theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=work, args=(self._theirs, job))
        self._starting = threading.Lock()
        self._called_off = False

    def answer(self, question: bytes) -> dict[str, Any]:
        """The job's answer; blocks the calling thread. Raises ApiError (500) if the process ends without one."""
        with self._ours:
            try:
                with self._starting, self._theirs:
                    if not self._called_off:
                        self._process.start()
                self._ours.send_bytes(question)
                answer: dict[str, Any] = json.loads(self._ours.recv_bytes(MOST_BYTES))
            except (EOFError, OSError):
                self.end()
                code = self._process.exitcode
                raise ApiError(500, "internal_error", f"{self._job} has ended without an answer ({code})") from None
        self._process.join(END_S)
        self.end()
        return answer

    def end(self) -> None:
        """Kill the process with its children; a process that has not started never will. Idempotent."""
        with self._starting:
            self._called_off = True
        if self._process.pid is None or not self._process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may have no group of its own yet
        self._process.join(END_S)


def work(connection: Connection, name: str) -> None:
    """Run a job in its own process: a question comes over the connection, and the answer goes back over it. What the
    job and its libraries print goes nowhere."""
    from rlhfless.control.compute import jobs  # the process that this one is forked from has imported them

    os.setsid()  # the service ends the job together with what the job has started
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    limit = limit_memory(LEAST_BYTES)
    question = json.loads(connection.recv_bytes())
    answer: dict[str, object]
    try:
        answer = {"result": jobs.JOBS[name](question)}
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
