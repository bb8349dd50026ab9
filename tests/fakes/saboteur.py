"""Deliberately breaks a live run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from rlhfless.fleet.replica import Replica
from rlhfless.orchestrator.recovery import Recovered
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.session import Session, open_session


async def until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def generating(run: RLRun, step: int) -> None:
    """Wait until the step's generation has produced tokens and is not finished."""

    def draws() -> bool:
        context = run.under_way.get(step)
        return context is not None and context.stage is not None and bool(context.stage.samples.progress)

    await until(draws)


def pid(replica: Replica) -> int:
    assert replica.info is not None
    return replica.info.pid


def engine(replica: Replica) -> psutil.Process:
    """Return the vLLM process of a generation actor."""
    (found,) = [child for child in psutil.Process(pid(replica)).children() if "vllm.loop" in " ".join(child.cmdline())]
    return found


async def kill_actor(run: RLRun) -> None:
    os.kill(pid(run.generation.serving()[0]), signal.SIGKILL)


async def stop_engine(run: RLRun) -> None:
    """Suspend an engine: it stays alive and its replica answers probes, but no tokens arrive."""
    engine(run.generation.serving()[0]).suspend()


async def stop_actor(run: RLRun) -> None:
    """Stop a replica that still holds its port."""
    os.kill(pid(run.generation.serving()[-1]), signal.SIGSTOP)


async def kill_learner(run: RLRun) -> None:
    os.kill(pid(run.learner.replicas()[0]), signal.SIGKILL)


async def kill_critic(run: RLRun) -> None:
    os.kill(pid(run.pools["critic"].replicas()[0]), signal.SIGKILL)


async def kill_rank(run: RLRun) -> None:
    info = run.learner.replicas()[0].info
    assert info is not None
    os.kill(info.pids[0], signal.SIGKILL)


async def stop_rank(run: RLRun) -> None:
    """Stop a rank: it stays alive, and the other ranks wait for it."""
    info = run.learner.replicas()[0].info
    assert info is not None
    os.kill(info.pids[0], signal.SIGSTOP)


async def kill_scoring(run: RLRun) -> None:
    for replica in run.pools["scoring"].replicas():
        os.kill(pid(replica), signal.SIGKILL)


async def drain_actor(run: RLRun) -> None:
    """Remove an actor during the step. This is not a fault; the actor is replaced before the next step."""
    await run.generation.remove(run.generation.serving()[0])


async def cut_store_file(run: RLRun) -> None:
    path = Path(run.published.location) / "0"
    os.truncate(path, path.stat().st_size // 2)


Sabotage = Callable[[RLRun], Awaitable[None]]


async def drive(start: Session, sabotage: Sabotage) -> tuple[Recovered, str]:
    """Drive a run while `sabotage` breaks it; return the recoveries and the digest of the last weights."""
    async with open_session(start) as (run, first):
        sabotaging = asyncio.create_task(sabotage(run))
        recovered = await drive_steps(start, run, first)
        await asyncio.wait([sabotaging], timeout=5)  # an actor that was drained may end after the last step
        assert sabotaging.done(), "a step ended before it was broken"
        sabotaging.result()
        return recovered, run.published.version.digest
