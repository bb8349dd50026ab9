"""One service: its database, the bus, the supervisor, and where its Ray is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import IO

from rlhfless.control import store
from rlhfless.control.bus import Bus
from rlhfless.control.compute.forecasts import Forecasts, Simulations
from rlhfless.control.compute.runner import Runner
from rlhfless.control.database.access import Database, database_of
from rlhfless.control.database.migrate import migrate
from rlhfless.control.database.tables import RunRow
from rlhfless.control.device_history import DeviceHistory
from rlhfless.control.drivers import Drivers
from rlhfless.control.objects.fleet import ReplicaNow
from rlhfless.control.pods import PodWatch, lister
from rlhfless.control.ray_host import RAY_FILE, STALE_S, RayNow, read_ray
from rlhfless.control.retention import RetentionSweep
from rlhfless.control.security.keys import Keys
from rlhfless.control.settings import SERVICE_FILE, ServiceSettings, open_data
from rlhfless.control.supervisor import Supervisor
from rlhfless.folders import lock, replace_text
from rlhfless.functions.loopback import is_loopback
from rlhfless.spec.errors import UserError

LOCK_FILE = "service.lock"


class DataInUse(UserError):
    """Another service has the data folder."""


class Service:
    """The parts of a service, and what it knows of its Ray."""

    def __init__(self, settings: ServiceSettings, database: Database, drivers: Drivers, address: str) -> None:
        """`address`: where it answers, such as http://127.0.0.1:8080."""
        self.settings = settings
        self.database = database
        self.address = address
        self.bus = Bus(asyncio.get_running_loop())
        self.keys = Keys(database, required=not is_loopback(settings.host))
        self.supervisor = Supervisor(database, settings, drivers, self.url, self.ray_address, self.device_counts)
        self.runner = Runner()
        self.forecasts = Forecasts(database, self.runner, self.device_counts)
        self.simulations = Simulations(database, self.runner)
        self.worked = DeviceHistory()
        self.replicas: dict[str, list[ReplicaNow]] = {}
        """By run: its replicas now, as its driver said last."""
        self.host_token = secrets.token_urlsafe(32)
        """What the host of a cluster elsewhere shows. Another service has another one; its predecessor's host ends."""
        self._ray_report: RayNow | None = None
        self.pods = PodWatch(lister(settings.ray_cluster, settings.watch_nodes)) if settings.ray_cluster else None
        database.on_commit = self.bus.publish

    @property
    def url(self) -> str:
        """Where clients and drivers reach it."""
        return self.settings.public_url or self.address

    def ray(self) -> RayNow | None:
        """The Ray that runs are on, and its devices; None while it is not there."""
        if not self.settings.elsewhere:
            return read_ray(self.settings.folder / RAY_FILE)
        report = self._ray_report
        return report if report is not None and time.time() - report.at < STALE_S else None

    def update_ray_report(self, report: RayNow) -> None:
        """Take a report of the host of a cluster elsewhere."""
        self._ray_report = replace(report, at=time.time())  # by this clock

    def ray_address(self) -> str:
        """Empty while there is none."""
        ray = self.ray()
        return ray.address if ray else ""

    def device_counts(self) -> dict[str, int]:
        """Devices that runs may hold together, by kind."""
        ray = self.ray()
        return (ray.devices if ray else {}) | self.settings.capacity

    async def run(self, run_id: str) -> RunRow:
        """A run. Raises ApiError (404)."""
        return await self.database.read(lambda session: store.run_of(session, run_id))

    def announce(self) -> None:
        """Write down where the service answers: for drivers that go on, and for the command line."""
        content = {"url": self.url, "pid": os.getpid(), "started_at": time.time()}
        replace_text(self.settings.folder / SERVICE_FILE, json.dumps(content))

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Within the block runs are looked after."""
        await self.keys.read()
        self.announce()
        sweep = RetentionSweep(self.database, self.settings)
        async with contextlib.AsyncExitStack() as stack:
            for task in (self.supervisor, self.forecasts, self.simulations, sweep, self.pods):
                if task is not None:
                    await stack.enter_async_context(task)
            stack.callback(asyncio.create_task(self.runner.prepare()).cancel)
            yield


def open_database(settings: ServiceSettings) -> Database:
    """The database for the one service that writes it. Raises InputError, SecondService or NewerDatabase."""
    database = database_of(settings)
    database.require_only_service()
    migrate(database.engine)
    return database


def lock_data(settings: ServiceSettings) -> IO[str]:
    """Lock the data folder for as long as the file is open. Raises DataInUse or NotPrivate."""
    folder = open_data(settings)
    file = lock(folder / LOCK_FILE)
    if file is None:
        raise DataInUse(f"another rlhfless service uses {folder}; stop it (rlhfless down), or name another --data")
    return file
