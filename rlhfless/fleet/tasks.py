"""Running things at the same time, with one error instead of a group of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
