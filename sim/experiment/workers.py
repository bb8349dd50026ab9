"""Runs in parallel processes. The results are in the order of the tasks, however many there are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from types import TracebackType

from rlhfless.sim.experiment.run import RunResult, Task, run

OnProgress = Callable[[int, int], None]
"""Called with the number of runs done, and the number of runs known to be needed."""


def leave_ctrl_c_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the parent ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Workers:
    """One or more processes. With one, everything is done in this process."""

    def __init__(self, jobs: int, on_progress: OnProgress | None) -> None:
        # A new interpreter for each: a fork would copy this process without its threads.
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), leave_ctrl_c_to_parent) if jobs > 1 else None
        self._on_progress = on_progress
        self._done = 0

    def __enter__(self) -> Workers:
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

    def run(self, tasks: Sequence[Task], later: int) -> list[RunResult]:
        """Does all tasks; `later`: how many more will follow these. Raises what a run raised."""
        total = self._done + len(tasks) + later
        results = []
        for result in map(run, tasks) if self._pool is None else self._pool.map(run, tasks):
            results.append(result)
            self._done += 1
            if self._on_progress is not None:
                self._on_progress(self._done, total)
        return results
