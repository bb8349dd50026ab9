"""Drive the steps of a run: train, evaluate, checkpoint, and apply changes of the fleet, in the order of the schedule.

Lost replicas are replaced, and failed steps repeated (rlhfless.orchestrator.recovery).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from rlhfless.fleet.pool import RECOVERABLE
from rlhfless.orchestrator import step as rlhf
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.host import Host, RunPaused, StopCause
from rlhfless.orchestrator.recovery import Recovered, Recovery
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.schedules import Data, schedule_of
from rlhfless.records import Experience, StepRecord
from rlhfless.scaling.accounting import reached
from rlhfless.spec import RunSpec
from rlhfless.telemetry.sinks import MetricSinks, RunProgress

log = logging.getLogger(__name__)


class Stages(Protocol):
    """The stages of a step of one type of runs: rlhfless.orchestrator.step, or rlhfless.orchestrator.supervised."""

    @property
    def rollout(self) -> Callable[..., Awaitable[Data]]: ...

    @property
    def train(self) -> Callable[..., Awaitable[StepRecord]]: ...

    @property
    def evaluate_held_out(self) -> Callable[..., Awaitable[Mapping[str, float]]]: ...


class RunSession(Protocol):
    """The part of a session (rlhfless.orchestrator.session) that the steps of a run use."""

    @property
    def spec(self) -> RunSpec: ...

    @property
    def console(self) -> RunProgress: ...

    @property
    def sinks(self) -> MetricSinks: ...

    @property
    def host(self) -> Host: ...


async def drive_steps(session: RunSession, run: BaseRun, first: int, stages: Stages = rlhf) -> Recovered:
    """Run all steps from `first` in the order of the spec's schedule, and return the recoveries.

    Raises as rlhfless.orchestrator.driver.execute.
    """
    recovery, steps, last = Recovery(run), RunSteps(run, session, first, stages), session.spec.steps
    try:
        while steps.following <= last:
            try:
                if steps.following == 0:
                    await steps.close(0)
                await schedule_of(session.spec.schedule).drive(steps, steps.following, last)
            except RECOVERABLE as fault:
                with session.console.waiting(f"recovering: {fault}"):
                    steps.restart_at(await recovery.after(steps.following, fault))
    finally:
        await steps.end()
    return recovery.recovered


class RunSteps:
    """The steps of a run, for its schedule (implements rlhfless.orchestrator.schedules.Steps)."""

    def __init__(self, run: BaseRun, session: RunSession, first: int, stages: Stages = rlhf) -> None:
        self._run: Any = run
        self._stages = stages
        self._session = session
        if isinstance(run, RLRun):
            run.evaluated_samples = partial(session.host.evaluated, run)
        self.following = first
        """The first unfinished step. Step 0 is only evaluated."""
        self._rollouts: dict[int, asyncio.Task[Data]] = {}
        """Rollouts of steps that are not trained on yet, by step. They survive faults of other steps."""
        self._saving: asyncio.Task[None] | None = None
        """The checkpoint being written in the background."""

    def restart_at(self, step: int) -> None:
        """Set `step` as the next step to train on after a fault; drop failed rollouts, and keep all others."""
        failed = [number for number, task in self._rollouts.items() if task.done() and not _succeeded(task)]
        for number in failed:
            del self._rollouts[number]
        under_way = self._run.under_way
        for number in [number for number in under_way if number not in self._rollouts]:
            del under_way[number]
        self.following = step

    async def rollout(self, step: int) -> Data:
        """See Steps."""
        if step not in self._rollouts:
            self._rollouts[step] = asyncio.create_task(self._roll_out(step))
        return await asyncio.shield(self._rollouts[step])

    async def _roll_out(self, step: int) -> Data:
        with self._session.console.stage(f"step {step}"):
            log.info("step %d: rollout starts", step)
            data: Data = await self._stages.rollout(self._run, self._run.begin(step))
            return data

    async def train(self, step: int, experience: Data) -> None:
        """See Steps. Raises ValueError if the step is not the next one."""
        if step != self.following:
            raise ValueError(f"step {step} is trained on, but step {self.following} is the next; correct the schedule")
        self._rollouts.pop(step, None)
        with self._session.console.stage(f"step {step}"):
            if isinstance(experience, Experience):
                self._session.host.generated(self._run, step, experience)
            record = await self._stages.train(self._run, self._run.under_way[step], experience)
        what, reward = "step %d: trained in %.1f s, weights %s%s", record.metrics.get("reward_mean")
        score = "" if reward is None else f", reward_mean {reward:.4g}"
        log.info(what, step, record.end_s - record.start_s, self._run.digest or "not published", score)
        await self.close(step)

    async def close(self, step: int) -> None:
        """Evaluate, checkpoint, and apply changes of the fleet after a step. Raises RunPaused."""
        spec = self._session.spec
        if self._saving is not None and self._saving.done():
            await self._wait_for_checkpoint()
        due = step in (0, spec.steps) or _due(step, spec.evaluation.every_steps)
        evaluated = due and await self._evaluate(step)
        moves = 0 < step < spec.steps and self._run.trainers.must_move
        saves = moves or step == spec.steps or bool(step and _due(step, spec.checkpoint.every_steps))
        if step and evaluated and not saves:
            await self._wait_for_checkpoint()  # `improves` compares with its score
            saves = await asyncio.to_thread(self._run.improves, step)
        if saves:
            await self._save(step, whole=moves or step == spec.steps)
        self.following = step + 1  # the functions have learned this step: later faults do not repeat it
        await self._obey(step, saved=saves or not step)
        if moves:
            await self._run.move_trainers()
        self._run.clock.resume()

    async def _obey(self, step: int, *, saved: bool) -> None:
        """Apply the host's verdict and the spec's limits after a step. Raises RunPaused."""
        run = self._run
        verdict = self._session.host.after_step(run, step)
        if step == self._session.spec.steps:
            return
        limit = reached(self._session.spec.limits, run.ledger.spent(run.pools.values()))
        cause = StopCause.LIMIT if limit else verdict.stop
        if cause is not None:
            if not saved:
                await self._save(step, whole=True)
            elif self._saving is not None:
                await self._saving
            raise RunPaused(cause, limit or f"stopped after step {step}")
        if verdict.actors is not None:
            run.scaler.fleet.limit_actors(verdict.actors)

    async def _save(self, step: int, *, whole: bool) -> None:
        """Start a checkpoint once the previous one is written; with `whole`, wait until it is written."""
        await self._wait_for_checkpoint()
        begun = asyncio.Event()
        self._saving = asyncio.create_task(self._checkpoint(step, begun))
        beginning = asyncio.create_task(begun.wait())
        await asyncio.wait([beginning, self._saving], return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        if whole or self._saving.done():
            await self._saving
            self._saving = None

    async def _checkpoint(self, step: int, begun: asyncio.Event) -> None:
        await self._run.checkpoint(step, begun)
        self._session.host.saved(self._run.checkpoints)

    async def _wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint being written. If the learner died meanwhile, the run continues without it. Raises
        CheckpointError."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                await saving
        except RECOVERABLE as fault:
            log.warning("checkpoint incomplete; ignored: %s", fault)

    async def end(self) -> None:
        """Cancel the rollouts in progress and the checkpoint being written, which then does not count."""
        abandoned = [*self._rollouts.values(), *([self._saving] if self._saving else [])]
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)

    async def _evaluate(self, step: int) -> bool:
        """Evaluate on the held-out prompts; return False if there are none."""
        run = self._run
        if not run.held_out:
            return False
        with self._session.console.waiting(f"evaluating on {len(run.held_out)} held-out prompts"):
            figures = await self._stages.evaluate_held_out(run, step)
        named = {f"eval/{name}": value for name, value in figures.items()}
        run.latest.update(named)
        run.evaluated = step
        if step == 0:
            run.before = figures
        what = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        log.info("step %d: evaluated on %d held-out prompts: %s", step, len(run.held_out), what)
        self._session.sinks.emit(step, named)
        return True


def _succeeded(rollout: asyncio.Task[Data]) -> bool:
    return not rollout.cancelled() and rollout.exception() is None


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
