"""Runs jobs in their own processes, so that their imports do not block the service and their faults do not end it.

A job takes and returns JSON. It is forked from a process that already has its imports, runs at low priority, and is
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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from rlhfless.control.errors import ApiError, refused
from rlhfless.control.process_limits import limit_memory
from rlhfless.spec.errors import InputError, Problem, SpecError
from rlhfless.util.errors import UserError

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Maximum number of concurrent jobs, because jobs take cores from runs."""

MOST_BYTES = 64 << 20
"""Maximum size of a job's answer in bytes."""

PRELOAD = ["rlhfless.control.compute.preload", "__main__"]
"""Modules imported by the process from which jobs are forked. Without `__main__`, each job would import it."""

END_S = 5.0
"""Maximum wait for the exit of a process that has answered or was killed."""

LEAST_BYTES = 1 << 30
"""Minimum memory limit of a job. Imports alone may take a third of it."""

FORKS = multiprocessing.get_context("forkserver")


class Runner:
    """The jobs of one service."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._check_slots = asyncio.Semaphore(AT_ONCE)
        FORKS.set_forkserver_preload(PRELOAD)

    async def prepare(self) -> None:
        """Start the process from which jobs are forked, so that the first job does not wait for it."""
        await asyncio.to_thread(forkserver.ensure_running)

    async def run(self, job: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of a job of rlhfless.control.compute.jobs.

        Raises ApiError: 422 if the job refuses the question, 504 if waiting for a slot and running take too long, 500
        if the job fails.
        """
        # A check refuses in milliseconds, so it does not wait for a simulation of minutes.
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
            answer = await _in_thread(lambda: exchange.answer(json.dumps(question).encode()))
        except asyncio.CancelledError:
            exchange.cancel()
            raise
        if "problems" in answer:
            raise refused(answer["source"], [Problem(**problem) for problem in answer["problems"]])
        if "fault" in answer:
            log.error("job %s failed: %s", job, answer["traceback"])
            raise ApiError(500, "internal_error", f"{answer['fault']}; the service's log has more")
        result: dict[str, Any] = answer["result"]
        return result


async def _in_thread(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call a function in a daemon thread.

    The exit of the service must not wait for a job that starts: on a busy machine, the imports of the process from
    which jobs are forked take half a minute.
    """
    answer: Future[dict[str, Any]] = Future()

    def work() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="job", daemon=True).start()
    return await asyncio.wrap_future(answer)


class _Exchange:
    """The exchange with a job's process: a question and its answer."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ours, self._theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=work, args=(self._theirs, job))
        self._cancelled = False

    def answer(self, question: bytes) -> dict[str, Any]:
        """Return the job's answer; blocks the calling thread. Raises ApiError (500) if the process ends without an
        answer."""
        with self._ours:
            try:
                with self._theirs:
                    if not self._cancelled:
                        self._process.start()
                if self._cancelled:
                    raise EOFError
                self._ours.send_bytes(question)
                answer: dict[str, Any] = json.loads(self._ours.recv_bytes(MOST_BYTES))
            except (EOFError, OSError):
                self._end()
                code = self._process.exitcode
                raise ApiError(500, "internal_error", f"{self._job} has ended without an answer ({code})") from None
        self._process.join(END_S)
        self._end()
        return answer

    def cancel(self) -> None:
        """Kill the process, or prevent its start; returns at once. A process that starts now is killed by the thread
        that starts it."""
        self._cancelled = True
        self._kill()

    def _end(self) -> None:
        self._kill()
        if self._process.pid is not None:
            self._process.join(END_S)

    def _kill(self) -> None:
        """Kill the process with its children, if it runs."""
        if self._process.pid is None or not self._process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not have its own group yet


def work(connection: Connection, name: str) -> None:
    """Run a job in its own process: receive the question over the connection, and send the answer back. Output of the
    job and its libraries is discarded."""
    from rlhfless.control.compute import jobs  # the process from which this process is forked has imported them

    os.setsid()  # lets the service kill the job together with its children
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
