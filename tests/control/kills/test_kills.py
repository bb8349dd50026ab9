"""kill -9 of the service and of drivers at random moments, and a database that is away: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from postgres import Postgres, binaries

from fakes.fake_driver import PROGRESS_FILE
from fakes.repository import TESTS
from rlhfless.control.ray_host import RAY_FILE
from rlhfless.control.settings import SERVICE_FILE, ServiceSettings

pytestmark = pytest.mark.timeout(900)

STEPS, RUNS = 60, 3
RUN: dict[str, Any] = {
    "name": "small",
    "model": {"path": "some/model"},
    "prompts": {"path": "some/prompts"},
    "rewards": [{"type": "exact_match"}],
    "steps": STEPS,
}


class Killed:
    """A service that can be killed, and its drivers."""

    def __init__(self, folder: Path, database: str | None) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        settings = ServiceSettings(data=str(self.data), port=port, database=database, max_drivers=3)
        devices = {"cpu-core": 2}
        ray = {"address": "127.0.0.1:1", "pid": 1, "at": time.time() + 1e6, "nodes": 1}
        (self.data / RAY_FILE).write_text(json.dumps(ray | {"devices": devices, "free": devices}))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        self._settings = settings.model_dump_json()
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    def start(self) -> None:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        with (self.data / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("service_process.py")), self._settings],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
            )
        end = time.monotonic() + 240  # of a busy machine
        while True:
            try:
                if self.client.get("/healthz").is_success:
                    return
            except httpx.HTTPError:
                pass
            assert self._process.poll() is None, (self.data / "service.log").read_text()
            assert time.monotonic() < end, "the service does not answer"
            time.sleep(0.05)

    def kill_service(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.kills += 1

    def kill_driver(self, moved_on: dict[str, int]) -> None:
        """One that has made a step since it was killed last: real ones do not die five times without a step."""
        for run in self.runs():
            folder = self.data / "runs" / run["id"]
            try:
                done = json.loads((folder / PROGRESS_FILE).read_text())
            except (OSError, ValueError):
                continue
            found = subprocess.run(["pgrep", "-f", f"fake_driver {folder}"], capture_output=True, text=True)
            if found.stdout and done > moved_on.get(run["id"], 0) and run["status"] == "running":
                moved_on[run["id"]] = done
                for pid in found.stdout.split():
                    os.kill(int(pid), signal.SIGKILL)
                self.kills += 1
                return

    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/v1/runs", params={"limit": 100}).json()["data"]
        return found

    def until_ended(self, timeout_s: float) -> list[dict[str, Any]]:
        end = time.monotonic() + timeout_s
        while True:
            runs = self.runs()
            if all(run["status"] in ("succeeded", "failed", "cancelled") for run in runs):
                return runs
            assert time.monotonic() < end, runs
            time.sleep(0.2)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)
        subprocess.run(["pkill", "-9", "-f", f"fake_driver {self.data}"], check=False)
        self.client.close()


KILLS = {"sqlite": 5, "postgresql": 12}
"""By database: each is of a driver, or one of four of the service, whose start takes seconds of a processor."""


@pytest.fixture(params=["sqlite", "postgresql"])
def killed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Killed, Postgres | None]]:
    server = None
    with tempfile.TemporaryDirectory() as open_to_its_user:
        if request.param == "postgresql":
            if binaries() is None:
                pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
            server = Postgres(Path(open_to_its_user))
        service = Killed(tmp_path, server.url if server else None)
        try:
            service.start()
            yield service, server
        finally:
            service.stop()
            if server is not None:
                server.stop()


def check_whole(service: Killed, runs: list[dict[str, Any]]) -> None:
    """Every run has each step once, events without gaps, and the usage of all its steps."""
    for run in runs:
        assert (run["status"], run["step"], run["cost_usd"]) == ("succeeded", STEPS, 2.0 * STEPS), run
        assert run["device_hours"] == pytest.approx(STEPS / 3600)
        events: list[dict[str, Any]] = []
        more = True
        while more:
            after = events[-1]["id"] if events else 0
            page = service.client.get(f"/v1/runs/{run['id']}/events", params={"after": after, "limit": 1000}).json()
            events, more = events + page["data"], page["has_more"]
        assert [event["id"] for event in events] == list(range(1, len(events) + 1))
        steps = [event["data"]["step"] for event in events if event["type"] == "metrics"]
        # A driver that dies between a step and the note that it is done makes it again, as a real one does.
        assert sorted(set(steps)) == list(range(1, STEPS + 1))
        assert len(steps) <= STEPS + run["attempt"]
        assert [event["message"] for event in events if event["type"] == "status"][-1] == "all steps are done"


@pytest.mark.long
def test_no_kill_loses_or_doubles_anything(killed: tuple[Killed, Postgres | None]) -> None:
    service, server = killed
    kills = KILLS["postgresql" if server else "sqlite"]
    chance, moved_on = random.Random(7), dict[str, int]()
    for number in range(RUNS):
        answer = service.client.post("/v1/runs", json=RUN, headers={"Idempotency-Key": str(number)})
        assert answer.status_code == 201
    while service.kills < kills:
        if all(run["status"] == "succeeded" for run in service.runs()):
            number += 1
            service.client.post("/v1/runs", json=RUN, headers={"Idempotency-Key": str(number)})
        time.sleep(chance.uniform(0.0, 0.3))
        if chance.random() < 0.25:
            service.kill_service()
            service.start()
        else:
            service.kill_driver(moved_on)
    runs = service.until_ended(240)
    assert len(runs) == number + 1
    check_whole(service, runs)
    for number in range(RUNS):  # the answers to the first POSTs outlived the kills as well
        again = service.client.post("/v1/runs", json=RUN, headers={"Idempotency-Key": str(number)})
        assert again.status_code == 200
    assert len(service.runs()) == len(runs)


def test_runs_go_on_while_the_database_is_away(tmp_path: Path) -> None:
    if binaries() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
    with tempfile.TemporaryDirectory() as open_to_its_user:
        server = Postgres(Path(open_to_its_user))
        service = Killed(tmp_path, server.url)
        try:
            service.start()
            run = service.client.post("/v1/runs", json=RUN).json()["id"]
            progress = service.data / "runs" / run / PROGRESS_FILE
            end = time.monotonic() + 60
            while not progress.exists():
                assert time.monotonic() < end
                time.sleep(0.05)
            server.stop()
            before = json.loads(progress.read_text())
            answer = service.client.post("/v1/runs", json=RUN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
            assert service.client.get("/healthz").status_code == 200
            assert service.client.get("/readyz").status_code == 503
            end = time.monotonic() + 60
            while json.loads(progress.read_text()) < min(before + 20, STEPS):
                assert time.monotonic() < end, "the run stands still"
                time.sleep(0.1)
            server.start()
            runs = service.until_ended(60)
            assert len(runs) == 1
            check_whole(service, runs)
            assert (service.data / SERVICE_FILE).exists()
        finally:
            service.stop()
            server.stop()
