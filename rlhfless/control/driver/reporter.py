"""The service-side host of a run: writes the run's events to the outbox and applies the service's answers.

Methods are called in the run's loop; `receive` and `state` are called in the client's thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from rlhfless.control.delivery import DriverState, LeaseWanted, PushAnswer
from rlhfless.control.driver.samples import SampleReader
from rlhfless.control.driver.service_client import Outbox
from rlhfless.control.lifecycle import Status
from rlhfless.control.objects import DeviceWork, FleetEngineNow, FunctionUsage, ReplicaNow
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.protocols import NoDevices
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.elastic_host import ElasticHost
from rlhfless.orchestrator.host import DevicesWanted, StopCause, Verdict
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_sizes import RunSizes
from rlhfless.records import Experience, Holding, Invocation, ReplicaState, in_order
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.scaling.accounting import usage
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.prices import PriceBook
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import NO_SAMPLES, finite
from rlhfless.util.text import storable

RECENT_STEPS = 8
"""Steps averaged for the remaining-time estimate."""

QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Quantiles stored for each histogram. The page shows them as bands."""


class Reporter(ElasticHost):
    """Host, progress display and metric sink of a run. Everything is reported to the service."""

    def __init__(self, outbox: Outbox, console: Console, steps: int, devices_s: float) -> None:
        super().__init__(console)
        self._outbox = outbox
        self._steps = steps
        self._devices_s = devices_s
        self._loop = asyncio.get_running_loop()
        self._answer: PushAnswer | None = None
        self._answered = asyncio.Event()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._done = 0
        self._reported_calls = 0
        self._wanted: DevicesWanted | None = None
        self._held: Callable[[str], int] = lambda _: 0
        self._usage: UsageReporter | None = None
        self._status: Status | None = None
        self.special_tokens: Sequence[str] = ()
        """Special tokens of the policy's tokenizer."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to deliver."""

    # -- to the service

    def put(self, item: str, /, **data: Any) -> None:
        """Put an item into the outbox. Raises StaleOutbox."""
        self._outbox.add(item, data)
        self.wake()

    def status(self, status: Status, reason: str) -> None:
        if status is not self._status:
            self._status = status
            self.put("status", status=status, reason=reason)

    def state(self) -> DriverState:
        pace, wanted = list(self._recent), self._wanted
        return DriverState(
            reason=storable(self._reason()),
            left_s=sum(pace) / len(pace) * max(self._steps - self._done, 0) if pace else None,
            lease=None
            if wanted is None
            else lease_of(self.sizes, wanted, self._held(wanted.kind), self._steps - self._done),
            replicas=[] if self._run is None else replicas_of(self._run),
            fleet=[] if self._run is None else shared_engines_of(self._run),
            worked=[] if self._run is None else self._worked(self._run),
        )

    def _worked(self, run: BaseRun) -> list[DeviceWork]:
        """Return the calls since the last push. Calls of a lost push are not sent again: only the page shows them."""
        count = run.ledger.calls
        calls = run.ledger.calls_after(self._reported_calls)
        self._reported_calls = count
        return worked_in(run, calls)

    def _reason(self) -> str:
        for what, since_s in reversed(list(self._waits)):
            waited_s = time.monotonic() - since_s
            return f"{what} ({waited_s:.0f} s)" if waited_s >= 5 else what
        return ""

    # -- from the service

    def receive(self, answer: PushAnswer) -> None:
        self._loop.call_soon_threadsafe(self._apply_answer, answer)

    def _apply_answer(self, answer: PushAnswer) -> None:
        self._answer = answer
        self._answered.set()
        if answer.desired_state == "cancel":
            self.cancel(None)
        elif answer.desired_state != "run" and not self._done and self._status is not Status.RUNNING:
            self.cancel(StopCause.PAUSE if answer.desired_state == "pause" else StopCause.YIELD)
        else:
            self._stop_if_blocked()  # some of its devices are lost, or another run's

    async def devices(self, wanted: DevicesWanted) -> int:
        """Wait until the service grants devices, and return their number. Raises NoDevices after
        `timeouts.devices_s`."""
        self.sizes.offer(wanted.sizes)
        self._wanted = wanted
        end_s = time.monotonic() + self._devices_s
        self.status(Status.PROVISIONING, f"asking for {wanted.minimum} x {wanted.kind}")
        with self._shown(f"waiting for {wanted.minimum} x {wanted.kind}"):
            while not self._may_hold:
                self.wake()
                self._answered.clear()
                try:
                    await asyncio.wait_for(self._answered.wait(), max(end_s - time.monotonic(), 0.001))
                except TimeoutError:
                    reason = self._answer.lease_reason if self._answer else "the service does not answer"
                    raise NoDevices(
                        f"waited {self._devices_s:.0f} s (timeouts.devices_s) for devices: {reason}"
                    ) from None
                if self._answer is not None and self._answer.lease_reason:
                    self._waits[-1] = (self._answer.lease_reason, math.inf)

        self.sizes.starts(self._may_hold)
        return self._may_hold

    @property
    def _may_hold(self) -> int:
        return self.sizes.among(self._granted) if self.sizes.elastic else self._granted

    @property
    def _granted(self) -> int:
        """Number of devices the run may hold; 0 while it waits."""
        return 0 if self._answer is None else self._answer.granted

    # -- rlhfless.orchestrator.host.Host

    def began(self, run: BaseRun, held: Callable[[str], int]) -> int | None:
        self._run, self._held = run, held
        self.put("resolved", spec=run.spec.model_dump(mode="json"))
        if decision := self.sizes.decision(self._done, self._answer.size_reason if self._answer else ""):
            run.ledger.add_decision(decision)
        self._usage = UsageReporter(run.ledger, self.put)
        return self._actors()

    def generated(self, run: RLRun, step: int, experience: Experience) -> None:
        samples = SampleReader(run.spec.rewards, self.special_tokens).of_step(experience)
        self.put("rollouts", step=step, samples=samples)

    def evaluated(self, run: RLRun, step: int, sampled: Experience, greedy: Experience) -> None:
        samples = SampleReader(run.spec.rewards, self.special_tokens).of_evaluation(sampled, greedy)
        self.put("held_out_rollouts", step=step, samples=samples)

    def after_step(self, run: BaseRun, step: int) -> Verdict:  # noqa: ARG002
        self.status(Status.RUNNING, "running")
        if self._usage is not None:
            self._usage.report_if_due(run.pools.values())
        desired_state = self._answer.desired_state if self._answer else "run"
        stop = {"pause": StopCause.PAUSE, "yield": StopCause.YIELD}.get(desired_state)
        return Verdict(stop or self._resize(), self._actors())

    def saved(self, checkpoints: Checkpoints) -> None:
        kept = checkpoints.all()
        best = checkpoints.best(kept)
        entries = [
            {
                "id": f"step-{each.notes.step:06d}",
                "step": each.notes.step,
                "location": each.location,
                "best": each is best,
                "score": checkpoints.score(each.notes),
                "metric": each.notes.metric,
                "created_at": time.time(),
            }
            for each in kept
        ]
        self.put("checkpoints", checkpoints=entries)

    def _actors(self) -> int | None:
        """Return the largest number of generation actors that fits the grant; None if the number is fixed."""
        wanted, run = self._wanted, self._run
        if wanted is None or run is None or wanted.maximum == wanted.minimum or self.sizes.elastic:
            return None
        more = max(self._granted - wanted.minimum, 0) // wanted.unit
        return run.spec.scaling.generation.min_actors + more

    async def settle(self) -> None:
        if self._usage is not None:
            await self._usage.report()

    # -- rlhfless.telemetry.sinks.RunProgress

    def changed(self, took_s: Mapping[str, float]) -> None:
        self.put("sized", devices=self.sizes.size, took_s=dict(took_s))

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        if what.startswith("step "):
            self.status(Status.RUNNING, "running")
            what = f"{what} of {self._steps}"
        with super().stage(what):
            yield

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None:
        super().resumed(step, attempt, earlier_s)
        self.put("resumed", step=step)

    def show(self, content: str) -> None:
        super().show(content)
        self.put("message", level="info", message=content)

    def say(self, text: str) -> None:
        super().say(text)
        self.put("message", level="warning", message=text)

    # -- rlhfless.telemetry.sinks.MetricSink

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        is_step = "step_s" in values
        if is_step:
            self._done = step
            self._recent.append(values["step_s"])
            self.sizes.step_done(values["step_s"])
        shown = {name: finite(value) for name, value in values.items()}
        for name, many in samples.items():
            quantiles = np.quantile(np.asarray(many, dtype=float), QUANTILES) if len(many) else ()
            shown |= {f"{name}/p{100 * q:.0f}": float(value) for q, value in zip(QUANTILES, quantiles, strict=False)}
        self.put("metrics", step=step, kind="step" if is_step else "evaluation", values=shown)

    def close(self) -> None:
        """Do nothing; the sink holds no resources."""


