"""Memory limits and thread priorities of the service's processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from fakes.fake_service import RUN, NoDrivers, Pushes, order_of, until
from rlhfless.control.delivery import OUT_OF_MEMORY, DriverOrder
from rlhfless.control.driver.main import ENDED, drive
from rlhfless.control.driver.service_client import undelivered
from rlhfless.control.drivers import LOG_FILE, write_order
from rlhfless.control.process_limits import raise_priority, says_out_of_memory, service_threads
from rlhfless.control.settings import ServiceSettings
from rlhfless.functions.devices import OutOfMemory

FILLS = """
import resource
from rlhfless.control.process_limits import limit_driver, use_reserve
limit_driver(0.25)
try:
    filled = [{number} for number in range(2**31)]
except MemoryError as error:
    use_reserve(error)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    print("said", len([{number} for number in range(10_000)]), soft == hard < 2**30)
"""


def test_a_driver_has_a_limit_and_can_say_that_it_was_reached() -> None:
    done = subprocess.run([sys.executable, "-c", FILLS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["said", "10000", "True"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory: the run's driver needs more. Ask for fewer samples"),
        (OutOfMemory("learner rank 0 ran out of memory in `learn`"), "learner rank 0 ran out of memory in `learn`"),
    ],
)
def test_a_run_that_is_out_of_memory_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fills(_: object) -> None:
        raise error

    monkeypatch.setattr("rlhfless.control.driver.main.preflight", fills)
    monkeypatch.setattr("rlhfless.control.driver.main.DELIVER_S", 0.1)
    write_order(tmp_path, DriverOrder.model_validate(order_of(spec=RUN)))
    assert drive(tmp_path) == ENDED
    ended = undelivered(tmp_path, 0)[-1].data
    assert (ended["status"], ended["error"]["code"], ended["retry"]) == ("failed", OUT_OF_MEMORY, False)
    assert reason in ended["reason"]


@pytest.mark.parametrize(("has_begun", "status"), [(False, "failed"), (True, "paused")])
def test_a_driver_that_was_aborted_for_memory_has_no_successor(
    client: httpx.Client, drivers: NoDrivers, settings: ServiceSettings, has_begun: bool, status: str
) -> None:
    run = client.post("/v1/runs", json=RUN).json()
    until(lambda: drivers.orders)
    if has_begun:
        Pushes(client, drivers.orders[0])(("resolved", {"spec": RUN}))
    log_file = settings.runs / run["id"] / LOG_FILE
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.write_text("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    drivers.dead.add(0)
    until(lambda: client.get(f"/v1/runs/{run['id']}").json()["status"] == status)
    seen = client.get(f"/v1/runs/{run['id']}").json()
    assert seen["error"]["code"] == OUT_OF_MEMORY
    assert "out of memory" in seen["status_reason"]
    assert len(drivers.orders) == 1


def test_what_an_earlier_driver_has_written_does_not_count(tmp_path: Path) -> None:
    log_file = tmp_path / LOG_FILE
    log_file.write_text("MemoryError\n")
    assert says_out_of_memory(log_file, 0)
    assert not says_out_of_memory(log_file, log_file.stat().st_size)
    assert not says_out_of_memory(tmp_path / "none", 0)


def test_a_thread_comes_first_and_what_it_starts_does_not() -> None:
    def look() -> tuple[bool, int, int, int]:
        allowed = raise_priority()
        inner: list[int] = []
        thread = threading.Thread(target=lambda: inner.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
        shown = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True, check=True
        )
        return allowed, os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, inner[0], int(shown.stdout)

    with service_threads() as pool:
        allowed, own, thread, process = pool.submit(look).result(30)
    if not allowed:
        pytest.skip("this machine allows no real-time threads (CAP_SYS_NICE)")
    assert (own, thread, process) == (os.SCHED_RR, os.SCHED_OTHER, os.SCHED_OTHER)


def test_a_machine_that_does_not_allow_it_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert not raise_priority()
    monkeypatch.delattr(os, "SCHED_RR")
    assert not raise_priority()
