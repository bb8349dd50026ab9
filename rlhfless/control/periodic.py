"""Periodic work of the service, which can also be triggered at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Self

from rlhfless.control.database.access import Unavailable

log = logging.getLogger(__name__)


class PeriodicTask:
    """Calls `tick` periodically, and at once after `wake`, within its `async with` block."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._woken = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def wake(self) -> None:
        self._woken.set()

    async def _run(self) -> None:
        name = type(self).__name__
        while True:
            try:
                await self.tick()
            except Unavailable as error:
                log.warning("%s: %s; retrying", name, error)
            except Exception:
                log.exception("%s: tick failed; retrying", name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._period_s)
            self._woken.clear()

    async def tick(self) -> None:
        """Do the work once."""
        raise NotImplementedError
