"""Start the functions of a run, load the weights to continue from, and stop the functions at its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlhfless.fleet.pool import RECOVERABLE, ReplicaPool
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.recovery import clear
from rlhfless.orchestrator.run import RLRun
from rlhfless.records import FunctionRole
from rlhfless.records.checkpoints import CheckpointError
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.telemetry.sinks import RunProgress
from rlhfless.util.tasks import gather_or_cancel, is_stopping

log = logging.getLogger(__name__)


async def start_run(run: BaseRun, console: RunProgress) -> int:
    """Start the fleet, and return the first step. Step 0 is the evaluation before step 1.

    A resumed run retries after a fault, up to `recovery.per_step` times. A first attempt does not, because it would
    fail again.
    """
    tries = run.spec.recovery.per_step if run.attempt > 1 else 0
    while True:
        try:
            return await _start(run, console)
        except RECOVERABLE as fault:
            if not tries or is_stopping():
                raise
            tries -= 1
            log.warning("start failed; retrying (%d tries left): %s", tries, fault)
            await clear(run, run.call(0))


async def stop_functions(pools: Sequence[ReplicaPool], *, engines_stay: bool = False) -> None:
    """Cancel all starts, and stop all replicas in order. `engines_stay`: except generation actors that are up."""
    await gather_or_cancel(*(pool.close() for pool in pools))
    stopped = (pool for pool in pools if not engines_stay or pool.kind.role is not FunctionRole.SAMPLES)
    await gather_or_cancel(*(pool.stop(*pool.replicas()) for pool in stopped))


async def start_functions(run: RLRun, actors: int) -> None:
    """Start the minimum of replicas that a run needs, in parallel, except that engines on shared GPUs start last.

    An engine that measures free memory counts concurrent allocations of other processes as its own.
    """
    others = (*run.helpers, *run.trainers.pools)
    ready = [pool.ready(run.call(0), slot) for pool in others for slot in range(len(pool.allocations))]
    engines = [(run.generation, actors)]
    if run.prefill is not None:
        engines.append((run.prefill, run.prefill.bounds.fewest))
    if any(_on_one_gpu(pool, others) for pool, _ in engines):
        await gather_or_cancel(*ready)
        ready = []
    await gather_or_cancel(*(pool.fill(fewest) for pool, fewest in engines), *ready)


def _on_one_gpu(pool: ReplicaPool, others: Sequence[ReplicaPool]) -> bool:
    def gpus(pool: ReplicaPool) -> set[str]:
        devices = (device for allocation in pool.allocations for device in allocation.devices)
        return {device.name for device in devices if device.kind != CPU_KIND}

    return any(gpus(pool) & gpus(other) for other in others)


async def _start(run: BaseRun, console: RunProgress) -> int:
    """Start the missing replicas, load the weights to continue from, and return the first step."""
    step = await (_start_rl(run, console) if isinstance(run, RLRun) else _start_learning(run, console))
    if step:
        console.show(f"resumed after step {step}, attempt {run.attempt}")
    return step + 1 if step else 0


async def _start_learning(run: BaseRun, console: RunProgress) -> int:
    """Start a run without actors, and return the last learned step."""
    with console.waiting("starting the learner and helpers"):
        await gather_or_cancel(*(pool.ready(run.call(0)) for pool in (*run.helpers, *run.trainers.pools)))
    with console.waiting("loading the weights to continue from"):
        return await run.restore()


async def _start_rl(run: RLRun, console: RunProgress) -> int:
    """Start a run with actors, load the weights into them, and return the last learned step."""
    actors = run.spec.scaling.generation.min_actors
    with console.waiting(f"starting {actors} generation actor(s), learner and helpers"):
        await start_functions(run, actors)
    with console.waiting("loading the weights into the engines"):
        step = await run.restore()
        await run.open_weights(step)
        newest = run.checkpoints.newest()
        if newest and newest.notes.digest != run.published.version.digest:
            raise CheckpointError(
                f"{newest.location} was saved with weights {newest.notes.digest}, and gives "
                f"{run.published.version.digest}: its files were changed. Remove it to resume from the one before"
            )
        await run.weights.sync(run.published, run.call(step))
    return step
