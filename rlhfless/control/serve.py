"""`rlhfless up`: runs the service of a data folder, and stops it.

SIGTERM, a closed terminal (SIGHUP, unless it is ignored) or a killed service leaves drivers and Ray running; the
folder's next service adopts them. Ctrl-C and `rlhfless down` stop runs cleanly, and then Ray; the runs resume at the
next `up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import uvicorn

from rlhfless.control import store
from rlhfless.control.api.app import make_app
from rlhfless.control.drivers import Drivers, JobDrivers, LocalDrivers, RayJobs
from rlhfless.control.keys import require_keys_of_quotas, require_safe
from rlhfless.control.process_limits import raise_priority, service_threads
from rlhfless.control.ray_host import HOST_S, RayHostSupervisor, RayJobHostSupervisor, stop_host
from rlhfless.control.service import Service, lock_data, open_database
from rlhfless.control.settings import ServiceSettings, read_announcement
from rlhfless.spec.errors import InputError, Problem

log = logging.getLogger(__name__)

GRACE_S = 2
"""Seconds that open streams have to end when the service stops."""

DRIVERS_S = 45.0
"""Maximum wait for drivers to stop: `timeouts.stop_s` is 25 s, and they also deliver their outboxes."""


async def serve(settings: ServiceSettings, say: Callable[[str], None], drivers: Drivers | None = None) -> None:
    """Serve until a signal. By default drivers are jobs of a remote cluster, or local processes.

    Raises DataInUse, NotPrivate, SecondService, NewerDatabase, NotSafe, or InputError if the port is taken.
    """
    raise_priority()
    asyncio.get_running_loop().set_default_executor(service_threads())
    with lock_data(settings):
        database = await asyncio.to_thread(open_database, settings)
        try:
            await asyncio.to_thread(require_safe, settings, database)
            await asyncio.to_thread(require_keys_of_quotas, settings, database)
            with _bound(settings) as listening:
                address, port = listening.getsockname()[:2]
                shown = f"[{address}]" if ":" in address else address
                jobs = RayJobs(settings.ray_address or "") if settings.elsewhere else None
                drivers = drivers or (JobDrivers(jobs) if jobs else LocalDrivers())
                service = Service(settings, database, drivers, f"http://{shown}:{port}")
                host = _host(service, jobs)
                config = uvicorn.Config(
                    make_app(service),
                    log_config=None,
                    access_log=False,
                    timeout_graceful_shutdown=GRACE_S,
                    timeout_keep_alive=65,
                )
                server = _Server(config)
                say(f"rlhfless is at {settings.public_url or service.address} (data: {settings.folder})")
                async with host, _signals(service, server, host.end, say):
                    await server.serve(sockets=[listening])
        finally:
            database.close()


def _host(service: Service, jobs: RayJobs | None) -> RayHostSupervisor | RayJobHostSupervisor:
    if jobs is None:
        settings = service.settings
        return RayHostSupervisor(settings.folder, settings.ray_address, lambda: service.supervisor.wanted)
    return RayJobHostSupervisor(jobs, service.url, service.host_token, lambda: service.ray() is not None)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Do nothing: `_signals` handles signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also shut down the app when uvicorn is forced to exit; otherwise it is cancelled with a traceback."""
        await super().shutdown(sockets)
        if self.force_exit:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), GRACE_S)


def _bound(settings: ServiceSettings) -> socket.socket:
    """Return the listening socket. Raises InputError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
        # Accepted sockets inherit the option. The event loop sets it only for sockets that name TCP as their protocol,
        # unlike this one. Without it, each answer after the first waits 40 ms for the client's delayed acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        what = f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}"
        hint = "name another with --port, or stop what has it"
        raise InputError("the service", [Problem("port", what, hint)]) from error
    return bound


@contextlib.asynccontextmanager
async def _signals(
    service: Service, server: uvicorn.Server, end_host: Callable[[], Awaitable[None]], say: Callable[[str], None]
) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    async def wind_down() -> None:
        """Stop runs cleanly, then Ray, then the service."""
        try:
            working = [run for run in await service.database.read(store.driven) if run.driver is not None]
            if working:
                say(f"stopping {len(working)} run(s); they resume at the next `rlhfless up`")
            service.supervisor.admits = False
            await service.supervisor.stop_all()
            end_s = time.monotonic() + DRIVERS_S
            while time.monotonic() < end_s:
                if not any(run.driver for run in await service.database.read(store.driven)):
                    break
                service.supervisor.wake()
                await asyncio.sleep(0.2)
            await end_host()
        finally:
            server.should_exit = True

    def leave() -> None:
        server.should_exit = True

    def interrupt() -> None:
        if ending:  # a second Ctrl-C stops at once
            server.should_exit = server.force_exit = True
        ending.append(asyncio.create_task(wind_down()))

    leaves = [signal.SIGTERM, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP])]
    for number in leaves:
        loop.add_signal_handler(number, leave)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
        await asyncio.gather(*ending, return_exceptions=True)
    finally:
        for number in (*leaves, signal.SIGINT):
            loop.remove_signal_handler(number)


def stop_service(settings: ServiceSettings) -> bool:
    """Stop the service of a data folder with its runs and its Ray. Return whether a service or Ray was running."""
    service, running = read_announcement(settings.folder), False
    with contextlib.suppress(psutil.Error):
        if service is not None:
            process = psutil.Process(service["pid"])
            running = "rlhfless" in " ".join(process.cmdline())
    if running:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(DRIVERS_S + HOST_S + GRACE_S)
    stopped = stop_host(settings.folder, HOST_S)
    return running or not stopped