SHARE = 0.01
"""Upper bound on the share of time spent on usage reports: a report that took 0.1 s is repeated after 10 s."""

FEWEST_S = 5.0
"""Minimum time between two usage reports."""


def lease_of(sizes: RunSizes, wanted: DevicesWanted, held: int, steps_left: int) -> LeaseWanted:
    """Return what the service is told of the devices of a run that holds so many."""
    lease = LeaseWanted(
        kind=wanted.kind,
        minimum=wanted.minimum,
        maximum=wanted.maximum,
        unit=wanted.unit,
        held=held,
        tenants=wanted.tenants,
    )
    if not sizes.elastic:
        return lease
    changes = {"sizes": sizes.allowed, "seen_s": sizes.measured_s, "steps_left": steps_left, "change_s": sizes.change_s}
    return lease.model_copy(update=changes | {"minimum": sizes.allowed[0], "maximum": sizes.allowed[-1]})


def replicas_of(run: BaseRun) -> list[ReplicaNow]:
    """Return the replicas of a run. Thread-safe: a concurrent change appears in the next report."""
    return [
        ReplicaNow(
            function=str(replica.function),
            replica=replica.name,
            state=str(replica.state),
            since=replica.since_s,
            weights=replica.served,
            devices=[device.name for device in replica.allocation.devices],
            kind=replica.allocation.devices[0].kind,
            node=replica.allocation.devices[0].node,
            usd_per_hour=_rate(replica.state, replica.allocation, run.ledger.prices),
        )
        for pool in run.pools.values()
        for replica in list(pool.replicas())
    ]


