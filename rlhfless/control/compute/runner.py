"""Runs jobs in processes of their own: the service's loop waits for none of their imports, and none can bring it down.

A job gets JSON and answers JSON. It runs at low priority, and is killed when it takes too long or its client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from typing import Any

from rlhfless.control.errors import ApiError, refused
from rlhfless.spec.errors import Problem

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Jobs at a time: they take cores from runs."""

MOST_BYTES = 64 << 20
"""Largest answer of a job."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Jobs leave the other cores to runs; and each thread of these libraries would count towards a job's memory."""


class Runner:
    """Of one service."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self, job: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a job of rlhfless.control.compute.jobs.

        Raises ApiError: 422 for what the job refuses, 503 if it waits too long for its turn, 504 if it takes too long.
        """
        try:
            async with asyncio.timeout(timeout_s), self._room:
                return await self._run(job, question)
        except TimeoutError:
            message = f"{job} took longer than {timeout_s:.0f} s; ask for less, or again later"
            raise ApiError(504, "timeout", message) from None

    async def _run(self, job: str, question: dict[str, Any]) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlhfless.control.compute.job",
            job,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=MOST_BYTES,
            env={**os.environ, **ONE_THREAD},
        )
        try:
            output, _ = await process.communicate(json.dumps(question).encode())
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            raise ApiError(500, "internal_error", f"{job} has ended without an answer ({process.returncode})") from None
        if "problems" in answer:
            raise refused(answer["source"], [Problem(**problem) for problem in answer["problems"]])
        if "fault" in answer:
            log.error("%s: %s", job, answer["traceback"])
            raise ApiError(500, "internal_error", f"{answer['fault']}; the service's log has more")
        found: dict[str, Any] = answer["found"]
        return found
