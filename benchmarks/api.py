"""The control API while a real run goes: latency of GET, delay of events over many streams, POSTs a second.

    python benchmarks/api.py MODEL_FOLDER [--get-s 10] [--streams 200] [--stream-s 20] [--posts 300] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote; the run is examples/demo.yaml. Some two minutes. The clients share
the machine's cores with the service and the run. They stand for clients on other machines, so they are real-time
threads where that is allowed: their own waiting for a core is no latency of the service. How late a timer in their
process is tells whether it was. With `--usual-priority` the service is started without the right to real-time threads
(rlhfless.control.process_limits).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from smoke import parsed
from where import machine

from rlhfless.control.process_limits import raise_priority

RATE, POST_RATE = 200, 100
"""GETs and POSTs a second."""
FIRST_EVENT_S = 120.0
"""Longest wait for an event beyond the time of the streams: a few steps of the demo on a busy machine."""
COMMAND = str(Path(sys.executable).with_name("rlhfless"))


def demo(model: Path, steps: int) -> dict[str, Any]:
    """The demo's spec."""
    spec: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "examples" / "demo.yaml").read_text())
    spec["model"] = {"path": str(model / "model")}
    spec["prompts"] |= {"path": str(model / "train.jsonl"), "held_out": {"path": str(model / "heldout.jsonl")}}
    return spec | {"steps": steps}


def up(data: Path, *models: Path, usual_priority: bool = False, drivers: int = 1) -> tuple[str, float, float]:
    """Start a service for so many runs at a time; returns its address, and the seconds until it answered and until runs
    could start."""
    began_s = time.monotonic()
    command = [
        *(("setpriv", "--bounding-set", "-sys_nice") if usual_priority else ()),
        COMMAND,
        "up",
        "--detach",
        "--port",
        "0",
        "--data",
        str(data),
        "--max-drivers",
        str(drivers),
        *(word for model in models for word in ("--root", str(model))),
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    answers_s = time.monotonic() - began_s
    url = str(json.loads((data / "service.json").read_text())["url"])
    while not httpx.get(f"{url}/readyz", timeout=10).is_success:
        time.sleep(0.1)
    return url, answers_s, time.monotonic() - began_s


async def until_running(client: httpx.AsyncClient, run: str) -> None:
    """Returns when the run has done its second step."""
    while (await client.get(f"/v1/runs/{run}")).json()["step"] < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.5)


class Lines:
    """Kept connections to the service, each with one request at a time. A client library would take more of the cores
    than the service."""

    def __init__(self, url: str, most: int) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._room = asyncio.Semaphore(most)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> int:
        """The status of the answer, which is read to its end."""
        async with self._room:
            reader, writer = self._free.pop() if self._free else await asyncio.open_connection(self._host, self._port)
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{length}{headers}\r\n".encode() + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].split("\r\n")[0])
            await reader.readexactly(size)
            self._free.append((reader, writer))
            return int(head.split()[1])


async def lateness(timer_s: float) -> list[float]:
    """Seconds by which a timer in this process is late: what the figures cannot be better than."""
    late, end_s = [], time.perf_counter() + timer_s
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        await asyncio.sleep(1 / RATE)
        late.append(time.perf_counter() - began_s - 1 / RATE)
    return late


