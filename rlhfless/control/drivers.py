"""The processes that drive runs on this machine: their start, their end, and how a restarted service finds them."""

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
from rlhfless.control.ray_host import LOW_PRIORITY
from rlhfless.control.settings import environment_of_runs
from rlhfless.util.folders import replace_text

ORDER_FILE = "driver.json"
LOG_FILE = "driver.log"
"""The output of the driver's process; the run has its own log beside it."""

LOG_START = "log_start"
"""Key of a handle: the size of the log when the driver began to write."""

Handle = dict[str, Any]
"""What identifies a driver, also for a later service: kept in the database."""


class Drivers(Protocol):
    """Starts and ends drivers. All methods may block for a second; none raises for a driver that has ended."""

    def start(self, folder: Path, order: DriverOrder) -> Handle:
        """Start a driver. Raises OSError if it cannot be started."""

    def alive(self, handle: Handle) -> bool:
        """Whether a driver may still be running."""

    def ended_by(self, handle: Handle) -> str:
        """Why a driver ended, in words."""

    def hindrance(self, handle: Handle) -> str:
        """Why another driver of the run could not start either, in words; empty if it could."""

    def stop(self, handle: Handle) -> None:
        """Ask a driver to stop in order."""

    def kill(self, handle: Handle) -> None:
        """End a driver at once."""


class LocalDrivers(Drivers):
    """Drivers as processes, each in a session of its own, which outlive the service."""

    def __init__(self, module: str = "rlhfless.control.driver") -> None:
        """`module`: what each process runs, with the run's folder as argument."""
        self._module = module
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, folder: Path, order: DriverOrder) -> Handle:
        write_order(folder, order)
        command = [*LOW_PRIORITY, sys.executable, "-m", self._module, str(folder)]
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
        """The exit code is known only to the service that started the driver."""
        process = self._started.get(handle["pid"])
        code = None if process is None else process.poll()
        if code is None:
            return "its driver has ended"
        if code < 0:
            return f"its driver was ended by {signal.Signals(-code).name}"
        return f"its driver has ended with exit code {code}"

    def hindrance(self, handle: Handle) -> str:  # noqa: ARG002
        """Nothing: drivers on this machine see the service's folder."""
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
    """The driver's process; None if it has ended, even if another process has its id by now."""
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
    """The order of a driver. Raises OtherProtocol."""
    order = json.loads((folder / ORDER_FILE).read_text("utf-8"))
    if (protocol := order["protocol"]) != PROTOCOL:
        raise OtherProtocol(order["attempt"], protocol)
    return DriverOrder.model_validate(order)
