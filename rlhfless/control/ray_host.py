"""The process that holds the service's Ray: it starts a private one, or joins one, and says which devices are there.

It is a process of its own, which outlives the service: what runs on Ray goes on while the service is away. It writes
what it sees into a file of the data folder, every second.

    python -m rlhfless.control.ray_host DATA_FOLDER [RAY_ADDRESS]
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

BEHIND = ("nice", "-n", "5")
"""Runs leave the machine's cores to the service for the milliseconds that an answer takes, and lose nothing by it: all
their processes are alike, and the service is idle otherwise."""

RAY_FILE = "ray.json"
LOG_FILE = "ray-host.log"

LOOK_S = 1.0

LOCK_FILE = "ray-host.lock"
"""Held by the host: a data folder has one."""

AGAIN_S = 10.0
"""Between two starts of a host that ends at once, because Ray cannot start or be joined."""

STALE_S = 15.0
"""A file that is older is of a host that hangs or has died: it writes every second, and reading the nodes of a large
cluster takes less than ten."""


@dataclass(frozen=True, slots=True)
class RayNow:
    """The service's Ray."""

    address: str
    pid: int
    """Of the host."""
    at: float
    devices: dict[str, int]
    """By kind."""
    free: dict[str, int]
    nodes: int


def read_ray(file: Path) -> RayNow | None:
    """What the host has written last; None if there is none, or it hangs."""
    try:
        found = RayNow(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if time.time() - found.at < STALE_S and psutil.pid_exists(found.pid) else None


class HostKeeper:
    """Keeps a host of a data folder alive within its block, which leaves the host as it is."""

    def __init__(self, folder: Path, ray_address: str | None) -> None:
        self._folder = folder
        self._address = ray_address
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            running = self._process is not None and self._process.poll() is None
            there = running or read_ray(self._folder / RAY_FILE) is not None
            if not there and time.monotonic() - self._started_s > AGAIN_S:
                self._start()
            await asyncio.sleep(LOOK_S)

    def _start(self) -> None:
        self._started_s = time.monotonic()
        command = [*BEHIND, sys.executable, "-m", "rlhfless.control.ray_host", str(self._folder)]
        with (self._folder / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *([self._address] if self._address else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def stop_host(folder: Path, timeout_s: float) -> bool:
    """End the host, and a private Ray with it; returns whether it is gone."""
    found = read_ray(folder / RAY_FILE)
    if found is None:
        return True
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(found.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            return False
    (folder / RAY_FILE).unlink(missing_ok=True)
    return True


async def host(folder: Path, ray_address: str | None) -> None:
    """Start or join Ray, and write down what is there until SIGTERM, or until Ray has ended."""
    from rlhfless.fleet.cluster import Cluster
    from rlhfless.scaling.prices import load_price_book
    from rlhfless.spec import PlacementSpec

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    spec = PlacementSpec(ray_address=ray_address)
    cluster = await Cluster.start(spec, load_price_book(None).kinds)
    try:
        while not stop.is_set() and not cluster.lost:
            _write(folder, await _seen(cluster, ray_address))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
    finally:
        (folder / RAY_FILE).unlink(missing_ok=True)
        await cluster.stop()


async def _seen(cluster: Any, ray_address: str | None) -> RayNow:
    from rlhfless.scaling.placement import CPU_KIND

    nodes = await cluster.nodes("")
    there: Counter[str] = Counter()
    free: Counter[str] = Counter()
    for node in nodes:
        kinds = {CPU_KIND, node.gpu_kind} if node.gpus else {CPU_KIND}
        for kind in kinds:
            there[kind] += node.count(kind)
            free[kind] += node.free(kind)
    return RayNow(ray_address or cluster.address, os.getpid(), time.time(), dict(there), dict(free), len(nodes))


def _write(folder: Path, now: RayNow) -> None:
    new = folder / f"{RAY_FILE}.new"
    new.write_text(json.dumps(asdict(now)), "utf-8")
    new.replace(folder / RAY_FILE)


def _only_one(folder: Path) -> IO[str] | None:
    """The folder's lock; None if another host has it."""
    file = (folder / LOCK_FILE).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


if __name__ == "__main__":
    held = _only_one(Path(sys.argv[1]))
    if held is None:
        sys.exit(0)
    asyncio.run(host(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