async def gets(lines: Lines, run: str, get_s: float) -> list[float]:
    """Seconds of each GET of the run, RATE of them a second whatever their answers take."""
    took: list[float] = []

    async def one() -> None:
        began_s = time.perf_counter()
        status = await lines.ask("GET", f"/v1/runs/{run}")
        assert status == 200, f"GET of the run answers {status}"
        took.append(time.perf_counter() - began_s)

    tasks, began_s = [], time.perf_counter()
    for number in range(int(RATE * get_s)):
        await asyncio.sleep(max(began_s + number / RATE - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return took


async def streams(url: str, run: str, newest: int, count: int, stream_s: float) -> list[float]:
    """Delays of the events of `count` streams, from when the driver wrote each of them; `newest` is seen already."""
    delays: list[float] = []
    came = asyncio.Event()
    host, port = url.removeprefix("http://").split(":")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        path = f"/v1/runs/{run}/events"
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Accept: text/event-stream",
            f"Last-Event-ID: {newest}",
        )
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        try:
            while True:
                line = await reader.readline()
                if line.startswith(b"data: "):
                    now_s = time.time()
                    delays.append(now_s - json.loads(line[6:])["created_at"])
                    came.set()
        finally:
            writer.close()

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await asyncio.sleep(stream_s)
    await asyncio.wait_for(came.wait(), FIRST_EVENT_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return delays


async def posts(lines: Lines, client: httpx.AsyncClient, model: Path, many: int) -> tuple[int, float]:
    """How many of `many` runs were accepted, and how many a second."""
    spec = json.dumps(demo(model, 1) | {"name": "posted"}).encode()
    before = await count(client)
    began_s = time.perf_counter()

    async def one(number: int) -> None:
        status = await lines.ask("POST", "/v1/runs", spec, f"Idempotency-Key: bench-{number}\r\n")
        assert status == 201, f"POST of a run answers {status}"

    tasks = []
    for number in range(many):
        await asyncio.sleep(max(began_s + number / POST_RATE - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    took_s = time.perf_counter() - began_s
    return await count(client) - before, many / took_s


async def count(client: httpx.AsyncClient) -> int:
    """Runs of the service."""
    found, after = 0, None
    while True:
        page = (await client.get("/v1/runs", params={"limit": 100} | ({"after": after} if after else {}))).json()
        found += len(page["data"])
        if not page["has_more"]:
            return found
        after = page["data"][-1]["id"]


def shown(name: str, seconds: list[float], asked_ms: float | None = None) -> str:
    """One line of the result."""
    ordered = sorted(seconds)
    p99_ms = 1e3 * ordered[int(0.99 * (len(ordered) - 1))]
    median_ms = 1e3 * statistics.median(ordered)
    asked = "" if asked_ms is None else f"   asked <= {asked_ms:.0f} ms"
    return f"{name:<44} p50 {median_ms:6.1f} ms   p99 {p99_ms:6.1f} ms{asked}"


async def measure(url: str, asked: argparse.Namespace) -> None:
    """All figures of a service."""
    lines = Lines(url, 64)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        run = (await client.post("/v1/runs", json=demo(asked.model, 600))).json()["id"]
        await until_running(client, run)
        print(shown("a timer of the clients is late by", await lateness(asked.get_s / 2)), flush=True)
        print(shown(f"GET /v1/runs/ID, {RATE} a second", await gets(lines, run, asked.get_s), 20.0), flush=True)
        newest = (await client.get(f"/v1/runs/{run}")).json()["last_event"]
        delays = await streams(url, run, newest, asked.streams, asked.stream_s)
        print(shown(f"events on {asked.streams} streams", delays, 250.0), flush=True)
        kept, rate = await posts(lines, client, asked.model, asked.posts)
        print(f"POST /v1/runs: {kept} of {asked.posts} queued at {rate:.0f} a second (asked: 100 a second, none lost)")
        await client.post(f"/v1/runs/{run}/cancel")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--get-s", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--stream-s", type=float, default=20.0)
    parser.add_argument("--posts", type=int, default=300)
    parser.add_argument("--usual-priority", action="store_true")
    asked = parsed(parser, get_s=0.5, streams=2, stream_s=3.0, posts=5)
    print(machine())
    raise_priority()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        try:
            url, answers_s, ready_s = up(data, asked.model, usual_priority=asked.usual_priority)
            print(
                f"up: answers after {answers_s:.1f} s (asked <= 5), ready with Ray after {ready_s:.1f} s (asked <= 40)"
            )
            asyncio.run(measure(url, asked))
        finally:
            subprocess.run([COMMAND, "down", "--data", str(data)], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
