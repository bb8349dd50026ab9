"""The progress of `rlhfless simulate` on standard error: a bar in a terminal, lines elsewhere.

Policies take different times per step, so the first estimate is rough; it is shown again when it has doubled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from rlhfless.sim.scenarios import Scenario
from rlhfless.telemetry.terminal import clock, count

FIRST_S = 3.0
"""Seconds until the first estimate: enough steps of a small scenario, and no long wait."""


class Estimates:
    """Estimates of the remaining time. `show_if_new` may be called from another thread.

    The pace is counted from the end of the first step, because that step also has the starts of processes.
    """

    def __init__(
        self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic, what: str = "steps"
    ) -> None:
        self._say = say
        self._what = what
        self._now = now
        self._began_s = now()
        self._first: tuple[float, int] | None = None
        self._said_s: float | None = None
        self._said_too_few = False
        self._lock = threading.Lock()
        self._done = self._total = 0

    def progress(self, done: int, total: int) -> None:
        """Note the number of finished steps, of all steps."""
        if done and self._first is None:
            self._first = self._now(), done
        self._done, self._total = done, total
        if self._now() - self._began_s >= FIRST_S:
            self.show_if_new()

    def show_if_new(self) -> None:
        """Show the estimate if there is a new one; called after FIRST_S."""
        with self._lock:
            left_s = self._left_s()
            done = f"{count(self._done)} of {count(self._total)} {self._what} in {clock(self._now() - self._began_s)}"
            if left_s is None:
                if not self._said_too_few:
                    self._said_too_few = True
                    self._say(f"{done}: too few for an estimate, which follows")
            elif self._said_s is None or left_s > 2 * self._said_s:
                self._said_s = left_s
                self._say(f"{done}: about {clock(left_s)} left")

    def _left_s(self) -> float | None:
        if self._first is None or self._done == self._first[1]:
            return None
        since_s, first = self._first
        return (self._now() - since_s) * (self._total - self._done) / (self._done - first)


@contextmanager
def shown(scenario: Scenario, policies: int, jobs: int) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a comparison. Yields a function that takes the numbers of finished and of all steps."""
    console = Console(stderr=True, highlight=False)
    runs = f"{policies} policies, {scenario.seeds} seeds, runs of {scenario.steps} steps, --jobs {jobs}"
    console.print(f"simulating {scenario.name}: {runs}", soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(scenario.name, total=None)
        estimates = Estimates(lambda text: bar.console.print(text, soft_wrap=True))

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            estimates.progress(done, total)

        timer = threading.Timer(FIRST_S, estimates.show_if_new)
        timer.daemon = True
        timer.start()
        try:
            yield show
        finally:
            timer.cancel()
