"""What must not be left half done is done, also if the task that waits for it is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlhfless.fleet.replica import ReplicaLost
from rlhfless.orchestrator.recovery import Recovery
from rlhfless.util.tasks import gather_or_cancel, is_stopping, to_the_end


async def test_what_is_cancelled_is_done_all_the_same() -> None:
    go, done = asyncio.Event(), []

    async def clean_up() -> None:
        await go.wait()
        done.append("cleaned up")

    task = asyncio.create_task(to_the_end(clean_up()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["cleaned up"]


async def test_its_result_and_its_error_come_through() -> None:
    async def gives() -> int:
        return 3

    async def fails() -> int:
        raise OSError("no")

    assert await to_the_end(gives()) == 3
    with pytest.raises(OSError, match="no"):
        await to_the_end(fails())


async def test_a_fault_that_comes_with_the_signal_is_not_mended() -> None:
    """Slurm ends the replicas and the driver at the same time; a run that is to stop does not do its step again."""
    stopping: list[bool] = []

    async def step() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            stopping.append(is_stopping())
            run: Any = None  # it would be asked to correct anything, and is not
            await Recovery(run).after(3, ReplicaLost("the actor died at the same time"))

    task = asyncio.create_task(step())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopping == [True]
    assert not is_stopping()


async def test_together_gives_results_in_order_and_nothing_of_nothing() -> None:
    async def gives(value: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert await gather_or_cancel(gives(1, 3), gives(2, 1), gives(3, 2)) == [1, 2, 3]
    assert await gather_or_cancel() == []


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_failure_ends_the_others_and_does_not_look_like_a_stop(turns: int) -> None:
    """With asyncio's TaskGroup of Python 3.11 the caller counted as cancelled: no fault was corrected any more."""
    ended: list[str] = []

    async def fails() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise OSError("first")

    async def works() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cleaned up")
            raise OSError("second")

    with pytest.raises(OSError, match="first"):
        await gather_or_cancel(works(), fails())
    assert ended == ["cleaned up"]
    assert not is_stopping()


async def test_a_cancelled_together_cancels_its_parts_and_waits_for_them() -> None:
    ended: list[str] = []

    async def works() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    task = asyncio.create_task(gather_or_cancel(works(), works()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned up"] * 2
