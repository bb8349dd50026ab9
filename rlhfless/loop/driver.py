"""A run from its start to its end: fleet up, weights out, evaluate, train, evaluate, checkpoint, fleet down.

Whatever happens, the functions are stopped, the ledger is written, and the weight store is removed. What dies on the
way is replaced (rlhfless.loop.recovery); what stops the run leaves a journal and checkpoints to resume from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhfless.fleet.pool import RECOVERABLE
from rlhfless.loop.evaluation import evaluate_held_out
from rlhfless.loop.opening import Opening, opened
from rlhfless.loop.recovery import Mended, Recovery
from rlhfless.loop.run import Run
from rlhfless.loop.step import train_step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves."""

    before: Mapping[str, float]
    """Held-out figures before the first step; empty without held-out prompts."""
    after: Mapping[str, float]
    steps: int
    wall_s: float
    """Of this attempt."""
    checkpoint: Path
    mended: Mended


@dataclass(frozen=True, slots=True)
class Driver:
    """Drives one attempt of a run."""

    opening: Opening

    async def execute(self) -> Outcome:
        """The whole run, or what is left of it.

        Raises what stopped it, such as WeightCheckFailed, RewardError, JournalError, CheckpointError, StaleCall; or
        the last of too many faults of one step (ReplicaLost, CallTimeout, FleetError).
        """
        began_s = time.time()
        async with opened(self.opening) as (run, first):
            mended = await self.drive(run, first)
        steps = self.opening.spec.steps
        after = {name.removeprefix("eval/"): v for name, v in run.latest.items() if name.startswith("eval/")}
        return Outcome(run.before, after, steps, time.time() - began_s, run.checkpoints.path(steps), mended)

    async def drive(self, run: Run, first: int) -> Mended:
        """All steps from `first` on; returns what was mended on the way. Raises as `execute` does."""
        recovery = Recovery(run)
        step = first
        while step <= self.opening.spec.steps:
            try:
                await self._advance(run, step)
                step += 1
            except RECOVERABLE as fault:
                with self.opening.console.waiting(f"recovering: {fault}"):
                    step = await recovery.after(step, fault)
        return recovery.mended

    async def _advance(self, run: Run, step: int) -> None:
        """One step with the evaluation and checkpoint that the spec wants after it. Step 0 is only evaluated."""
        spec = self.opening.spec
        if step:
            with self.opening.console.stage(f"step {step}"):
                await train_step(run, step)
        last = step == spec.steps
        if step in (0, spec.steps) or _due(step, spec.evaluation.every_steps):
            await self._evaluate(run, step)
        if last or (step and _due(step, spec.checkpoint.every_steps)):
            await run.checkpoint(step)

    async def _evaluate(self, run: Run, step: int) -> None:
        if not run.held_out:
            return
        with self.opening.console.waiting(f"evaluating on {len(run.held_out)} held-out prompts"):
            figures = await evaluate_held_out(run, step)
        named = {f"eval/{name}": value for name, value in figures.items()}
        run.latest.update(named)
        if step == 0:
            run.before = figures
        self.opening.sinks.emit(step, named)


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
