"""The process that hosts the service's Ray: starts a private cluster or joins one, and reports its devices.

The host outlives the service, so work on Ray continues while the service is down. It reports every second, either to a
file in the data folder or, as a job of a cluster (RayJobHostSupervisor), to the service.

    python -m rlhfless.control.ray_host DATA_FOLDER [RAY_ADDRESS]
    python -m rlhfless.control.ray_host --tell SERVICE_URL
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from rlhfless.control.delivery import HostAnswer
from rlhfless.control.drivers import JOB_ENDED, PYTHON, RayJobs
from rlhfless.control.periodic import PeriodicTask
from rlhfless.control.settings import LOW_PRIORITY, environment_of_runs
from rlhfless.fleet.private_ray import FOLDER, remove
from rlhfless.util.errors import UserError
from rlhfless.util.folders import OTHERS, lock, replace_text

log = logging.getLogger(__name__)

RAY_FILE = "ray.json"
LOG_FILE = "ray-host.log"
FAULT_FILE = "ray-host.fault"
"""File with the reason why the last host could not start or join Ray. Removed once a host succeeds."""

WANTED_FILE = "wanted-devices.json"
"""File with the devices that the host of a joined cluster requests from its autoscaler, by kind."""

REPORT_S = 1.0
"""Time between a host's reports of the devices of its Ray."""

HOST_TOKEN = "RLHFLESS_HOST_TOKEN"
"""Environment variable with the host's secret, which the service checks."""

REPORT_TIMEOUT_S = 5.0
"""Maximum wait for the service to accept a report."""

LOCK_FILE = "ray-host.lock"
"""Locked by the host, so that a data folder has at most one host."""

HOST_S = 30.0
"""Maximum wait for Ray to stop."""

RESTART_S = 10.0
"""Minimum time between two starts of a host that exits at once because Ray cannot be started or joined."""

STALE_S = 15.0
"""Age after which a report counts as coming from a dead or hung host. Hosts report every second, and reading the nodes
of a large cluster takes less than 10 s."""


@dataclass(frozen=True, slots=True)
class RayReport:
    address: str
    pid: int
    """Process id of the host."""
    at: float
    devices: dict[str, int]
    """Device counts by kind."""
    free: dict[str, int]
    nodes: int
    by_node: dict[str, list[int]] = field(default_factory=dict)
    """Devices of each node, by kind."""


def read_ray(file: Path) -> RayReport | None:
    """Return the host's last report; None without a host, or if it hangs.

    The host outlives the service, so the report may come from another version.
    """
    try:
        values = json.loads(file.read_text("utf-8"))
        ray = RayReport(**{name: values[name] for name in RayReport.__slots__ if name in values})
    except (OSError, ValueError, TypeError):
        return None
    return ray if time.time() - ray.at < STALE_S and psutil.pid_exists(ray.pid) else None


def read_fault(folder: Path) -> str:
    """Return why the last host could not start or join Ray; empty if it succeeded or none has tried."""
    try:
        return (folder / FAULT_FILE).read_text("utf-8").strip()
    except OSError:
        return ""


