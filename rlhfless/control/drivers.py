"""Starts, monitors and stops the drivers of runs: local processes, or jobs of a remote Ray cluster.

Both outlive the service; a later service finds them by their handles. Jobs are started through the head's job API
(https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html). The runs' folder must have the
same path on both sides.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from rlhfless.control.delivery import PROTOCOL, DriverOrder, OtherProtocol
from rlhfless.control.run_files import not_shared
from rlhfless.control.settings import LOW_PRIORITY, environment_of_runs
from rlhfless.util.folders import replace_text

ORDER_FILE = "driver.json"
LOG_FILE = "driver.log"
"""The output of the driver's process; the run's own log is in the same folder."""

LOG_START = "log_start"
"""Key of a DriverHandle: size of the log when the driver started to write."""

DriverHandle = dict[str, Any]
"""Identifies a driver, also to a later service. Stored in the database."""


class Drivers(Protocol):
    """Starts and stops drivers. Methods may block for a second; none raises for a driver that has ended."""

    def start(self, folder: Path, order: DriverOrder) -> DriverHandle:
        """Start a driver. Raises OSError if it cannot be started."""

    def alive(self, handle: DriverHandle) -> bool:
        """Return whether a driver may still be running."""

    def ended_by(self, handle: DriverHandle) -> str:
        """Return why a driver ended, as text."""

    def hindrance(self, handle: DriverHandle) -> str:
        """Return why no other driver of the run could start either; empty if one could."""

    def stop(self, handle: DriverHandle) -> None:
        """Ask a driver to stop cleanly."""

    def kill(self, handle: DriverHandle) -> None:
        """Kill a driver."""


class LocalDrivers(Drivers):
    """Drivers as processes, each in its own session. They outlive the service."""

    def __init__(self, module: str = "rlhfless.control.driver") -> None:
        """`module`: run by each process, with the run's folder as argument."""
        self._module = module
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, folder: Path, order: DriverOrder) -> DriverHandle:
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
                # The service's own Ray asks for a token.
                env=environment_of_runs() | ({"RAY_AUTH_MODE": "token"} if order.one_machine else {}),
            )
        self._started[process.pid] = process
        return {"pid": process.pid, "created": psutil.Process(process.pid).create_time(), LOG_START: log_start}

    def alive(self, handle: DriverHandle) -> bool:
        if (process := self._started.get(handle["pid"])) is not None and process.poll() is not None:
            return False
        return _process(handle) is not None

    def ended_by(self, handle: DriverHandle) -> str:
        """Return why a driver ended. Only the service that started the driver knows its exit code."""
        process = self._started.get(handle["pid"])
        code = None if process is None else process.poll()
        if code is None:
            return "its driver has ended"
        if code < 0:
            return f"its driver was ended by {signal.Signals(-code).name}"
        return f"its driver has ended with exit code {code}"

    def hindrance(self, handle: DriverHandle) -> str:  # noqa: ARG002
        return ""

    def stop(self, handle: DriverHandle) -> None:
        _signal(handle, signal.SIGTERM)

    def kill(self, handle: DriverHandle) -> None:
        _signal(handle, signal.SIGKILL)


def _process(handle: DriverHandle) -> psutil.Process | None:
    """Return the driver's process; None if it has ended, even if its id was reused."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(handle["pid"])
        if abs(process.create_time() - handle["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _signal(handle: DriverHandle, number: signal.Signals) -> None:
    if _process(handle) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle["pid"], number)


def write_order(folder: Path, order: DriverOrder) -> None:
    """Write a driver's order. The file contains a secret, so only its user can read it."""
    replace_text(folder / ORDER_FILE, order.model_dump_json())


def read_order(folder: Path) -> DriverOrder:
    """Read a driver's order. Raises OtherProtocol."""
    order = json.loads((folder / ORDER_FILE).read_text("utf-8"))
    if (protocol := order["protocol"]) != PROTOCOL:
        raise OtherProtocol(order["attempt"], protocol)
    return DriverOrder.model_validate(order)


log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Maximum wait for the head's answer. Submitting a job starts an actor on the head, which takes about a second."""

STOP_WAIT_S = 60
"""Seconds between the request to stop a job and its kill: `timeouts.stop_s` is 25 s, and the driver must also deliver
its outbox. Ray's default is 3 s."""

PYTHON = "python"
"""Command of the cluster's Python, whose path may differ from the service's."""

NOT_SHARED = 66
"""Exit code of a driver's job that cannot read its order in the run's folder, or cannot write there."""