def shared_engines_of(run: BaseRun) -> list[FleetEngineNow]:
    """Return the engines that a run shares with others, as they last told. Thread-safe, as `replicas_of`."""
    return [
        FleetEngineNow(
            kind=replica.allocation.devices[0].kind, devices=len(replica.allocation.devices), **asdict(replica.shared)
        )
        for pool in run.pools.values()
        for replica in list(pool.shared())
        if replica.shared is not None
    ]


def worked_in(run: BaseRun, calls: Sequence[Invocation]) -> list[DeviceWork]:
    """Return the calls whose replicas are still in a pool, with their devices."""
    pools = run.pools.values()
    places = {replica.incarnation: pool.places(replica) for pool in pools for replica in list(pool.replicas())}
    return [
        DeviceWork(
            function=str(call.function),
            work=str(call.work),
            step=call.step,
            devices=places[call.incarnation],
            start_s=call.start_s,
            end_s=call.end_s,
        )
        for call in calls
        if places.get(call.incarnation)
    ]


def _rate(state: ReplicaState, allocation: Allocation, prices: PriceBook) -> float:
    if not state.holds_device:
        return 0.0
    return float(sum(prices.device(device.kind).usd_per_hour * share for device, share in allocation.billed(state)))


class UsageReporter:
    def __init__(self, ledger: Ledger, put: Callable[..., None]) -> None:
        self._ledger = ledger
        self._put = put
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def report_if_due(self, pools: Collection[ReplicaPool]) -> None:
        """Report usage in the background if the last report is old enough."""
        if time.monotonic() < self._next_s or (self._task is not None and not self._task.done()):
            return
        for pool in pools:
            for replica in pool.replicas():
                replica.cut()
        self._task = asyncio.create_task(self.report())

    async def report(self) -> None:
        """Report the usage so far."""
        began_s = time.monotonic()
        records = self._ledger.records()
        rows = await asyncio.to_thread(bill, *records, self._ledger.prices)
        self._put("usage", functions=rows)
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(took_s / SHARE, FEWEST_S)


def bill(holdings: Sequence[Holding], invocations: Sequence[Invocation], prices: PriceBook) -> list[dict[str, Any]]:
    """Return usage by function and device kind, as objects.FunctionUsage.

    A call is counted under the device kind of its replica.
    """
    rows = []
    for function in in_order([*(held.function for held in holdings), *(call.function for call in invocations)]):
        calls = [call for call in invocations if call.function == function]
        held = [holding for holding in holdings if holding.function == function]
        for kind in dict.fromkeys(holding.device_kind for holding in held):
            of_kind = [holding for holding in held if holding.device_kind == kind]
            lives = {holding.incarnation for holding in of_kind}
            row = usage(function, of_kind, [call for call in calls if call.incarnation in lives], prices)
            figures = {name: getattr(row, name) for name in FunctionUsage.model_fields if hasattr(row, name)}
            rows.append({"function": str(function), "kind": kind} | figures)
    return rows
