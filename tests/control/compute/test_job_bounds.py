"""A job's memory and time are bounded, and a job that needs more says so."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import yaml

from fakes.repository import SCENARIOS
from rlhfless.control.compute import jobs
from rlhfless.control.compute.runner import FORKS, LEAST_BYTES, Runner, work
from rlhfless.control.errors import ApiError
from rlhfless.control.process_limits import memory_bytes

GIB = 1 << 30


def big(question: dict[str, int]) -> dict[str, object]:
    return {"bytes": len(bytearray(question["bytes"]))}


def job_of(connection: Connection) -> None:
    jobs.JOBS["big"] = big
    work(connection, "big")


@pytest.mark.parametrize(
    ("machine", "container", "found"),
    [(24 * GIB, "", 6 * GIB), (24 * GIB, "max\n", 6 * GIB), (256 * GIB, f"{8 * GIB}\n", 2 * GIB), (2 * GIB, "", GIB)],
)
def test_a_quarter_of_what_there_is(machine: int, container: str, found: int) -> None:
    assert memory_bytes(machine, container, LEAST_BYTES) == found


def test_a_job_that_needs_more_says_so() -> None:
    def answer(wanted: int) -> dict[str, object]:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=job_of, args=(theirs,))
        process.start()
        theirs.close()
        ours.send_bytes(json.dumps({"bytes": wanted}).encode())
        try:
            return json.loads(ours.recv_bytes())
        finally:
            process.join(60)

    assert answer(1 << 20) == {"result": {"bytes": 1 << 20}}
    (problem,) = answer(1 << 44)["problems"]  # 16 TiB
    assert "GiB of memory that a job may have here; ask for less" in problem["what"]


async def test_a_job_that_takes_too_long_is_ended_with_what_it_started() -> None:
    scenario = yaml.safe_load((SCENARIOS / "paper-3b-l40s.yaml").read_text()) | {"steps": 1_000}
    with pytest.raises(ApiError, match="simulation took longer than 4 s"):
        await Runner().run("simulation", {"scenario": scenario, "policies": []}, timeout_s=4)
    begun = [one for child in psutil.Process().children() for one in child.children(recursive=True)]
    _, left = psutil.wait_procs(begun, timeout=60)
    assert not left


async def test_a_job_that_is_cancelled_while_its_process_starts_blocks_nothing() -> None:
    runner = Runner()
    await runner.prepare()
    forks = psutil.Process(forkserver._forkserver._forkserver_pid)
    forks.suspend()  # as when it still imports
    try:
        begun = time.monotonic()
        with pytest.raises(ApiError, match="check_simulation took longer than 0 s"):
            await runner.run("check_simulation", {"scenario": {}, "policies": []}, timeout_s=0.2)
        assert time.monotonic() - begun < 10
        (thread,) = (each for each in threading.enumerate() if each.name == "job")
        assert thread.daemon
    finally:
        forks.resume()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    assert not forks.children()


async def test_a_check_does_not_wait_for_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def run(_: Runner, job: str, question: dict[str, Any]) -> dict[str, Any]:
        if job == "simulation":
            await ended.wait()
        return {"job": job}

    monkeypatch.setattr(Runner, "_run", run)
    runner = Runner()
    computing = [asyncio.ensure_future(runner.run("simulation", {}, 60)) for _ in range(3)]
    await asyncio.sleep(0)  # they have begun
    assert await runner.run("check_simulation", {}, 5) == {"job": "check_simulation"}
    with pytest.raises(ApiError, match="took longer than"):
        await runner.run("plan", {}, 0.1)
    ended.set()
    assert await asyncio.gather(*computing) == [{"job": "simulation"}] * 3