class RayHostSupervisor(PeriodicTask):
    """Restarts the Ray host of a data folder while its block is active, and leaves the host running at the block's
    end."""

    def __init__(self, folder: Path, ray_address: str | None, wanted: Callable[[], Mapping[str, int] | None]) -> None:
        """`wanted`: devices to request from the autoscaler of a joined cluster, by kind; None to request nothing."""
        super().__init__(REPORT_S)
        self._folder = folder
        self._address = ray_address
        self._wanted = wanted
        self._told: Mapping[str, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    async def end(self) -> None:
        """Stop the host and its private Ray."""
        await self.__aexit__()
        await asyncio.to_thread(stop_host, self._folder, HOST_S)
        if self._process is not None and self._process.poll() is None:  # it has not reported yet
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, HOST_S)

    async def tick(self) -> None:
        running = self._process is not None and self._process.poll() is None
        present = running or read_ray(self._folder / RAY_FILE) is not None
        if not present and time.monotonic() - self._started_s > RESTART_S:
            self._start()
        if self._address and (wanted := self._wanted()) != self._told:
            replace_text(self._folder / WANTED_FILE, json.dumps(wanted))
            self._told = wanted

    def _start(self) -> None:
        self._started_s = time.monotonic()
        command = [*LOW_PRIORITY, sys.executable, "-m", "rlhfless.control.ray_host", str(self._folder)]
        with (self._folder / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *([self._address] if self._address else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment_of_runs(),
            )


class RayJobHostSupervisor(PeriodicTask):
    """Restarts the Ray host in a remote cluster while its block is active. The host reports the cluster's devices every
    second."""

    def __init__(self, jobs: RayJobs, service_url: str, token: str, reports: Callable[[], bool]) -> None:
        """Supervise a host. `token` is the host's secret; `reports` returns whether a host reports to the service."""
        super().__init__(REPORT_S)
        self._jobs = jobs
        self._url = service_url
        self._token = token
        self._reports = reports
        self._job = f"rlhfless-host-{secrets.token_hex(4)}"
        self._started_s = 0.0

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(httpx.HTTPError):
            await asyncio.to_thread(self._jobs.stop, self._job)

    async def tick(self) -> None:
        if not self._reports() and time.monotonic() - self._started_s > RESTART_S:
            try:
                await asyncio.to_thread(self._require)
            except httpx.HTTPError as error:
                log.warning("the head of the Ray cluster does not answer: %s", error)

    def _require(self) -> None:
        self._started_s = time.monotonic()
        job = self._jobs.find(self._job)
        if job is not None and job.status not in JOB_ENDED:
            return
        if job is not None:
            log.warning("Ray host job ended, starting another: %s", job.message)
            self._job = f"rlhfless-host-{secrets.token_hex(4)}"
        command = f"exec {PYTHON} -m rlhfless.control.ray_host --tell {shlex.quote(self._url)}"
        self._jobs.submit(self._job, command, {HOST_TOKEN: self._token})


def stop_host(folder: Path, timeout_s: float) -> bool:
    """Stop the host and its private Ray, and remove their files.

    Return whether the host stopped cleanly, or there was none.
    """
    ended = _end_host(folder, timeout_s)
    if (folder / FOLDER).is_dir() and (held := lock(folder / LOCK_FILE)) is not None:
        with held:
            remove(folder)
    return ended


def _end_host(folder: Path, timeout_s: float) -> bool:
    ray = read_ray(folder / RAY_FILE)
    if ray is None:
        return True
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(ray.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            return False
    (folder / RAY_FILE).unlink(missing_ok=True)
    return True


class HostReplaced(Exception):
    """The service has another host, so this one exits."""


Wanted = Mapping[str, int] | None
"""Devices to request from the cluster's autoscaler, by kind; None to leave the last request."""


async def host(ray_address: str | None, folder: Path, send: Callable[[RayReport], Awaitable[Wanted]]) -> None:
    """Start or join Ray, and send reports until SIGTERM, until Ray ends, or until `send` raises.

    `folder` holds the files of a private Ray.
    """
    from rlhfless.fleet.cluster import Cluster
    from rlhfless.scaling.prices import load_price_book
    from rlhfless.spec import PlacementSpec

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    spec = PlacementSpec(ray_address=ray_address)
    cluster, requested = await Cluster.start(spec, folder, load_price_book(None).kinds), None
    try:
        while not stop.is_set() and not cluster.lost:
            wanted = await send(await _report_of(cluster, ray_address))
            if wanted is not None and wanted != requested:
                await asyncio.to_thread(cluster.request, wanted)
                requested = wanted
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), REPORT_S)
    finally:
        await cluster.stop()


async def _report_of(cluster: Any, ray_address: str | None) -> RayReport:
    from rlhfless.scaling.placement import CPU_KIND

    nodes = await cluster.nodes("")
    devices: Counter[str] = Counter()
    free: Counter[str] = Counter()
    by_node: dict[str, list[int]] = defaultdict(list)
    for node in nodes:
        kinds = {CPU_KIND, node.gpu_kind} if node.gpus else {CPU_KIND}
        for kind in kinds:
            by_node[kind].append(node.count(kind))
            devices[kind] += node.count(kind)
            free[kind] += node.free(kind)
    return RayReport(
        ray_address or cluster.address, os.getpid(), time.time(), dict(devices), dict(free), len(nodes), dict(by_node)
    )


async def report_to_file(folder: Path, ray_address: str | None) -> None:
    async def write(report: RayReport) -> Wanted:
        replace_text(folder / RAY_FILE, json.dumps(asdict(report)))
        (folder / FAULT_FILE).unlink(missing_ok=True)
        try:
            wanted: Wanted = json.loads((folder / WANTED_FILE).read_text("utf-8"))
        except OSError:
            return None
        return wanted

    try:
        await host(ray_address, folder, write)
    except UserError as error:
        replace_text(folder / FAULT_FILE, str(error))
        raise
    finally:
        (folder / RAY_FILE).unlink(missing_ok=True)


async def report_to_service(service_url: str, token: str) -> None:
    """Report the cluster in which this process runs as a job."""
    client = httpx.AsyncClient(
        base_url=service_url, timeout=REPORT_TIMEOUT_S, headers={"Authorization": f"Bearer {token}"}
    )

    async def send(report: RayReport) -> Wanted:
        try:
            answer = await client.post("/internal/ray", json=asdict(report))
        except httpx.HTTPError as error:
            print(f"the service does not answer: {error}", flush=True)  # it comes back, or has another host by then
            return None
        if answer.status_code in (401, 404):
            raise HostReplaced
        if answer.is_error:
            print(f"the service refuses the report of this host: {answer.text[:500]}", flush=True)
            return None
        told = HostAnswer.model_validate_json(answer.content)
        if told.leaving:
            from rlhfless.fleet.leaving_watch import drain_nodes

            await asyncio.to_thread(drain_nodes, told.leaving)
        return told.wanted

    async with client:
        with contextlib.suppress(HostReplaced):
            await host("auto", Path(), send)


def main() -> None:
    os.umask(OTHERS)
    if sys.argv[1] == "--tell":
        asyncio.run(report_to_service(sys.argv[2], os.environ[HOST_TOKEN]))
        return
    folder = Path(sys.argv[1])
    if (held := lock(folder / LOCK_FILE)) is not None:
        with held:
            asyncio.run(report_to_file(folder, sys.argv[2] if len(sys.argv) > 2 else None))


if __name__ == "__main__":
    main()
