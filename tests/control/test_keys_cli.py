"""`rlhfless keys`: a secret that was made elsewhere becomes a key; keys are revoked by id or name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakes.fake_service import NoDrivers, served, there_is_ray
from rlhfless.cli.main import app
from rlhfless.control import keys as keys_module
from rlhfless.control.settings import ServiceSettings


def put(folder: Path, secret: str, scope: str = "admin") -> tuple[int, str]:
    (folder / "secret").write_text(f"{secret}\n")
    words = ["keys", "put", "installed", "--scope", scope, "--from", str(folder / "secret"), "--data", str(folder)]
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output.strip()


def test_a_secret_is_a_key_until_another_one_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "KEPT_S", 0.0)
    first, second = "a" * 43, "b" * 43
    code, key = put(tmp_path, first)
    assert code == 0
    assert put(tmp_path, first) == (0, key)
    there_is_ray(tmp_path)
    with served(ServiceSettings(data=str(tmp_path)), NoDrivers()) as (client, _):

        def status(secret: str) -> int:
            answer = client.get("/v1/runs", headers={"Authorization": f"Bearer {secret}"})
            assert answer.status_code == 200 or "does not know this API key" in answer.json()["error"]["message"]
            return answer.status_code

        assert (status(first), status(second)) == (200, 401)
        assert put(tmp_path, second)[0] == 0
        assert (status(first), status(second)) == (401, 200)


def test_the_last_key_that_is_revoked_does_not_open_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "KEPT_S", 0.0)
    there_is_ray(tmp_path)
    settings = ServiceSettings(data=str(tmp_path))
    with served(settings, NoDrivers()) as (client, _):
        assert client.get("/v1/runs").status_code == 200, "no key was ever made"
        secret = "d" * 43
        put(tmp_path, secret)
        authorized = {"Authorization": f"Bearer {secret}"}
        assert (client.get("/v1/runs").status_code, client.get("/v1/runs", headers=authorized).status_code) == (
            401,
            200,
        )
        assert CliRunner().invoke(app, ["keys", "revoke", "installed", "--data", str(tmp_path)]).exit_code == 0
        refused = client.get("/v1/runs")
        assert (refused.status_code, client.get("/v1/runs", headers=authorized).status_code) == (401, 401)
        assert refused.json()["error"]["message"].endswith("with a key from its operator")
    with served(settings, NoDrivers()) as (client, _):
        assert client.get("/v1/runs").status_code == 401, "nor does a new start"


def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    code, said = put(tmp_path, "short")
    assert code == 2
    assert "openssl rand -hex 32" in " ".join(said.replace("│", " ").split())
    assert put(tmp_path, "a" * 43, scope="root")[0] == 2


def test_migrate_makes_the_tables_and_may_be_called_again(tmp_path: Path) -> None:
    words = ["migrate", "--data", str(tmp_path)]
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "are up to date" in done.output
    code, key = put(tmp_path, "c" * 43)
    assert (code, key[:4]) == (0, "key_")


def test_a_key_is_revoked_by_its_name_where_one_has_it(tmp_path: Path) -> None:
    def keys(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["keys", *words, "--data", str(tmp_path)])
        return done.exit_code, done.output

    assert "no keys yet" in keys("list")[1]
    for name in ("alice", "bob", "bob"):
        assert keys("create", name, "--scope", "read")[0] == 0
    first, second = (line.split()[0] for line in keys("list")[1].splitlines() if line.endswith("bob"))
    assert keys("revoke", "alice")[1].startswith("revoked key_")
    assert "several keys are named 'bob'" in keys("revoke", "bob")[1]
    assert keys("revoke", first) == (0, f"revoked {first}\n")
    assert keys("revoke", first) == (0, f"revoked {first}\n"), "idempotent"
    assert keys("revoke", "bob") == (0, f"revoked {second}\n")
    assert "there is no key 'carol'" in keys("revoke", "carol")[1]
