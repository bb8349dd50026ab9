"""A run's folder must be one folder for its driver and the service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fake_service import RUN, NoDrivers, until
from rlhfless.control.delivery import DriverOrder
from rlhfless.control.drivers import NOT_SHARED, DriverHandle, JobDrivers, RayJobs
from rlhfless.control.keys import hashed
from rlhfless.control.run_files import finds_mark, leave_mark
from rlhfless.control.service import Service

MEND = "volumes.runs"


def first_push(client: httpx.Client, order: DriverOrder, items: tuple[dict[str, Any], ...] = ()) -> httpx.Response:
    body = {"attempt": order.attempt, "items": items, "now": {"reason": ""}, "marked": True}
    secret = {"Authorization": f"Bearer {order.token}"}
    return client.post(f"/internal/runs/{order.run_id}/deliveries", json=body, headers=secret)


def posted(client: httpx.Client, drivers: NoDrivers) -> DriverOrder:
    client.post("/v1/runs", json=RUN)
    until(lambda: drivers.orders)
    return drivers.orders[-1]


def test_a_mark_that_is_found_is_removed(tmp_path: Path) -> None:
    leave_mark(tmp_path, 2, "text")
    assert not finds_mark(tmp_path, 1, "text", wait_s=0)
    assert not finds_mark(tmp_path, 2, "another driver's", wait_s=0)
    assert finds_mark(tmp_path, 2, "text", wait_s=0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_both_see(service: tuple[httpx.Client, Service], drivers: NoDrivers) -> None:
    client, served = service
    order = posted(client, drivers)
    leave_mark(served.settings.runs / order.run_id, order.attempt, hashed(order.token))
    assert first_push(client, order).status_code == 200
    assert client.get(f"/v1/runs/{order.run_id}").json()["status"] == "validating"


def test_a_mark_that_the_service_does_not_find(
    client: httpx.Client, drivers: NoDrivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhfless.control.api.drivers.finds_mark", lambda *given: finds_mark(*given, wait_s=0.0))
    order = posted(client, drivers)
    answer = first_push(client, order)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_shared")
    seen = client.get(f"/v1/runs/{order.run_id}").json()
    assert (seen["status"], seen["error"]["code"]) == ("failed", "not_shared")
    assert "the service does not find there" in seen["status_reason"]
    assert MEND in seen["status_reason"]


def test_a_run_that_has_done_something_is_kept(
    client: httpx.Client, drivers: NoDrivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhfless.control.api.drivers.finds_mark", lambda *given: finds_mark(*given, wait_s=0.0))
    order = posted(client, drivers)
    spec = {"seq": 1, "attempt": 1, "at": time.time(), "kind": "resolved", "data": {"spec": RUN}}
    body = {"attempt": 1, "items": [spec], "now": {"reason": ""}}
    secret = {"Authorization": f"Bearer {order.token}"}
    assert client.post(f"/internal/runs/{order.run_id}/deliveries", json=body, headers=secret).is_success
    assert first_push(client, order).status_code == 409
    assert client.get(f"/v1/runs/{order.run_id}").json()["status"] == "paused"


def test_a_driver_that_cannot_begin_is_not_tried_again(
    client: httpx.Client, drivers: NoDrivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hindrance(handle: DriverHandle) -> str:
        return f"driver {handle['number']} has another folder ({MEND})"

    monkeypatch.setattr(drivers, "hindrance", hindrance)
    order = posted(client, drivers)
    until(lambda: client.get(f"/v1/runs/{order.run_id}").json()["status"] == "validating")
    drivers.dead.add(0)
    until(lambda: client.get(f"/v1/runs/{order.run_id}").json()["status"] == "failed")
    assert MEND in client.get(f"/v1/runs/{order.run_id}").json()["error"]["message"]
    assert len(drivers.orders) == 1


def head_of(exit_code: int) -> RayJobs:
    job = {"status": "FAILED", "message": "failed", "driver_exit_code": exit_code}
    return RayJobs("http://head", httpx.MockTransport(lambda _: httpx.Response(200, json=job)))


def test_the_exit_code_of_a_job_that_does_not_find_its_order() -> None:
    handle = {"job": "run-1-1", "folder": "/data/runs/run-1"}
    said = JobDrivers(head_of(NOT_SHARED)).hindrance(handle)
    assert "/data/runs/run-1" in said
    assert "at /data/runs on both sides" in said
    assert MEND in said
    assert JobDrivers(head_of(1)).hindrance(handle) == ""
