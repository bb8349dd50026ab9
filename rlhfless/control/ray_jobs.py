"""Runs on a Ray cluster elsewhere: each driver is a job of the cluster, and so is the host that reports its devices.

The service's machine is not a node of the cluster: it reaches only the head's job interface
(https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html). Drivers and host reach the
service at its `public_url`. The runs' folder is at the same path on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rlhfless.control.delivery import DriverOrder
from rlhfless.control.drivers import LOG_FILE, LOG_START, ORDER_FILE, Drivers, Handle, write_order
from rlhfless.control.periodic import PeriodicTask
from rlhfless.control.ray_host import HOST_TOKEN, REPORT_S, RESTART_S
from rlhfless.control.run_files import not_shared

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Longest wait for the head's answer. Submitting a job starts an actor on the head, which takes about a second."""

STOP_WAIT_S = 60
"""Seconds until a job that was asked to stop is killed: `timeouts.stop_s` is 25 s, and the driver delivers its outbox.
Ray's own default is 3 s."""

PYTHON = "python"
"""The cluster's Python, which need not be at the path of the service's."""

NOT_SHARED = 66
"""Exit code of a driver's job that does not find its order in the run's folder, or cannot write there."""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the head knows it."""

    status: str
    message: str
    exit_code: int | None


class RayJobs:
    """The job interface of a cluster's head. Methods block for at most TIMEOUT_S, and raise httpx.HTTPError."""

    def __init__(self, address: str, transport: httpx.BaseTransport | None = None) -> None:
        """`address`: such as http://head:8265."""
        self._client = httpx.Client(base_url=address, timeout=TIMEOUT_S, transport=transport)

    def submit(self, job: str, command: str, environment: Mapping[str, str]) -> None:
        """Start a job under a name, unless there is a job of that name."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environment}
        body = {"submission_id": job, "entrypoint": command, "runtime_env": {"env_vars": variables}}
        answer = self._ask("POST", "/api/jobs/", json=body)
        if answer.is_error and self.find(job) is None:
            raise httpx.HTTPStatusError(answer.text.strip()[-1000:], request=answer.request, response=answer)

    def find(self, job: str) -> Job | None:
        """The job with a name; None if the head does not know it. A new head knows no jobs of its predecessor."""
        answer = self._ask("GET", f"/api/jobs/{job}")
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        status = answer.json()
        return Job(status["status"], status.get("message") or "", status.get("driver_exit_code"))

    def stop(self, job: str) -> None:
        """End a job with SIGTERM, and after STOP_WAIT_S with SIGKILL. A job that has ended, or is unknown, is left
        alone."""
        answer = self._ask("POST", f"/api/jobs/{job}/stop")
        if answer.status_code != 404:
            answer.raise_for_status()

    def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        token = _token(os.environ, Path.home())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self._client.request(method, path, headers=headers, **content)


def _token(environment: Mapping[str, str], home: Path) -> str:
    """The cluster's token, read from the places where Ray looks for it."""
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
        """`module`: what each job runs, with the run's folder as argument."""
        self._jobs = jobs
        self._module = module

    def start(self, folder: Path, order: DriverOrder) -> Handle:
        """Submit a job. Raises OSError if the head does not answer, or refuses the job."""
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

    def alive(self, handle: Handle) -> bool:
        """While the head does not answer, the job counts as alive."""
        try:
            job = self._jobs.find(handle["job"])
        except httpx.HTTPError as error:
            log.info("the cluster's head does not say whether %s works: %s", handle["job"], error)
            return True
        return job is not None and job.status not in ENDED

    def ended_by(self, handle: Handle) -> str:
        with contextlib.suppress(httpx.HTTPError):
            job = self._jobs.find(handle["job"])
            if job is None:
                return "its driver has ended with the cluster's head that it was started by"
            if job.exit_code is not None and job.exit_code < 0:
                return f"its driver was ended by signal {-job.exit_code}"
            return f"its driver has ended: {job.message}"
        return "its driver has ended"

    def hindrance(self, handle: Handle) -> str:
        with contextlib.suppress(httpx.HTTPError):
            job = self._jobs.find(handle["job"])
            if job is not None and job.exit_code == NOT_SHARED:
                what = "the cluster's head does not find there what the service has written, or cannot write"
                return not_shared(Path(handle["folder"]), what)
        return ""

    def stop(self, handle: Handle) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._jobs.stop(handle["job"])

    def kill(self, handle: Handle) -> None:
        """Ask the job to stop: Ray kills it after STOP_WAIT_S, and cannot at once."""
        self.stop(handle)


def _host_name() -> str:
    return f"rlhfless-host-{secrets.token_hex(4)}"


class RayJobHostSupervisor(PeriodicTask):
    """Keeps a host alive in the cluster within its block. The host reports every second what devices the cluster
    has."""

    def __init__(self, jobs: RayJobs, service_url: str, token: str, reports: Callable[[], bool]) -> None:
        """`token`: the host's secret for the service; `reports`: whether a host reports to the service."""
        super().__init__(REPORT_S)
        self._jobs = jobs
        self._url = service_url
        self._token = token
        self._reports = reports
        self._job = _host_name()
        self._started_s = 0.0

    async def end(self) -> None:
        """End the host."""
        self._task.cancel()
        with contextlib.suppress(httpx.HTTPError):
            await asyncio.to_thread(self._jobs.stop, self._job)

    async def tick(self) -> None:
        """Submit a host if none reports."""
        if not self._reports() and time.monotonic() - self._started_s > RESTART_S:
            try:
                await asyncio.to_thread(self._require)
            except httpx.HTTPError as error:
                log.warning("the head of the Ray cluster does not answer: %s", error)

    def _require(self) -> None:
        self._started_s = time.monotonic()
        job = self._jobs.find(self._job)
        if job is not None and job.status not in ENDED:
            return
        if job is not None:
            log.warning("the host in the Ray cluster, which reports its devices, has ended: %s", job.message)
            self._job = _host_name()
        command = f"exec {PYTHON} -m rlhfless.control.ray_host --tell {shlex.quote(self._url)}"
        self._jobs.submit(self._job, command, {HOST_TOKEN: self._token})
