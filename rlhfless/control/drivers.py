"""The processes that drive runs on this machine: started, found again after the service was away, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import psutil

from rlhfless.control.delivery import PROTOCOL, DriverOrder, OtherProtocol
from rlhfless.control.ray_host import BEHIND
from rlhfless.control.settings import environment_of_runs
from rlhfless.folders import replace_text

ORDER_FILE = "driver.json"
LOG_FILE = "driver.log"
"""What the driver's process prints, beside the run's own log."""

LOG_START = "log_start"
"""Key of a handle: where in its log the driver began to write."""

Handle = dict[str, Any]
"""How a driver is found again, also by a later service: kept in the database."""


class Drivers(Protocol):
    """Starts drivers, wherever they run. All methods may block for a second; none raises for a driver that is gone."""

    def start(self, folder: Path, order: DriverOrder) -> Handle:
        """Start a driver. Raises OSError if it cannot be started."""

    def alive(self, handle: Handle) -> bool:
        """Whether it may still work."""

    def ended_by(self, handle: Handle) -> str:
        """Why it ended, in words, if that is known."""

    def hindrance(self, handle: Handle) -> str:
        """Why no other driver of the run could begin either, in words; empty if one may."""

    def stop(self, handle: Handle) -> None:
        """Ask it to stop in order."""

    def kill(self, handle: Handle) -> None:
        """End it at once."""


class LocalDrivers(Drivers):
    """Each driver is a process in a session of its own, which outlives the service."""

    def __init__(self, module: str = "rlhfless.control.driver") -> None:
        """`module` is run with the run's folder."""
        self._module = module
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, folder: Path, order: DriverOrder) -> Handle:
        write_order(folder, order)
        command = [*BEHIND, sys.executable, "-m", self._module, str(folder)]
        with (folder / LOG_FILE).open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(order),
            )
        self._started[process.pid] = process
        return {"pid": process.pid, "created": psutil.Process(process.pid).create_time(), LOG_START: log_start}

    def alive(self, handle: Handle) -> bool:
        if (process := self._started.get(handle["pid"])) is not None and process.poll() is not None:
            return False
        return _process(handle) is not None

    def ended_by(self, handle: Handle) -> str:
        """An exit code is known only to the service that started the driver."""
        process = self._started.get(handle["pid"])
        code = None if process is None else process.poll()
        if code is None:
            return "its driver has ended"
        if code < 0:
            return f"its driver was ended by {signal.Signals(-code).name}"
        return f"its driver has ended with exit code {code}"

    def hindrance(self, handle: Handle) -> str:  # noqa: ARG002
        """Its folder is the service's."""
        return ""

    def stop(self, handle: Handle) -> None:
        _signal(handle, signal.SIGTERM)

    def kill(self, handle: Handle) -> None:
        _signal(handle, signal.SIGKILL)


def _environment(order: DriverOrder) -> dict[str, str]:
    environment = environment_of_runs()
    if order.one_machine:  # the service's own Ray asks for a token
        environment["RAY_AUTH_MODE"] = "token"
    return environment


def _process(handle: Handle) -> psutil.Process | None:
    """The process, unless it has ended: another one may have its number by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(handle["pid"])
        if abs(process.create_time() - handle["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _signal(handle: Handle, number: signal.Signals) -> None:
    if _process(handle) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle["pid"], number)


def write_order(folder: Path, order: DriverOrder) -> None:
    """Write the order of a driver. It has a secret, so its user alone can read it."""
    replace_text(folder / ORDER_FILE, order.model_dump_json())


def read_order(folder: Path) -> DriverOrder:
    """What a driver is started with. Raises OtherProtocol."""
    order = json.loads((folder / ORDER_FILE).read_text("utf-8"))
    if (protocol := order["protocol"]) != PROTOCOL:
        raise OtherProtocol(order["attempt"], protocol)
    return DriverOrder.model_validate(order)
