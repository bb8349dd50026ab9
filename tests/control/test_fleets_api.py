"""Fleets over HTTP: which runs may join one, and its bill."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fake_service import RUN, NoDrivers, Pushes, begun_run, until
from rlhfless.control.fleets import GONE_S, Fleets
from rlhfless.control.objects import FleetEngineNow
from rlhfless.control.service import Service
from rlhfless.records.checkpoints import STATE_FOLDER

SHARING: dict[str, Any] = RUN | {
    "model": {"path": "some/model", "lora": {"rank": 8, "alpha": 16}},
    "placement": {"share": "adapters"},
}


def test_a_run_with_other_settings_is_refused_with_the_difference(client: httpx.Client) -> None:
    first = client.post("/v1/runs", json=SHARING)
    assert first.status_code == 201
    assert client.post("/v1/runs", json=SHARING | {"seed": 5, "steps": 9}).status_code == 201
    other = SHARING | {"generation": {"engine": {"max_sequences": 8}}}
    answer = client.post("/v1/runs", json=other)
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("other_fleet", "placement.share")
    assert first.json()["id"] in error["message"]
    assert "generation.engine.max_sequences (8, and auto in the fleet)" in error["message"]
    assert client.post("/v1/runs", json=other | {"model": SHARING["model"] | {"path": "another"}}).status_code == 201
    assert client.post("/v1/runs", json=RUN).status_code == 201, "it shares nothing"
    for run in client.get("/v1/runs").json()["data"]:
        client.post(f"/v1/runs/{run['id']}/cancel")
    assert client.post("/v1/runs", json=other).status_code == 201, "the fleet is gone"


def test_a_spec_that_cannot_share_says_why(client: httpx.Client) -> None:
    for changes, text in (
        ({"model": {"path": "some/model"}}, "the run trains no adapter"),
        ({"generation": {"lora": "merged"}}, "generation.lora is merged"),
        ({"placement": {"share": "adapters", "mode": "colocated"}}, "set mode to disaggregated"),
        ({"placement": {"share": "adapters", "tenants": 1}}, "tenants is 1"),
        ({"scaling": {"prefill": {"max_actors": 1}}}, "scaling.prefill.max_actors is 1"),
    ):
        answer = client.post("/v1/runs", json=SHARING | changes)
        assert answer.status_code == 422
        assert text in answer.json()["error"]["message"]


def engine(now_s: float, incarnation: str = "i1", **runs: dict[str, Any]) -> FleetEngineNow:
    return FleetEngineNow(
        fleet="f1",
        engine=f"fleet-f1-{incarnation}",
        incarnation=incarnation,
        terms={"model.path": "some/model"},
        slots=8,
        kind="h100",
        devices=2,
        started_s=100.0,
        up_s=140.0,
        now_s=now_s,
        runs=runs,
    )


def test_the_bill_adds_up_to_the_device_time_of_the_engines() -> None:
    fleets = Fleets()
    fleets.add([engine(200.0, a={"busy_s": 30.0, "running": 3}, b={"busy_s": 10.0, "waiting": 2})])
    fleets.add([engine(190.0, a={"busy_s": 29.0})])  # older, of another driver
    (fleet,) = fleets.objects(201.0)
    assert (fleet.provisioned_device_s, fleet.cold_device_s) == (200.0, 80.0)
    assert (fleet.busy_device_s, fleet.idle_device_s) == (80.0, 40.0)
    assert fleet.busy_device_s + fleet.idle_device_s + fleet.cold_device_s == fleet.provisioned_device_s
    assert [(run.run_id, run.busy_device_s, run.share, run.waiting, run.running) for run in fleet.runs] == [
        ("a", 60.0, 0.75, 0, 3),
        ("b", 20.0, 0.25, 2, 0),
    ]
    assert all(run.present for run in fleet.runs)


def test_an_engine_that_has_ended_keeps_its_figures() -> None:
    fleets = Fleets()
    fleets.add([engine(200.0, a={"busy_s": 30.0, "running": 3})])
    fleets.add([engine(300.0, "i2", a={"busy_s": 5.0, "present": False})])
    (fleet,) = fleets.objects(201.0 + GONE_S)
    assert [each.up for each in fleet.engines] == [False, True]
    assert [(run.busy_device_s, run.present, run.running) for run in fleet.runs] == [(70.0, False, 0)]


def test_drivers_report_their_engines(client: httpx.Client, drivers: NoDrivers) -> None:
    run, push = begun_run(client, drivers)
    assert client.get("/v1/fleets").json()["data"] == []
    push(fleet=[engine(200.0, **{run: {"busy_s": 30.0}}).model_dump()])
    (fleet,) = client.get("/v1/fleets").json()["data"]
    assert (fleet["object"], fleet["id"], fleet["runs"][0]["run_id"]) == ("fleet", "f1", run)
    assert fleet["busy_device_s"] == pytest.approx(60.0)


def test_the_adapter_of_a_step_is_downloaded_without_the_optimizer(
    service: tuple[httpx.Client, Service], drivers: NoDrivers
) -> None:
    client, served = service
    run = client.post("/v1/runs", json=SHARING).json()["id"]
    until(lambda: drivers.orders)
    assert client.get(f"/v1/runs/{run}/adapter").status_code == 404, "no checkpoint yet"
    entries = []
    for step in (2, 4):
        folder = served.settings.runs / run / "checkpoints" / f"step-{step:06d}"
        (folder / STATE_FOLDER).mkdir(parents=True)
        for name in ("run.json", "adapter_config.json", f"{STATE_FOLDER}/optimizer.safetensors"):
            (folder / name).write_text("{}")
        (folder / "adapter_model.safetensors").write_text(f"of step {step}")
        shown = {"best": False, "score": None, "created_at": 1.0}
        entries.append({"id": folder.name, "step": step, "location": str(folder), **shown})
    Pushes(client, drivers.orders[0])(("checkpoints", {"checkpoints": entries}))
    for query, step in (("", 4), ("?step=2", 2)):
        answer = client.get(f"/v1/runs/{run}/adapter{query}")
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            files = {Path(name).name: tar.extractfile(name) for name in tar.getnames()}
            assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
            weights = files["adapter_model.safetensors"]
            assert weights is not None
            assert weights.read() == f"of step {step}".encode()
    missing = client.get(f"/v1/runs/{run}/adapter?step=3")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "step")
    assert "those of steps: 2, 4" in missing.json()["error"]["message"]
    full = client.post("/v1/runs", json=RUN).json()["id"]
    assert client.get(f"/v1/runs/{full}/adapter").json()["error"]["code"] == "no_adapter"
