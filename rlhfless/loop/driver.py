"""A run from its start to its end: fleet up, weights out, evaluate, train, evaluate, checkpoint, fleet down.

Whatever happens, the functions are stopped, the ledger is written, and the weight store is removed.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.tasks import together
from rlhfless.functions.base import Call
from rlhfless.loop.evaluation import evaluate_held_out
from rlhfless.loop.holds import Keeper
from rlhfless.loop.launch import Launcher
from rlhfless.loop.ledger import Ledger
from rlhfless.loop.preflight import Prepared
from rlhfless.loop.prompts import PromptOrder
from rlhfless.loop.run import Run
from rlhfless.loop.step import train_step
from rlhfless.records import FunctionName, PublishedWeights, Work
from rlhfless.records.traces import TraceMeta, TraceWriter, describe_machine
from rlhfless.scaling.prices import load_price_book
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves."""

    before: Mapping[str, float]
    """Held-out figures before the first step; empty without held-out prompts."""
    after: Mapping[str, float]
    steps: int
    wall_s: float
    checkpoint: Path


@dataclass(frozen=True, slots=True)
class Driver:
    """Drives one run. The folder is the run's own."""

    spec: RunSpec
    prepared: Prepared
    run_id: str
    folder: Path
    console: Console
    sinks: MetricSinks
    attempt: int = 1

    async def execute(self) -> Outcome:
        """The whole run.

        Raises what stopped it, such as WeightCheckFailed, FleetError, CallTimeout, ReplicaLost or RewardError.
        """
        began_s = time.time()
        async with self.open_run() as run:
            before = await self._evaluate(run, 0)
            for step in range(1, self.spec.steps + 1):
                with self.console.stage(f"step {step}"):
                    record = await train_step(run, step)
                self.sinks.emit(record.step, record.metrics)
                after = await self._after_step(run, step)
            checkpoint = await self._checkpoint(run, self.spec.steps)
        return Outcome(before, after, self.spec.steps, time.time() - began_s, checkpoint)

    async def _after_step(self, run: Run, step: int) -> Mapping[str, float]:
        """Evaluation and checkpoint, where the spec wants them."""
        last = step == self.spec.steps
        every = self.spec.checkpoint.every_steps
        if every and step % every == 0 and not last:
            await self._checkpoint(run, step)
        every = self.spec.evaluation.every_steps
        if last or (every and step % every == 0):
            return await self._evaluate(run, step)
        return {}

    async def _evaluate(self, run: Run, step: int) -> Mapping[str, float]:
        with self.console.waiting(f"evaluating on {len(run.held_out)} held-out prompts"):
            figures = await evaluate_held_out(run, step)
        self.sinks.emit(step, {f"eval/{name}": value for name, value in figures.items()})
        return figures

    async def _checkpoint(self, run: Run, step: int) -> Path:
        folder = self.folder / "checkpoints" / f"step-{step:06d}"
        await run.checkpoint(run.call(step), str(folder.absolute()))
        return folder

    # -- start and stop

    @asynccontextmanager
    async def open_run(self) -> AsyncIterator[Run]:
        """The run with its fleet up and the first weights served."""
        prices = load_price_book(self.spec.scaling.prices)
        spec_values: dict[str, Any] = self.spec.model_dump(mode="json")
        meta = TraceMeta(self.run_id, self.attempt, prices.snapshot(), spec_values, describe_machine())
        ledger = Ledger(TraceWriter(self.folder / "trace", meta, self.spec.logging.record_tokens), prices)
        try:
            with self.console.waiting("starting Ray"):
                cluster = await Cluster.start(self.spec.placement)
            try:
                async with self._fleet(cluster, ledger) as run:
                    yield run
            finally:
                await asyncio.shield(cluster.stop())
        finally:
            ledger.close()

    @asynccontextmanager
    async def _fleet(self, cluster: Cluster, ledger: Ledger) -> AsyncIterator[Run]:
        call = Call(self.run_id, self.attempt, 0)
        launcher = Launcher.of(self.spec, self.prepared, call, cluster, ledger)
        generation, scoring, reward_model, reference, learner = launcher.pools()
        keepers: dict[FunctionName, Keeper] = {}
        pools = [pool for pool in (generation, scoring, reward_model, reference, learner) if pool]
        try:
            actors = self.spec.scaling.generation.min_actors
            with self.console.waiting(f"starting {actors} generation actor(s), learner and helpers"):
                others = [pool.ready() for pool in pools if pool is not generation]
                await together(generation.ensure(actors), *others)
            scaling = self.spec.scaling
            holds = ((scoring, scaling.hold_scoring), (reward_model, scaling.hold_scoring))
            for pool, hold in (*holds, (reference, scaling.hold_reference)):
                if pool is not None:
                    keepers[pool.function] = Keeper(pool, hold, ledger, lambda: pools)
            run = Run(
                run_id=self.run_id,
                attempt=self.attempt,
                spec=self.spec,
                order=PromptOrder(self.prepared.train, self.spec.seed, self.spec.prompts.shuffle),
                held_out=self.prepared.held_out,
                generation=generation,
                scoring=keepers[FunctionName.SCORING],
                reward_model=keepers.get(FunctionName.REWARD_MODEL),
                reference=keepers.get(FunctionName.REFERENCE),
                learner=learner,
                ledger=ledger,
                perturbed=await self._publish(learner, call, perturbed=True),
                published=await self._publish(learner, call, perturbed=False),
            )
            with self.console.waiting("checking that weight loads reach every tensor"):
                await together(*(run.prove_loading(actor, call) for actor in generation.replicas()))
                await generation.sync(run.published, call)
            yield run
        finally:
            with self.console.waiting("stopping all functions"):
                await together(*(keeper.close() for keeper in keepers.values()))
                await asyncio.shield(together(*(pool.stop(*pool.replicas()) for pool in pools)))
                for folder in (launcher.store_folder, Path(f"{launcher.store_folder}-cache")):
                    shutil.rmtree(folder, ignore_errors=True)

    async def _publish(self, learner: Any, call: Call, *, perturbed: bool) -> PublishedWeights:
        replica = await learner.ready()
        published: PublishedWeights = await replica.call(
            "publish",
            call,
            perturbed=perturbed,
            timeout_s=self.spec.timeouts.call_s,
            waiting_for="the first weights",
            work=Work.PUBLISH,
        )
        return published
