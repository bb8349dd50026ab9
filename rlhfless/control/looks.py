"""Looking at the database again and again, and at once when something has changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from rlhfless.control.database.access import Unavailable

log = logging.getLogger(__name__)


class Looker:
    """Derive from it, and say in `look` what one look does."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._now = asyncio.Event()

    def soon(self) -> None:
        """Look at once: something has changed."""
        self._now.set()

    async def run(self) -> None:
        """Look again and again, until it is cancelled. A look that fails is repeated."""
        name = type(self).__name__
        while True:
            try:
                await self.look()
            except Unavailable as error:
                log.warning("%s: %s", name, error)
            except Exception:
                log.exception("%s: a look has failed; it is repeated", name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), self._every_s)
            self._now.clear()

    async def look(self) -> None:
        """One look."""
        raise NotImplementedError
