"""A driver looks again at what its spec names: links may have changed since the service looked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.fake_service import RUN
from rlhfless.control.delivery import DriverOrder
from rlhfless.control.driver.main import ENDED, drive
from rlhfless.control.driver.service_client import undelivered
from rlhfless.control.drivers import write_order


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How the driver of a run ends, whose prompts are at a path; there is no service, and it does not wait for one."""
    monkeypatch.setattr("rlhfless.control.driver.main.DELIVER_S", 0.1)
    folder = tmp_path / "data" / "runs" / "run-1"
    folder.mkdir(parents=True)
    (tmp_path / "root").mkdir()
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}')

    def end(path: str) -> dict[str, Any]:
        order = DriverOrder(
            run_id="run-1", attempt=1, token="x", service_file="nowhere", service_url="http://127.0.0.1:9",
            ray_address="auto", one_machine=False, http_hosts=[], roots=[str(tmp_path / "root")],
            spec=RUN | {"model": {"path": str(tmp_path / "root")}, "prompts": {"path": path}},
        )  # fmt: skip
        write_order(folder, order)
        assert drive(folder) == ENDED
        return undelivered(folder, 0)[-1].data

    return end


@pytest.mark.parametrize("kind", ["outside", "link", "link within", "name"])
def test_nothing_outside_of_the_roots_is_opened(
    ended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    secret, root = tmp_path / "secret.jsonl", tmp_path / "root"
    path = {"outside": str(secret), "link": str(root / "a.jsonl"), "link within": str(root / "set"), "name": "a/b"}
    (root / "a.jsonl").symlink_to(secret)
    (root / "set" / "deep").mkdir(parents=True)
    (root / "set" / "deep" / "train.jsonl").symlink_to(secret)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to(secret)
    monkeypatch.chdir(tmp_path)
    said = ended(path[kind])
    assert said["status"] == "failed"
    assert [problem["param"] for problem in said["error"]["problems"]][-1:] == ["prompts.path"]
    why = {"name": "is a name of the hub; but", "link within": "is a link out of the service's roots"}
    assert why.get(kind, "is below none of the service's roots") in said["reason"]
