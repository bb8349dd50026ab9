"""Removes runs with their folders, when they have ended long enough ago."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.database.access import Database
from rlhfless.control.database.tables import RunRow
from rlhfless.control.lifecycle import ENDED
from rlhfless.control.periodic import PeriodicTask
from rlhfless.control.settings import ServiceSettings

log = logging.getLogger(__name__)

PERIOD_S = 600.0
"""How often runs are removed: their time is counted in days."""

SECONDS_PER_DAY = 86_400.0


class RetentionSweep(PeriodicTask):
    """The periodic removal of runs."""

    def __init__(self, database: Database, settings: ServiceSettings) -> None:
        super().__init__(PERIOD_S)
        self._database = database
        self._settings = settings

    async def tick(self) -> None:
        """Remove runs once."""
        await sweep(self._database, self._settings, time.time())


async def sweep(database: Database, settings: ServiceSettings, now_s: float) -> list[str]:
    """Remove the runs that ended more than `retention.days` ago; returns their ids."""
    if settings.retention.days is None:
        return []
    before_s = now_s - settings.retention.days * SECONDS_PER_DAY

    def forget(session: Session) -> list[tuple[str, str]]:
        query = select(RunRow).where(RunRow.status.in_(list(ENDED)), RunRow.finished_at < before_s)
        rows = list(session.scalars(query))
        for row in rows:
            store.forget_run(session, row.id)
            store.touch(session, row)
        return [(row.id, row.folder) for row in rows]

    removed = await database.write(forget)
    for run_id, folder in removed:
        await asyncio.to_thread(remove_folder, Path(folder), settings)
        log.info("removed %s, which has been over for %g days", run_id, settings.retention.days)
    return [run_id for run_id, _ in removed]


def remove_folder(folder: Path, settings: ServiceSettings) -> None:
    """Remove a run's folder, if it is below the service's folder of runs."""
    if folder.parent == settings.runs:
        shutil.rmtree(folder, ignore_errors=True)
