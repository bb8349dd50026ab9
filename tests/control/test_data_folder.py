"""The data folder is for its user alone, without what a Ray has left; the service's secrets stay with it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless.control import settings as settings_module
from rlhfless.control.ray_host import LOCK_FILE, stop_host
from rlhfless.control.service import lock_data
from rlhfless.control.settings import ServiceSettings, environment_of_runs, open_data
from rlhfless.fleet import private_ray
from rlhfless.util.folders import NotPrivate


def opened(folder: Path) -> Path:
    return open_data(ServiceSettings(data=str(folder)))


def test_what_a_command_makes_is_for_the_user_alone(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    words = [Path(sys.executable).with_name("rlhfless"), "keys", "create", "someone", "--data", str(data)]
    subprocess.run(words, check=True, timeout=120, umask=0o022, stdout=subprocess.DEVNULL)
    made = [tmp_path / "deep", data, *data.rglob("*")]
    assert len(made) > 2
    assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("left", [(), ("service.sqlite", "runs"), ("ray.json", "other.txt")])
def test_a_folder_of_a_service_is_closed_to_others(left: tuple[str, ...], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in left:
        (data / name).touch()
    data.chmod(0o755)
    with lock_data(ServiceSettings(data=str(data))):
        assert data.stat().st_mode & 0o7777 == 0o700


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    data = tmp_path / "home"
    data.mkdir()
    (data / "letter.txt").touch()
    data.chmod(0o755)
    with pytest.raises(NotPrivate, match=r"home cannot be .* \(mode 0755\).* with --data, or `chmod 700"):
        opened(data)
    assert data.stat().st_mode & 0o7777 == 0o755
    data.chmod(0o700)
    assert opened(data) == data


def test_a_folder_that_any_user_can_replace_or_another_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(NotPrivate, match=r"any user can replace files in .*shared \(mode 0777\)"):
        opened(shared / "data")
    shared.chmod(0o1777)
    opened(shared / "data")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(NotPrivate, match="belongs to another user"):
        opened(shared / "data")
    monkeypatch.setattr(settings_module.os.path, "ismount", lambda path: path == shared / "data")
    assert opened(shared / "data") == shared / "data", "a volume of a pod belongs to root"


def test_down_removes_what_a_killed_ray_has_left(tmp_path: Path) -> None:
    data = tmp_path / ("data" * 20)
    session = private_ray.make(data)
    (session / "logs").mkdir()
    (session / "logs" / "worker.err").write_text("a reward's output")
    with (data / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stop_host(data, 1)
        assert session.exists(), "a host is there that does not answer"
    stop_host(data, 1)
    assert not session.parent.exists()
    assert os.listdir(data) == [LOCK_FILE]
    assert stop_host(tmp_path / "none", 1)
    assert not (tmp_path / "none").exists()


def test_what_the_service_starts_does_not_get_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLHFLESS_DATABASE", "PGPASSWORD", "RLHFLESS_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    found = environment_of_runs()
    assert [name for name, value in found.items() if value == "secret"] == ["AWS_SECRET_ACCESS_KEY"], "for checkpoints"
    assert found["PATH"] == os.environ["PATH"]
