"""Worker processes for rewards that may block, hang or crash.

The pools of the standard library and of pebble run the parent's `__main__` again in each worker (here Ray's own), and
know only the task of a dead worker, not the sample. Our workers announce the samples they start, so a lost worker fails
only those, and the others go to another worker.

Every wait is bounded: a worker's start, the first message about a task, and then the limit in that message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlhfless.rewards.protocol import (
    Begin,
    Done,
    Failed,
    Report,
    RewardError,
    RewardSample,
    VerifierSpec,
    pieces,
)
from rlhfless.util.tasks import gather_or_cancel
from rlhfless.util.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

START_S = 120.0
"""Timeout of a worker's start with its imports: torch takes ten seconds on a cold disk."""

FIRST_WORD_S = 30.0
"""Timeout from a task to its first Begin: no user code runs before that."""

CHUNK = 8
"""Samples per task: few, so that workers end at about the same time. A message costs a tenth of a millisecond."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's rewards are ready."""

    whole: tuple[bool, ...]
    """`Verifier.whole` per reward."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A worker cannot create a reward, and exits."""

    reward: str
    what: str


@dataclass(frozen=True, slots=True)
class Task:
    """Score samples with reward number `reward`."""

    reward: int
    samples: tuple[RewardSample, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The task is done."""


class WorkerLost(Exception):
    """A worker died or hung, with the samples it had started; the message is the cause."""

    def __init__(self, cause: str, begun: tuple[int, ...]) -> None:
        super().__init__(cause)
        self.begun = begun


class Workers:
    """`count` processes, each with all rewards, started by `start` or when needed."""

    def __init__(self, specs: Sequence[VerifierSpec], count: int) -> None:
        self._all = [_Worker(specs) for _ in range(count)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._all:
            self._idle.put_nowait(worker)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._all if worker.pid is not None)

    async def start(self) -> None:
        """Start all workers. Raises RewardError if a reward cannot be created."""
        await gather_or_cancel(*(worker.ensure() for worker in self._all))

    def close(self) -> None:
        """Kill all workers. A later call starts them again."""
        for worker in self._all:
            worker.kill()

    async def score(self, reward: int, samples: Sequence[RewardSample], report: Report) -> None:
        """Report the outcome of every sample, by reward number `reward`."""
        if not samples:
            return
        async with self._worker() as worker:
            with suppress(RewardError):  # its tasks will report it
                await worker.ensure()
            whole = bool(worker.whole) and worker.whole[reward]
        size = len(samples) if whole else CHUNK
        parts = [tuple(range(len(samples)))[first : first + size] for first in range(0, len(samples), max(1, size))]
        await gather_or_cancel(*(self._score_part(reward, samples, part, report) for part in parts))

    async def _score_part(
        self, reward: int, samples: Sequence[RewardSample], indices: tuple[int, ...], report: Report
    ) -> None:
        """Score some samples; those left by a lost worker go to another, until all are reported."""
        todo = deque([indices])
        idle_deaths = 0
        while todo:
            part = todo.popleft()
            left = dict.fromkeys(part)

            def done(index: int, outcome: Any, left: dict[int, None] = left) -> None:
                del left[index]
                report(index, outcome)

            try:
                async with self._worker() as worker:
                    await worker.run(reward, samples, part, done)
            except RewardError as error:  # the worker that replaces a lost one does not start
                for index in tuple(left):
                    done(index, Failed(error.what))
            except WorkerLost as lost:
                logger.warning("reward worker lost: %s; %d of %d samples left", lost, len(left), len(part))
                idle_deaths += not lost.begun
                blamed = left if idle_deaths > 1 else lost.begun
                if len(blamed) == 1 or idle_deaths > 1:
                    for index in tuple(blamed):
                        done(index, Failed(str(lost)))
                else:
                    todo.extend(pieces(samples, blamed))
                if rest := tuple(index for index in left if index not in blamed):
                    todo.append(rest)

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[_Worker]:
        """Yield an idle worker; the caller bounds the wait (`scoring.timeout_s`)."""
        worker = await self._idle.get()
        try:
            yield worker
        except BaseException:
            worker.kill()  # its state is unknown: it may be anywhere in its task
            raise
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    """One process at a time; a lost one is replaced when it is needed next."""

    def __init__(self, specs: Sequence[VerifierSpec]) -> None:
        self._specs = tuple(specs)
        self._at_work = self._specs[0].label
        self._process = WorkerProcess("rlhfless.rewards.worker", lambda: f"reward {self._at_work}")
        self.whole: tuple[bool, ...] = ()
        """Per reward, whether it needs all samples in one task."""

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def ensure(self) -> None:
        """Start it if it is not running. Raises RewardError."""
        if self._process.is_running:
            return
        try:
            async with asyncio.timeout(START_S):
                await self._process.start()
                self._process.send(self._specs)
                answer = await self._process.receive()
        except TimeoutError:
            self.kill()
            what = f"its worker process did not start within {START_S:g} s: an import hangs"
            raise RewardError(self._specs[0].label, what) from None
        except (EOFError, OSError) as error:
            what = f"its worker process died at its start: {self._process.end()}"
            raise RewardError(self._specs[0].label, what) from error
        except asyncio.CancelledError:
            self.kill()
            raise
        if isinstance(answer, Broken):
            self.kill()
            raise RewardError(answer.reward, answer.what)
        assert isinstance(answer, Ready)
        self.whole = answer.whole

    async def run(self, reward: int, samples: Sequence[RewardSample], indices: tuple[int, ...], report: Report) -> None:
        """Report samples as they are done. Raises WorkerLost, or RewardError if it cannot start."""
        await self.ensure()
        self._at_work = self._specs[reward].label
        begun: tuple[int, ...] = ()
        limit_s = FIRST_WORD_S
        try:
            self._process.send(Task(reward, tuple(samples[index] for index in indices)))
            while True:
                async with asyncio.timeout(limit_s):
                    event = await self._process.receive()
                if isinstance(event, End):
                    return
                if isinstance(event, Begin):
                    begun, limit_s = tuple(indices[i] for i in event.indices), event.limit_s
                elif isinstance(event, Done):
                    begun = tuple(index for index in begun if index != indices[event.index])
                    report(indices[event.index], event.outcome)
        except TimeoutError:
            self.kill()
            raise WorkerLost(f"it took longer than {limit_s:g} s, and its worker process was killed", begun) from None
        except (EOFError, OSError) as error:
            raise WorkerLost(f"its worker process died: {self._process.end()}", begun) from error

    def kill(self) -> None:
        """Kill the process and its session. Idempotent."""
        self._process.kill()
