"""Streams of events: from the first one on, resumed without loss or repeat."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from fakes.fake_service import RUN, NoDrivers, Pushes, begun_run, until

SSE = {"Accept": "text/event-stream"}


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    event: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in event:
                yield {"id": int(event["id"]), "event": event["event"], "data": json.loads(event["data"])}
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value


def message(n: int) -> tuple[str, dict[str, Any]]:
    return "message", {"level": "info", "message": f"m{n}"}


def test_a_stream_has_what_was_and_what_comes_until_the_end(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    push(message(1), message(2))
    found: list[dict[str, Any]] = []

    def watch() -> None:
        with client.stream("GET", f"/v1/runs/{run}/events", headers=SSE) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for event in events_of(stream.iter_lines()):
                found.append(event)
                if event["data"]["data"].get("status") == "succeeded":
                    return

    watching = threading.Thread(target=watch)
    watching.start()
    for n in range(3, 30):
        push(message(n))
    push(("ended", {"status": "succeeded", "reason": "done", "error": None, "retry": False}))
    watching.join(20)
    assert not watching.is_alive()
    assert [event["id"] for event in found] == list(range(1, len(found) + 1))
    assert [e["data"]["message"] for e in found if e["event"] == "message"] == [f"m{n}" for n in range(1, 30)]


def test_a_step_that_is_done_again_is_told_once(client: httpx.Client, drivers: NoDrivers) -> None:
    """A driver is killed between the metrics of a step and the step's row in the trace: its successor does it again."""
    run, push = begun_run(client, drivers)
    for step, reward in ((1, 0.1), (2, 0.2), (2, 0.25), (3, 0.3)):
        push(("metrics", {"step": step, "kind": "step", "values": {"reward_mean": reward, "step_s": 1.0}}))
    push(("metrics", {"step": 3, "kind": "evaluation", "values": {"held_out_reward": 0.5}}))
    events = client.get(f"/v1/runs/{run}/events").json()["data"]
    assert [event["data"]["step"] for event in events if event["type"] == "metrics"] == [1, 2, 3]
    assert [event["data"]["step"] for event in events if event["type"] == "evaluation"] == [3]
    (series,) = client.get(f"/v1/runs/{run}/metrics", params={"name": "reward_mean"}).json()["series"]
    assert series["values"] == [0.1, 0.25, 0.3], "the newest of each"


def test_a_stream_of_a_run_that_has_ended_ends_with_its_last_event(client: httpx.Client, drivers: NoDrivers) -> None:
    run = client.post("/v1/runs", json=RUN).json()["id"]
    until(lambda: drivers.orders)
    Pushes(client, drivers.orders[0])(("ended", {"status": "failed", "reason": "x", "error": None, "retry": False}))
    last = client.get(f"/v1/runs/{run}").json()["last_event"]
    for seen, left in ((0, last), (last, 0)):
        headers = SSE | {"Last-Event-ID": str(seen)}
        answer = client.get(f"/v1/runs/{run}/events", headers=headers, timeout=5)  # less than a keep-alive
        assert len(list(events_of(iter(answer.text.splitlines())))) == left


def test_a_stream_goes_on_after_the_last_event_that_was_seen(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    seen: list[int] = []
    for part in range(5):
        push(*(message(10 * part + n) for n in range(10)))
        headers = SSE | ({"Last-Event-ID": str(seen[-1])} if seen else {})
        with client.stream("GET", f"/v1/runs/{run}/events", headers=headers) as stream:
            for event in events_of(stream.iter_lines()):
                seen.append(event["id"])
                if len(seen) % 7 == 0:
                    break
    assert seen == list(range(1, len(seen) + 1))
    after = client.get(f"/v1/runs/{run}/events", params={"after": 5, "limit": 3}).json()
    assert ([event["id"] for event in after["data"]], after["has_more"]) == ([6, 7, 8], True)


def test_changes_of_all_runs(client: httpx.Client, drivers: NoDrivers) -> None:
    seen: list[tuple[str, str]] = []
    begun, enough = threading.Event(), threading.Event()

    def watch() -> None:
        with client.stream("GET", "/v1/events") as stream:
            kind = ""
            for line in stream.iter_lines():
                begun.set()
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    seen.append((kind, data.get("status", "")))
                    if kind == "deleted":
                        enough.set()
                        return

    threading.Thread(target=watch, daemon=True).start()
    assert begun.wait(60)
    run = client.post("/v1/runs", json=RUN).json()["id"]
    until(lambda: drivers.orders)
    client.post(f"/v1/runs/{run}/cancel")
    push = Pushes(client, drivers.orders[0])
    push(("ended", {"status": "cancelled", "reason": "cancelled", "error": None, "retry": False}))
    client.delete(f"/v1/runs/{run}")
    assert enough.wait(60)
    assert seen[-1] == ("deleted", "")
    assert {kind for kind, _ in seen[:-1]} == {"run"}
