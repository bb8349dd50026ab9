"""Keys, origins, sizes and rates, tried against a served application."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from fakes.fake_service import RUN, SAMPLE, NoDrivers, Pushes, served, there_is_ray, until
from rlhfless.control import keys as keys_module
from rlhfless.control.database.tables import KeyRow, RunRow
from rlhfless.control.keys import NotSafe, make_key, require_safe
from rlhfless.control.service import Service, open_database
from rlhfless.control.settings import LimitsOfRequests, Retention, ServiceSettings
from rlhfless.control.supervisor import sweep


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[httpx.Client, Service]]:
    limits = LimitsOfRequests(body_bytes=2000, requests_per_minute=40, streams=2)
    settings = ServiceSettings(data=str(tmp_path / "data"), requests=limits)
    there_is_ray(settings.folder)
    with served(settings, NoDrivers()) as pair:
        yield pair


def key(service: Service, scope: str) -> dict[str, str]:
    with Session(service.database.engine) as session:
        _, secret = make_key(session, "test", scope)  # type: ignore[arg-type]
        session.commit()
    return {"Authorization": f"Bearer {secret}"}


def test_scopes(service: tuple[httpx.Client, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "KEPT_S", 0.0)
    client, state = service
    assert client.get("/v1/runs").status_code == 200
    reads, runs = key(state, "read"), key(state, "run")
    assert client.get("/v1/runs").status_code == 401
    assert client.get("/v1/runs", headers={"Authorization": "Bearer rlk_wrong"}).status_code == 401
    assert client.get("/v1/runs", headers=reads).status_code == 200
    refused = client.post("/v1/runs", json=RUN, headers=reads)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert client.post("/v1/runs", json=RUN, headers=runs).status_code == 201
    assert client.get("/healthz").status_code == 200
    stored = (state.settings.folder / "service.sqlite").read_bytes() + b"".join(
        file.read_bytes() for file in state.settings.folder.glob("service.sqlite-*")
    )
    assert runs["Authorization"].split()[1].encode() not in stored


def test_keys_of_two_owners_do_not_share_idempotency_keys_nor_runs(
    service: tuple[httpx.Client, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "KEPT_S", 0.0)
    client, state = service
    one, other, admin = key(state, "run"), key(state, "run"), key(state, "admin")
    once = {"Idempotency-Key": "once"}
    first = client.post("/v1/runs", json=RUN, headers=one | once).json()["id"]
    assert client.post("/v1/runs", json=RUN, headers=other | once).json()["id"] != first
    assert client.get(f"/v1/runs/{first}", headers=other).status_code == 200
    assert client.post(f"/v1/runs/{first}/cancel", headers=other).status_code == 403
    assert client.post(f"/v1/runs/{first}/pause", headers=one).status_code == 200
    assert client.post(f"/v1/runs/{first}/cancel", headers=admin).status_code == 200


def test_a_service_with_keys_answers_under_any_name_from_its_first_request_on(tmp_path: Path) -> None:
    there_is_ray(tmp_path)
    settings = ServiceSettings(data=str(tmp_path))
    with served(settings, NoDrivers()) as (_, state):
        one = key(state, "read")
    with served(settings, NoDrivers()) as (client, _):
        assert client.get("/v1/runs", headers=one | {"Host": "rlhfless.example"}).status_code == 200


def test_off_loopback_a_service_is_not_open_when_its_last_key_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "KEPT_S", 0.0)
    there_is_ray(tmp_path)
    with served(ServiceSettings(data=str(tmp_path), host="0.0.0.0"), NoDrivers()) as (client, state):
        one = key(state, "read")
        assert client.get("/v1/runs", headers=one).status_code == 200
        with Session(state.database.engine) as session:
            session.execute(update(KeyRow).values(revoked_at=1.0))
            session.commit()
        assert client.get("/v1/runs", headers=one).status_code == 401
        assert client.get("/v1/runs").status_code == 401


STRANGE = [
    "evil.example",
    "127.0.0.1:{port}.evil.example",
    "127.0.0.1.evil.example:{port}",
    "evil.example@127.0.0.1:{port}",
    "127.0.0.1:{port}@evil.example",
    "127.0.0.1:{port}#.evil.example",
    "127.0.0.1:{port}\\.evil.example",
    "localhost:{other}",
    "localhost",
    "[::1]:{port}.evil.example",
    "127.0.0.1:{port} evil.example",
]
"""What is no authority, or another one than the service's."""


@pytest.mark.parametrize("authority", STRANGE)
def test_pages_of_other_sites_reach_nothing(client: httpx.Client, authority: str) -> None:
    port = client.base_url.port
    assert port is not None
    authority = authority.format(port=port, other=port + 1)
    for headers in ({"Host": authority}, {"Origin": f"http://{authority}"}, {"Origin": f"https://{authority}"}):
        answer = client.post("/v1/runs", json=RUN, headers=headers)
        assert answer.status_code == 403, headers


