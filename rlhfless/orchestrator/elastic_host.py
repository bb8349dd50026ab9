"""Hosts that change the size of an elastic run: of a service's driver (rlhfless.control.driver.reporter), and of a run
from the command line that has joined a cluster.

The run stops at the end of its step, or at once if it has lost the devices for it, and starts from its checkpoint with
other devices, in the same process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.driver import Outcome, execute
from rlhfless.orchestrator.host import DevicesWanted, Host, RunPaused, StopCause, Verdict
from rlhfless.orchestrator.run_sizes import SIZES_FILE, RunSizes
from rlhfless.orchestrator.session import Session
from rlhfless.records import ReplicaState
from rlhfless.scaling.sizes import SpeedCurve
from rlhfless.scaling.sizing import SizedRun, divide
from rlhfless.telemetry.sinks import FOR_DEVICES, NO_SAMPLES, RunProgress
from rlhfless.util.clock import monotonic_s
from rlhfless.util.tasks import is_stopping

log = logging.getLogger(__name__)


class ElasticHost(Host):
    """Base of both hosts; also the run's progress display, which tells the parts of a change apart."""

    def __init__(self, console: RunProgress) -> None:
        self._console = console
        self._run: BaseRun | None = None
        self._waits: list[tuple[str, float]] = []
        self.sizes = RunSizes()
        self.cancel: Callable[[StopCause | None], None] = lambda _: None
        """Called to stop the run now. None cancels it for good."""

    @property
    def changes_size(self) -> bool:
        return self.sizes.stopping

    @property
    def _may_hold(self) -> int:
        """Number of devices with which the run can work now; 0 while it waits."""
        raise NotImplementedError

    def changed(self, took_s: Mapping[str, float]) -> None:
        """Handle the end of a change, with the seconds of its parts."""

    def say(self, text: str) -> None:
        """Tell the user."""
        log.warning("%s", text)

    def _stop_if_blocked(self) -> None:
        """Stop now if the run has lost devices without which it cannot end its step."""
        if self.sizes.elastic and self._may_hold < self.sizes.size and self._is_blocked:
            self.sizes.stops()
            self.cancel(StopCause.RESIZE)

    @property
    def _is_blocked(self) -> bool:
        """Whether the run waits for devices without which it cannot end its step: all replicas of a function start."""
        if not any(what.startswith(FOR_DEVICES) for what, _ in self._waits):
            return False
        pools = [] if self._run is None else [pool.replicas() for pool in self._run.pools.values()]
        starting = [all(each.state is ReplicaState.STARTING for each in replicas) for replicas in pools if replicas]
        return any(starting) or not pools

    def _resize(self) -> StopCause | None:
        """Return the cause of a stop after this step, if the run has another size from now on."""
        if not self.sizes.elastic or self._may_hold == self.sizes.size:
            return None
        self.sizes.stops()
        return StopCause.RESIZE

    # -- rlhfless.telemetry.sinks.RunProgress

    def _works(self) -> None:
        if took_s := self.sizes.works():
            self.changed(took_s)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if what.startswith("evaluating "):
            self._works()
        elif what.startswith("stopping "):
            self.sizes.part("stop")
        with self._shown(what), self._console.waiting(what):
            yield

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        if what.startswith("step "):
            self._works()
        with self._shown(what), self._console.stage(what):
            yield

    @contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        entry = (what, monotonic_s())
        self._waits.append(entry)
        place = len(self._waits) - 1
        try:
            yield
        finally:
            if entry in self._waits:
                self._waits.remove(entry)
            else:  # the text was replaced meanwhile
                del self._waits[place:]

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None:
        self._console.resumed(step, attempt, earlier_s)

    def show(self, content: str) -> None:
        self._console.show(content)


class ClusterHost(ElasticHost):
    """The host of a run from the command line. All devices of a cluster that it joins, and that stay, are its own."""

    watches_nodes = True

    def __init__(self, console: RunProgress, folder: Path, steps: int) -> None:
        super().__init__(console)
        self.sizes = RunSizes(folder / SIZES_FILE)
        self._steps_left = steps
        self._nodes: Sequence[int] = ()
        self._task: asyncio.Task[Any] | None = None
        self._called_off = False
        self.cancel = self._call_off

    def _call_off(self, _: StopCause | None) -> None:
        if self._task is not None and not self._called_off:
            self._called_off = True
            self._task.cancel()

    def is_resized(self) -> bool:
        """Return whether the work was called off for another size alone; then it may go on."""
        if not self._called_off or self._task is None or self._task.uncancel():
            return False
        self._called_off = False
        return True

    async def devices(self, wanted: DevicesWanted) -> int:
        self._task = asyncio.current_task()
        self.sizes.offer(wanted.sizes)
        self._nodes = (wanted.present,)
        size = await super().devices(wanted)
        size = self.sizes.among(size) or size
        self.sizes.starts(size)
        return size

    def began(self, run: BaseRun, held: Callable[[str], int]) -> int | None:  # noqa: ARG002
        self._run = run
        if decision := self.sizes.decision(run.spec.steps - self._steps_left, "nodes have come or gone"):
            run.ledger.add_decision(decision)
        return None

    def look(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._stop_if_blocked()

    @property
    def _may_hold(self) -> int:
        """The size that the function of the service's broker gives to a run alone."""
        sizes, size = self.sizes.allowed, self.sizes.size
        if sum(self._nodes) < sizes[0]:
            return sizes[0]  # it waits for its fewest devices
        assumed = SpeedCurve({each: SpeedCurve({}).at(each) for each in sizes})
        curve = assumed.measured({int(each): step_s for each, step_s in self.sizes.measured_s.items()})
        run = SizedRun("run", tuple(sizes), curve, self._steps_left, size, self.sizes.change_s)
        return divide([run], self._nodes).sizes["run"]

    def after_step(self, run: BaseRun, step: int) -> Verdict:
        self._steps_left = run.spec.steps - step
        return Verdict(self._resize())

    def changed(self, took_s: Mapping[str, float]) -> None:
        parts = ", ".join(f"{name.removesuffix('_s')} {seconds:.1f} s" for name, seconds in took_s.items())
        self.show(f"works on {self.sizes.size} device(s) after {sum(took_s.values()):.1f} s: {parts}")

    def say(self, text: str) -> None:
        super().say(text)
        self.show(text)

    # -- rlhfless.telemetry.sinks.MetricSink

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:  # noqa: ARG002
        if "step_s" in values:
            self.sizes.step_done(values["step_s"])

    def close(self) -> None:
        """Do nothing; the sink holds no resources."""


async def through_sizes(session: Session, host: ElasticHost, is_resized: Callable[[], bool]) -> Outcome:
    """Run to the end. If the run cannot start at a new size, it returns to a size that it can have.

    `is_resized`: whether a cancellation was for another size. Raises as `execute`.
    """
    while True:
        try:
            return await execute(session)
        except RunPaused as error:
            if error.cause is not StopCause.RESIZE:
                raise
        except asyncio.CancelledError:
            if not is_resized():
                raise
        except Exception as error:
            size = host.sizes.size
            if is_stopping() or not host.sizes.refuse():
                raise
            host.say(f"the run could not start on {size} devices, and does not ask for as many again: {error}")
        host.sizes.part("start")
