"""Removes runs, with their folders, when they have been over for long enough."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.database.access import Database, Unavailable
from rlhfless.control.database.tables import RunRow
from rlhfless.control.lifecycle import ENDED
from rlhfless.control.settings import ServiceSettings

log = logging.getLogger(__name__)

LOOK_S = 600.0
"""How often: days are what is waited for."""

SECONDS_PER_DAY = 86_400.0


async def sweep_for_ever(database: Database, settings: ServiceSettings) -> None:
    """Sweep again and again, until it is cancelled."""
    while settings.retention.days is not None:
        try:
            await sweep(database, settings, time.time())
        except Unavailable as error:
            log.warning("retention: %s", error)
        await asyncio.sleep(LOOK_S)


async def sweep(database: Database, settings: ServiceSettings, now_s: float) -> list[str]:
    """Remove what is over since `retention.days`; returns the ids of the runs."""
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

    gone = await database.write(forget)
    for run_id, folder in gone:
        await asyncio.to_thread(remove_folder, Path(folder), settings)
        log.info("removed %s, which has been over for %g days", run_id, settings.retention.days)
    return [run_id for run_id, _ in gone]


def remove_folder(folder: Path, settings: ServiceSettings) -> None:
    """Remove a run's folder; nothing that is not one of the service's."""
    if folder.parent == settings.runs:
        shutil.rmtree(folder, ignore_errors=True)
