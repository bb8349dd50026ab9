"""Drivers and host as jobs of a real Ray cluster, to which the service belongs not."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from fakes.fake_service import RUN, served
from fakes.repository import ROOT, TESTS
from rlhfless.control.delivery import DriverOrder
from rlhfless.control.drivers import JobDrivers, RayJobs
from rlhfless.control.ray_host import RayJobHostSupervisor
from rlhfless.control.settings import ServiceSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LIMIT_S = 90


def until(reached: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < end_s, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """Address of the job interface of a cluster of one node, which asks for a token."""
    port, jobs, agent = free_ports(3)
    folder = f"/tmp/rlhfless-head-{port}"
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{TESTS}",
        }.items():
            environment.setenv(name, value)
        command = ["ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
        command += [f"--dashboard-port={jobs}", f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}"]
        try:
            subprocess.run(command, check=True, timeout=240, capture_output=True)
            yield f"http://127.0.0.1:{jobs}"
        finally:
            for process in psutil.process_iter(["cmdline"]):
                if folder in " ".join(process.info["cmdline"] or ()):
                    process.kill()
            shutil.rmtree(folder, ignore_errors=True)


def processes(words: str) -> list[psutil.Process]:
    """Of this machine; not the shells that jobs are started by."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if words in " ".join(one.info["cmdline"] or ()) and "-c" not in one.info["cmdline"]]


def settings_of(folder: Path, head: str) -> ServiceSettings:
    return ServiceSettings(data=str(folder), ray_address=head, max_drivers=2)


@pytest.mark.long
def test_a_cluster_elsewhere(head: str, tmp_path: Path) -> None:
    """The host says what the cluster has; a run's driver that is killed is followed by another one; the run ends."""
    jobs = RayJobs(head)
    with served(settings_of(tmp_path, head), JobDrivers(jobs, "fakes.fake_driver")) as (client, service):
        assert client.get("/readyz").json()["waiting_for"] == [f"waiting for the Ray cluster at {head}"]

        async def keep() -> None:
            async with RayJobHostSupervisor(
                jobs, service.url, service.host_token, lambda: service.ray() is not None
            ) as host:
                while not done.is_set():
                    await asyncio.sleep(0.1)
                await host.end()

        done = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(keep()))
        thread.start()
        try:
            until(lambda: client.get("/readyz").is_success, "the host to speak")
            assert service.device_counts() == {"cpu-core": 2}
            run = client.post("/v1/runs", json=RUN | {"steps": 200}).json()["id"]
            until(lambda: client.get(f"/v1/runs/{run}").json()["step"] > 3, "steps")
            (driver,) = processes(f"fake_driver {service.settings.runs / run}")
            driver.send_signal(signal.SIGKILL)
            until(lambda: client.get(f"/v1/runs/{run}").json()["status"] == "succeeded", "the end")
            said = [event["message"] for event in client.get(f"/v1/runs/{run}/events?limit=100").json()["data"]]
            assert any("its driver was ended by signal 9" in text for text in said), said
            assert client.get(f"/v1/runs/{run}").json()["attempt"] == 2
        finally:
            done.set()
            thread.join(30)
        until(lambda: not processes("ray_host --tell"), "the host to end")


def test_a_host_of_another_service_ends(head: str, tmp_path: Path) -> None:
    with served(settings_of(tmp_path, head), JobDrivers(RayJobs(head))) as (client, service):
        told = {"address": "auto", "pid": 1, "at": 0.0, "devices": {"h100": 8}, "free": {}, "nodes": 1}
        wrong = client.post("/internal/ray", json=told, headers={"Authorization": "Bearer of-another"})
        assert wrong.status_code == 401
        assert service.ray() is None
        right = client.post("/internal/ray", json=told, headers={"Authorization": f"Bearer {service.host_token}"})
        assert right.json() == {"leaving": {}, "wanted": None}
        assert service.device_counts() == {"h100": 8}


def test_a_driver_is_started_once_and_stopped_in_order(head: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    order = DriverOrder(
        run_id="run-1",
        attempt=1,
        token="secret",
        service_file="nowhere",
        service_url="http://127.0.0.1:9",
        ray_address="auto",
        one_machine=False,
        http_hosts=[],
        spec={"steps": 1},
    )
    drivers = JobDrivers(RayJobs(head), "fakes.fake_driver")
    handle = drivers.start(tmp_path / "run", order)
    assert drivers.start(tmp_path / "run", order) == handle
    until(lambda: processes(f"fake_driver {tmp_path / 'run'}"), "the driver")
    assert len(processes(f"fake_driver {tmp_path / 'run'}")) == 1
    assert drivers.alive(handle)
    drivers.stop(handle)
    until(lambda: not drivers.alive(handle), "the driver's end")
    assert not processes(f"fake_driver {tmp_path / 'run'}")
    assert "stopped" in drivers.ended_by(handle).lower()
    drivers.stop(handle)


def test_a_head_that_is_away(tmp_path: Path) -> None:
    """Its jobs may work; none begins. A job that a new head does not know has ended."""
    (nowhere,) = free_ports(1)
    drivers = JobDrivers(RayJobs(f"http://127.0.0.1:{nowhere}"))
    assert drivers.alive({"job": "run-1"})
    drivers.stop({"job": "run-1"})
    order = DriverOrder(
        run_id="run", attempt=1, token="", service_file="", service_url="", ray_address="", one_machine=False,
        http_hosts=[], spec={},
    )  # fmt: skip
    with pytest.raises(OSError, match="head has not taken the driver's job"):
        drivers.start(tmp_path, order)
    unknown = RayJobs("http://head", httpx.MockTransport(lambda _: httpx.Response(404)))
    assert not JobDrivers(unknown).alive({"job": "run-1"})
    assert "with the cluster's head" in JobDrivers(unknown).ended_by({"job": "run-1"})
