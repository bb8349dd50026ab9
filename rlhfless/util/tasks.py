"""Concurrent coroutines that raise a single error instead of a group of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently, and return their results in order.

    The first failure cancels the others, waits for them, and is raised unwrapped. Not asyncio's TaskGroup: in Python
    3.11 it leaves the caller marked as cancelled after a failure (`Task.cancelling`), as if the run had been stopped.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    ended: set[asyncio.Task[Any]] = set()
    try:
        if tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        if left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await to_the_end(_settled(left))
        failures = {task: task.exception() for task in tasks if not task.cancelled()}
    for task, failure in failures.items():
        if failure is not None and task in ended:
            raise failure
    return [task.result() for task in tasks]


async def beside(work: Coroutine[Any, Any, T], companion: Coroutine[Any, Any, None] | None) -> T:
    """Return the result of `work` while running `companion`, which is cancelled when `work` ends. A failure of either
    cancels both and is raised."""
    if companion is None:
        return await work
    main, other = asyncio.create_task(work), asyncio.create_task(companion)
    try:
        await asyncio.wait([main, other], return_when=asyncio.FIRST_COMPLETED)
        if not main.done() and other.exception() is None:  # the companion ended without an error
            await asyncio.wait([main])
    finally:
        for task in (main, other):
            task.cancel()
        await to_the_end(_settled([main, other]))
    if not other.cancelled() and (failure := other.exception()) is not None:
        raise failure
    return main.result()


async def _settled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that must not be interrupted, such as a clean shutdown, even if this task is cancelled.

    Raises any error of the coroutine, or else CancelledError after its end.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


def is_stopping() -> bool:
    """Return whether this task was cancelled. A simultaneous fault may have replaced the CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
