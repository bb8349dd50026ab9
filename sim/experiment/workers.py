"""Runs in parallel processes. The results have the order of the tasks, whatever the number of processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context
from types import TracebackType
from typing import Any

from rlhfless.sim.experiment.run import ExperimentTask, RunResult, run

OnProgress = Callable[[int, int], None]
"""Called with the number of steps done, of all runs together, and the number of steps known to be needed."""

LOOK_S = 0.5
"""Seconds between two updates of the progress of other processes."""

_done: Any = None
"""Steps that the processes have done together; set in each of them."""


def _begin(done: Any) -> None:
    """Prepares a process. Ctrl-C, which a terminal sends to all processes, is left to the parent, which ends its
    workers."""
    global _done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _done = done


def _run(task: ExperimentTask) -> RunResult:
    return run(task, _count)


def _count() -> None:
    with _done.get_lock():
        _done.value += 1


class ExperimentWorkers:
    """Runs tasks in `jobs` processes; with one job, in this process."""

    def __init__(self, jobs: int, on_progress: OnProgress | None) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            context = get_context("spawn")  # new interpreters: a fork would copy this process without its threads
            self._shared = context.Value("q", 0)
            self._pool = ProcessPoolExecutor(jobs, context, _begin, (self._shared,))
        self._on_progress = on_progress or (lambda *_: None)
        self._done = 0
        self._total = 0

    def __enter__(self) -> ExperimentWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if kind is not None and not issubclass(kind, Exception):  # interrupted: running tasks are not waited for
            for process in active_children():
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[ExperimentTask], later: int) -> list[RunResult]:
        """The results of all tasks; `later` counts the steps of tasks that will follow. Raises the error of a run."""
        self._total = self._done + sum(task.scenario.steps for task in tasks) + later
        self._on_progress(self._done, self._total)
        if self._pool is None:
            return [run(task, self._step) for task in tasks]
        futures = [self._pool.submit(_run, task) for task in tasks]
        pending = set(futures)
        while pending:
            ended, pending = wait(pending, LOOK_S)
            for future in ended:
                future.result()
            self._done = self._shared.value
            self._on_progress(self._done, self._total)
        return [future.result() for future in futures]

    def _step(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)
