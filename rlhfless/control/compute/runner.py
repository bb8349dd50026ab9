"""Runs jobs in processes of their own: the service's loop waits for none of their imports, and none can bring it down.

A job gets JSON and answers JSON. It is forked from a process that has its imports already, runs at low priority, and is
killed when it takes too long or its client has gone.
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
from multiprocessing import forkserver
from typing import Any

from rlhfless.control.compute.job import main
from rlhfless.control.errors import ApiError, refused
from rlhfless.spec.errors import Problem

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Jobs at a time: they take cores from runs."""

MOST_BYTES = 64 << 20
"""Largest answer of a job."""

PRELOAD = ["rlhfless.control.compute.preload", "__main__"]
"""What the process that jobs are forked from imports. Each job would import `__main__` otherwise."""

END_S = 5.0
"""Longest wait for a process that has answered, or was killed, to be gone."""

FORKS = multiprocessing.get_context("forkserver")


class Runner:
    """The jobs of one service."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)
        self._check_room = asyncio.Semaphore(AT_ONCE)
        FORKS.set_forkserver_preload(PRELOAD)

    async def prepare(self) -> None:
        """Start the process that jobs are forked from, so that the first job need not wait for it."""
        await asyncio.to_thread(forkserver.ensure_running)

    async def run(self, job: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a job of rlhfless.control.compute.jobs.

        Raises ApiError: 422 for what the job refuses, 503 if it waits too long for its turn, 504 if it takes too long.
        """
        # A check refuses in milliseconds: it does not wait until a simulation of minutes has ended.
        room = self._check_room if job.startswith("check_") else self._room
        try:
            async with asyncio.timeout(timeout_s), room:
                return await self._run(job, question)
        except TimeoutError:
            message = f"{job} took longer than {timeout_s:.0f} s; ask for less, or again later"
            raise ApiError(504, "timeout", message) from None

    async def _run(self, job: str, question: dict[str, Any]) -> dict[str, Any]:
        talk = _Talk(job)
        try:
            answer = await asyncio.to_thread(talk.answer, json.dumps(question).encode())
        except asyncio.CancelledError:
            talk.end()
            raise
        if "problems" in answer:
            raise refused(answer["source"], [Problem(**problem) for problem in answer["problems"]])
        if "fault" in answer:
            log.error("%s: %s", job, answer["traceback"])
            raise ApiError(500, "internal_error", f"{answer['fault']}; the service's log has more")
        result: dict[str, Any] = answer["found"]
        return result


class _Talk:
    """A question to a job's process, and its answer."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ours, self._theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=main, args=(self._theirs, job))
        self._starting = threading.Lock()
        self._called_off = False

    def answer(self, question: bytes) -> dict[str, Any]:
        """The job's answer; blocks its thread. Raises ApiError (500) if the process ends without one."""
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
        """Kill the process with all that it has started, if it is there; otherwise it never starts. Idempotent."""
        with self._starting:
            self._called_off = True
        if self._process.pid is None or not self._process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # also where it has no group of its own yet
        self._process.join(END_S)
