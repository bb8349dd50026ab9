"""Service and driver of different versions: what they leave out, and what they refuse."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fake_service import RUN, SAMPLE, NoDrivers, begun_run, order_of, until
from rlhfless.control.delivery import PROTOCOL, DriverOrder, PushAnswer
from rlhfless.control.driver import main as driver
from rlhfless.control.driver.main import ENDED, drive
from rlhfless.control.driver.service_client import undelivered
from rlhfless.control.drivers import ORDER_FILE, read_order, write_order
from rlhfless.control.ray_host import RAY_FILE, read_ray
from rlhfless.fleet.ray_session import NoCluster

REPLICA = {
    "function": "generation", "replica": "g-0", "state": "serving", "since": 1.0, "weights": "v3",
    "devices": ["cpu-core-0"], "kind": "cpu-core", "node": "n", "usd_per_hour": 0.1,
}  # fmt: skip
USAGE = {
    "function": "learner", "kind": "cpu-core", "busy_device_s": 1.0, "idle_device_s": 0.0, "cold_device_s": 0.0,
    "cost_usd": 2.0, "cold_starts": 1, "invocations": 1,
}  # fmt: skip
CHECKPOINT = {"id": "step-1", "step": 1, "location": "/x", "best": True, "score": None, "created_at": 1.0}
NEW = {"of_a_newer_version": {"a": 1}}


def item(seq: int, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"seq": seq, "attempt": 1, "at": time.time(), "kind": kind, "data": data, **NEW}


def test_a_newer_driver_tells_what_the_service_does_not_know(client: httpx.Client, drivers: NoDrivers) -> None:
    run = client.post("/v1/runs", json=RUN).json()["id"]
    until(lambda: drivers.orders)
    order = drivers.orders[0]
    items = [
        item(1, "status", {"status": "provisioning", "reason": "asks"} | NEW),
        item(2, "a kind of a newer version", NEW),
        item(3, "usage", {"functions": [USAGE | NEW]} | NEW),
        item(4, "rollouts", {"step": 1, "samples": [SAMPLE | NEW]} | NEW),
        item(5, "checkpoints", {"checkpoints": [CHECKPOINT | NEW]} | NEW),
    ]
    now = {"reason": "works", "replicas": [REPLICA | NEW], **NEW}
    body = {"protocol": PROTOCOL, "attempt": 1, "items": items, "now": now, **NEW}
    secret = {"Authorization": f"Bearer {order.token}"}
    answer = client.post(f"/internal/runs/{run}/deliveries", json=body, headers=secret)
    assert (answer.status_code, answer.json()["pushed"]) == (200, 5)
    seen = client.get(f"/v1/runs/{run}").json()
    assert (seen["status"], seen["cost_usd"], seen["latest_checkpoint"]["id"]) == ("provisioning", 2.0, "step-1")
    assert client.get(f"/v1/runs/{run}/rollouts").json()["data"][0]["response"] == "2"
    assert client.get("/v1/functions").json()["data"][0]["replica"] == "g-0"


def test_an_older_driver_tells_less(client: httpx.Client, drivers: NoDrivers) -> None:
    """No protocol, and only the fields that had no default."""
    _, push = begun_run(client, drivers)
    assert push(("status", {"status": "validating", "reason": "checks"})).status_code == 200
    answer = push.again([{"seq": "one"}])
    assert answer.status_code == 422
    assert "items.0.seq" in answer.text


def test_a_driver_of_another_protocol_is_refused_and_its_run_is_at_rest(
    client: httpx.Client, drivers: NoDrivers
) -> None:
    run, push = begun_run(client, drivers)
    push(("status", {"status": "provisioning", "reason": "asks"}))
    strange = {"protocol": PROTOCOL + 1, "attempt": 1, "what": ["no", "version", "knows"]}
    where = f"/internal/runs/{run}/deliveries"
    assert client.post(where, json=strange, headers={"Authorization": "Bearer x"}).status_code == 401
    assert client.get(f"/v1/runs/{run}").json()["status"] == "provisioning"
    for _ in range(2):
        answer = client.post(where, json=strange, headers={"Authorization": f"Bearer {push.order.token}"})
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "other_protocol"
    seen = client.get(f"/v1/runs/{run}").json()
    assert (seen["status"], seen["error"]["code"]) == ("paused", "other_protocol")
    assert "ray.takeNewImage=true" in seen["status_reason"]
    assert client.post(f"/v1/runs/{run}/resume").json()["status"] == "queued"
    until(lambda: len(drivers.orders) == 2)


def test_a_driver_of_another_protocol_that_is_cancelled(client: httpx.Client, drivers: NoDrivers) -> None:
    run = client.post("/v1/runs", json=RUN).json()["id"]
    until(lambda: drivers.orders)
    client.post(f"/v1/runs/{run}/cancel")
    secret = {"Authorization": f"Bearer {drivers.orders[0].token}"}
    client.post(f"/internal/runs/{run}/deliveries", json={"protocol": PROTOCOL + 1, "attempt": 1}, headers=secret)
    assert client.get(f"/v1/runs/{run}").json()["status"] == "cancelled"


def test_a_newer_service_tells_what_the_driver_does_not_know(tmp_path: Path) -> None:
    (tmp_path / ORDER_FILE).write_text(json.dumps(order_of(**NEW)))
    assert read_order(tmp_path).run_id == "run-1"
    answer = {"pushed": 3, "desired_state": "run", "granted": 2, "lease_reason": "", **NEW}
    assert PushAnswer.model_validate(answer).granted == 2


def test_a_driver_that_a_service_of_another_protocol_has_started_says_so(tmp_path: Path) -> None:
    """What the rest of the order means is not known."""
    (tmp_path / ORDER_FILE).write_text(json.dumps({"protocol": PROTOCOL + 1, "attempt": 4, **NEW}))
    assert drive(tmp_path) == ENDED
    (said,) = undelivered(tmp_path, 0)
    assert (said.kind, said.attempt, said.data["status"]) == ("ended", 4, "paused")
    assert f"speaks protocol {PROTOCOL}, and the service protocol {PROTOCOL + 1}" in said.data["reason"]


def test_a_driver_that_does_not_know_the_spec_says_so(tmp_path: Path) -> None:
    spec = RUN | {"of_a_newer_version": 1}
    write_order(tmp_path, DriverOrder.model_validate(order_of(spec=spec)))
    assert drive(tmp_path) == ENDED
    (said,) = undelivered(tmp_path, 0)
    assert (said.kind, said.data["status"], said.data["error"]["code"]) == ("ended", "paused", "other_version")
    assert "of_a_newer_version" in said.data["reason"]


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        (KeyError("x"), "failed", "unexpected KeyError: 'x'\nThe traceback is in the run's logs."),
        (
            NoCluster("no Ray cluster answers; start it there (`ray start --head`)"),
            "queued",
            "the service's Ray cannot be reached; the run's logs say why, and its operator can correct it",
        ),
    ],
)
def test_a_user_of_the_api_is_not_asked_for_what_only_an_operator_can_do(
    fault: Exception, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preflight(_: object) -> None:
        raise fault

    monkeypatch.setattr(driver, "preflight", preflight)
    monkeypatch.setattr(driver, "DELIVER_S", 0.0)
    write_order(tmp_path, DriverOrder.model_validate(order_of()))
    assert drive(tmp_path) == ENDED
    said = undelivered(tmp_path, 0)[-1]
    assert (said.kind, said.data["status"], said.data["reason"]) == ("ended", status, reason)
    assert said.data["error"]["message"] == reason
    assert f"{type(fault).__name__}: " in (tmp_path / "run.log").read_text()


def test_the_host_of_a_newer_version_is_read(tmp_path: Path) -> None:
    """It outlives the service."""
    devices = {"cpu-core": 2}
    now = {"address": "a:1", "pid": os.getpid(), "at": time.time(), "nodes": 1, "devices": devices, "free": devices}
    (tmp_path / RAY_FILE).write_text(json.dumps(now | NEW))
    found = read_ray(tmp_path / RAY_FILE)
    assert found is not None
    assert found.devices == devices
