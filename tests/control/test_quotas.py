"""`rlhfless up --quota`: the devices of the runs of an API key, and its share of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from fakes.fake_service import RUN, NoDrivers, Pushes, served, there_is_ray, until
from rlhfless.cli import service as up
from rlhfless.cli.main import app
from rlhfless.control import keys as keys_module
from rlhfless.control.settings import Quota, ServiceSettings

SECRETS = {"team-a": "a" * 43, "team-b": "b" * 43}


@pytest.mark.parametrize(
    ("given", "quota"),
    [
        ("team-a=16:2", Quota(max_devices=16, weight=2)),
        ("team-a=16", Quota(max_devices=16)),
        ("team-a=0:0.5", Quota(weight=0.5)),
    ],
)
def test_a_quota_as_it_is_given(given: str, quota: Quota) -> None:
    settings = ServiceSettings.model_validate({"quotas": dict([up._quota(given)])})
    assert settings.quotas == {"team-a": quota}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("team-a", "'team-a' is not of the form NAME=N, such as team-a=16:2"),
        ("team-a=all", "'team-a=all' is not of the form NAME=N, such as team-a=16:2"),
        ("team-a=16:much", "'team-a=16:much': the weight 'much' is no number"),
        ("team-a=16:0", "quotas.team-a.weight: 0"),
        ("team-a=16:nan", "quotas.team-a.weight"),
    ],
)
def test_a_quota_that_is_none_is_refused(given: str, error: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["up", "--quota", given, "--data", str(tmp_path / "data")])
    assert done.exit_code
    assert error in f"{done.output} {done.exception}"
    assert not (tmp_path / "data").exists()


def test_a_quota_of_no_key_is_refused(tmp_path: Path) -> None:
    put_key(tmp_path, "team-a", SECRETS["team-a"])
    done = CliRunner().invoke(app, ["up", "--quota", "taem-a=16", "--data", str(tmp_path)])
    assert done.exit_code
    for text in ("--quota taem-a", "'taem-a' is not the name of an API key (known: team-a)", "did you mean `team-a`?"):
        assert text in f"{done.output} {done.exception}"


def put_key(folder: Path, name: str, secret: str) -> None:
    (folder / "secret").write_text(secret)
    words = ["keys", "put", name, "--scope", "admin", "--from", str(folder / "secret"), "--data", str(folder)]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[tuple[dict[str, httpx.Client], NoDrivers]]:
    """Clients by the name of their API key, of a service with 8 cores where `team-a` may have 4, and counts three
    times."""
    quotas = dict(map(up._quota, ("team-a=4:3",)))
    settings = ServiceSettings.model_validate({"data": str(tmp_path), "port": 0, "quotas": quotas})
    there_is_ray(tmp_path, cores=8)
    for name, secret in SECRETS.items():
        put_key(tmp_path, name, secret)
    drivers = NoDrivers()
    with served(settings, drivers) as (client, _):
        clients = {
            name: httpx.Client(base_url=client.base_url, headers={"Authorization": f"Bearer {secret}"}, timeout=30)
            for name, secret in SECRETS.items()
        }
        yield clients, drivers
        for each in clients.values():
            each.close()


def test_the_runs_of_a_key_have_no_more_than_its_quota(
    keys: tuple[dict[str, httpx.Client], NoDrivers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the key is replaced by another one of its name."""
    monkeypatch.setattr(keys_module, "KEPT_S", 0.0)
    clients, drivers = keys

    def begun(name: str) -> Pushes:
        before = len(drivers.orders)
        clients[name].post("/v1/runs", json=RUN).raise_for_status()
        until(lambda: len(drivers.orders) > before)
        return Pushes(clients[name], drivers.orders[-1])

    def lease(size: int, sizes: list[int], **more: Any) -> dict[str, Any]:
        told = {"kind": "cpu-core", "minimum": sizes[0], "maximum": sizes[-1], "unit": 1, "held": size, "sizes": sizes}
        return told | {"steps_left": 1000.0, "change_s": 1.0, "seen_s": {}} | more

    mine = begun("team-a")
    assert until(lambda: mine(lease=lease(0, [2, 4, 8])).json()["granted"]) == 4, "not the 8 that are free"
    put_key(tmp_path, "team-a", "c" * 43)
    clients["team-a"].headers["Authorization"] = f"Bearer {'c' * 43}"
    second = begun("team-a")
    sizes = lease(0, [4])
    waits = "waiting for 4 x cpu-core: its API key may have 4 (--quota), and has 4"
    assert until(lambda: second(lease=sizes).json()["lease_reason"] == waits)
    theirs = begun("team-b")
    assert until(lambda: theirs(lease=lease(0, [2, 4])).json()["granted"]) == 4, "it is not behind the other"
    assert mine(lease=lease(4, [2, 4, 8])).json()["granted"] == 4
    told = clients["team-b"].get("/v1/devices").json()["data"][0]["runs"]
    assert sorted(run["granted"] for run in told) == [0, 4, 4]
