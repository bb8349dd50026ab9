"""Running things at the same time, with one error instead of a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines at the same time and return their results, in order.

    The first failure cancels the others, which are waited for, and is raised as itself.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await what must not be left half done, such as an orderly stop, even if this task is cancelled meanwhile.

    Raises what the coroutine raised, or else CancelledError after its end.
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
    """This task was told to stop. A fault that came at the same moment may have taken the place of CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