def test_its_own_pages_reach_it(service: tuple[httpx.Client, Service]) -> None:
    client, state = service
    port = client.base_url.port
    for own in (f"localhost:{port}", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        headers = {"Host": own, "Origin": f"http://{own}"}
        assert client.get("/v1/runs", headers=headers).status_code == 200, own
    for origin in ("null", "file://", f"ftp://localhost:{port}"):
        assert client.get("/v1/runs", headers={"Origin": origin}).status_code == 403, origin
    object.__setattr__(state.settings, "public_url", "https://rlhfless.example/")
    for origin, code in (("https://rlhfless.example", 200), ("http://rlhfless.example", 403)):
        headers = {"Host": "rlhfless.example", "Origin": origin}
        assert client.get("/v1/runs", headers=headers).status_code == code, origin


def test_bodies_are_bounded_also_in_chunks(small: tuple[httpx.Client, Service]) -> None:
    client, _ = small
    large = json.dumps(RUN | {"metadata": {"a": "x" * 500}}).encode() + b" " * 2000
    json_type = {"Content-Type": "application/json"}
    assert client.post("/v1/runs", content=large, headers=json_type).status_code == 413

    def chunks(content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    answer = client.post("/v1/runs", content=chunks(large), headers=json_type)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert client.post("/v1/runs", content=chunks(json.dumps(RUN).encode()), headers=json_type).status_code == 201


def test_rates_are_bounded(small: tuple[httpx.Client, Service]) -> None:
    client, _ = small
    if time.time() % 60 > 50:
        time.sleep(61 - time.time() % 60)  # the window begins with the minute
    codes = [client.get("/v1/runs").status_code for _ in range(45)]
    assert codes.count(429) == 5
    answer = client.get("/v1/runs")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert client.get("/healthz").status_code == 200


def test_off_loopback_a_key_is_needed(tmp_path: Path) -> None:
    settings = ServiceSettings(data=str(tmp_path), host="0.0.0.0")
    database = open_database(settings)
    with pytest.raises(NotSafe, match="rlhfless keys create"):
        require_safe(settings, database)
    with Session(database.engine) as session:
        make_key(session, "first", "admin")
        session.commit()
    require_safe(settings, database)
    database.close()


SECRET = "hunter2-hunter2"


def test_secrets_are_in_no_answer(service: tuple[httpx.Client, Service], drivers: NoDrivers) -> None:
    client, state = service
    object.__setattr__(state.settings, "code", ("mine",))
    rewards = [
        {"type": "python", "target": "mine:score", "kwargs": {"api_key": SECRET, "depth": {"token": SECRET}}},
        {"type": "http", "url": f"https://rewards.example/?token={SECRET}"},
    ]
    run = client.post("/v1/runs", json=RUN | {"rewards": rewards}).json()["id"]
    until(lambda: drivers.orders)
    assert SECRET in json.dumps(drivers.orders[0].spec), "the driver needs it"
    push = Pushes(client, drivers.orders[0])
    text = f"cannot ask https://user:{SECRET}@rewards.example; Authorization: Bearer {SECRET}"
    failure = {"code": "invalid", "message": text, "param": None, "problems": []}
    push(("message", {"level": "error", "message": text}), reason=text)
    push(("resolved", {"spec": RUN | {"rewards": rewards}}))
    sample = SAMPLE | {"failures": {"http": text}}
    push(("rollouts", {"step": 1, "samples": [sample]}))
    push(("ended", {"status": "failed", "reason": text, "error": failure, "retry": False}))
    for path in ("", "/events", "/rollouts"):
        answer = client.get(f"/v1/runs/{run}{path}")
        assert answer.status_code == 200
        assert "***" in answer.text
        assert SECRET not in answer.text
    assert SECRET not in client.get("/v1/runs").text


def test_a_password_in_a_url_is_refused_and_not_repeated(client: httpx.Client) -> None:
    url = f"https://user:{SECRET}@rewards.example/score"
    for changes in ({"rewards": [{"type": "http", "url": url}]}, {"checkpoint": {"url": url}}):
        answer = client.post("/v1/runs", json=RUN | changes)
        assert (answer.status_code, SECRET in answer.text) == (422, False)
        assert "a user or a password in a URL would show" in answer.json()["error"]["message"]


async def test_retention_removes_what_is_over_for_long_enough(tmp_path: Path) -> None:
    settings = ServiceSettings(data=str(tmp_path), retention=Retention(days=2))
    database = open_database(settings)
    now_s = time.time()
    outside = tmp_path / "outside"
    outside.mkdir()

    def fill(session: Session) -> None:
        for name, status, age_days in (("old", "failed", 3), ("new", "failed", 1), ("busy", "running", 9)):
            row = new_run_row(name, status, settings.runs / name)
            row.finished_at = now_s - age_days * 86400 if status == "failed" else None
            session.add(row)
        session.add(new_run_row("strange", "failed", outside))
        session.get(RunRow, "strange").finished_at = 1.0  # type: ignore[union-attr]

    await database.write(fill)
    for name in ("old", "new", "busy"):
        (settings.runs / name).mkdir(parents=True)
    assert sorted(await sweep(database, settings, now_s)) == ["old", "strange"]
    assert sorted(folder.name for folder in settings.runs.iterdir()) == ["busy", "new"]
    assert outside.exists()
    database.close()


def new_run_row(name: str, status: str, folder: Path) -> RunRow:
    texts = dict.fromkeys(("status_reason", "driver_token"), "")
    zeros = dict.fromkeys(
        ("created_at", "status_since", "desired_at", "priority", "steps", "step", "cost_usd", "device_s", "attempt",
         "deaths", "simulated_step", "pushed", "last_event"), 0)  # fmt: skip
    empty = {"spec": {}, "run_metadata": {}, "latest": {}, "checkpoints": []}
    where = {
        "id": name,
        "name": name,
        "owner": "local",
        "status": status,
        "desired_state": "run",
        "folder": str(folder),
    }
    return RunRow(**where, **texts, **zeros, **empty)