JOB_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True, slots=True)
class Job:
    status: str
    message: str
    exit_code: int | None


class RayJobs:
    """Client of the job API of a cluster's head. Methods block for at most TIMEOUT_S and raise httpx.HTTPError."""

    def __init__(self, address: str, transport: httpx.BaseTransport | None = None) -> None:
        """`address`: for example http://head:8265."""
        self._client = httpx.Client(base_url=address, timeout=TIMEOUT_S, transport=transport)

    def submit(self, job: str, command: str, environment: Mapping[str, str]) -> None:
        """Start a job under a name, unless a job of that name exists."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environment}
        body = {"submission_id": job, "entrypoint": command, "runtime_env": {"env_vars": variables}}
        answer = self._ask("POST", "/api/jobs/", json=body)
        if answer.is_error and self.find(job) is None:
            raise httpx.HTTPStatusError(answer.text.strip()[-1000:], request=answer.request, response=answer)

    def find(self, job: str) -> Job | None:
        """Return a job by name; None if the head does not know it. A new head does not know its predecessor's jobs."""
        answer = self._ask("GET", f"/api/jobs/{job}")
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        status = answer.json()
        return Job(status["status"], status.get("message") or "", status.get("driver_exit_code"))

    def stop(self, job: str) -> None:
        """Stop a job with SIGTERM, followed by SIGKILL after STOP_WAIT_S. Ended and unknown jobs are ignored."""
        answer = self._ask("POST", f"/api/jobs/{job}/stop")
        if answer.status_code != 404:
            answer.raise_for_status()

    def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        token = _token(os.environ, Path.home())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self._client.request(method, path, headers=headers, **content)


def _token(environment: Mapping[str, str], home: Path) -> str:
    """Read the cluster's token from the places where Ray looks for it."""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


class JobDrivers(Drivers):
    """Drivers as jobs of a cluster."""

    def __init__(self, jobs: RayJobs, module: str = "rlhfless.control.driver") -> None:
        """`module`: run by each job, with the run's folder as argument."""
        self._jobs = jobs
        self._module = module

    def start(self, folder: Path, order: DriverOrder) -> DriverHandle:
        """Submit a job. Raises OSError if the head does not answer or refuses the job."""
        write_order(folder, order)
        job, log_file = f"{order.run_id}-{order.attempt}", folder / LOG_FILE
        log_start = log_file.stat().st_size if log_file.exists() else 0
        output, order_file = shlex.quote(str(log_file)), shlex.quote(str(folder / ORDER_FILE))
        shared = f"test -r {order_file} -a -w {shlex.quote(str(folder))} || exit {NOT_SHARED}"
        command = f"{shared}; exec {PYTHON} -m {self._module} {shlex.quote(str(folder))} >> {output} 2>&1"
        try:
            self._jobs.submit(job, command, {})
        except httpx.HTTPError as error:
            raise OSError(f"the cluster's head has not taken the driver's job: {error}") from error
        return {"job": job, "folder": str(folder), LOG_START: log_start}

    def alive(self, handle: DriverHandle) -> bool:
        """Return whether a job may still be running. A job counts as alive while the head does not answer."""
        try:
            job = self._jobs.find(handle["job"])
        except httpx.HTTPError as error:
            log.info("status of job %s unknown, the cluster's head does not answer: %s", handle["job"], error)
            return True
        return job is not None and job.status not in JOB_ENDED

    def ended_by(self, handle: DriverHandle) -> str:
        with contextlib.suppress(httpx.HTTPError):
            job = self._jobs.find(handle["job"])
            if job is None:
                return "its driver has ended with the cluster's head that it was started by"
            if job.exit_code is not None and job.exit_code < 0:
                return f"its driver was ended by signal {-job.exit_code}"
            return f"its driver has ended: {job.message}"
        return "its driver has ended"

    def hindrance(self, handle: DriverHandle) -> str:
        with contextlib.suppress(httpx.HTTPError):
            job = self._jobs.find(handle["job"])
            if job is not None and job.exit_code == NOT_SHARED:
                what = "the cluster's head does not find there what the service has written, or cannot write"
                return not_shared(Path(handle["folder"]), what)
        return ""

    def stop(self, handle: DriverHandle) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._jobs.stop(handle["job"])

    def kill(self, handle: DriverHandle) -> None:
        """Ask the job to stop. Ray cannot kill it at once; it does so after STOP_WAIT_S."""
        self.stop(handle)
