"""What a service wants from the autoscaler of its Ray: the host requests it once, and nothing without an answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhfless.control import ray_host
from rlhfless.control.ray_host import WANTED_FILE, HostReplaced, RayHostSupervisor, RayReport
from rlhfless.fleet import cluster as cluster_module
from rlhfless.fleet.cluster import Cluster


class JoinedCluster:
    address, lost = "10.0.0.1:6379", False

    def __init__(self) -> None:
        self.requested: list[dict[str, int]] = []

    async def nodes(self, _: str) -> list[Any]:
        return []

    def request(self, wanted: Mapping[str, int]) -> None:
        self.requested.append(dict(wanted))

    async def stop(self) -> None:
        pass


async def test_a_host_requests_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, answers = JoinedCluster(), iter([None, {"h100": 4}, {"h100": 4}, None, {"h100": 8}, {}])

    async def start(*_: object) -> JoinedCluster:
        return joined

    async def send(_: RayReport) -> Mapping[str, int] | None:
        try:
            return next(answers)
        except StopIteration:
            raise HostReplaced from None

    monkeypatch.setattr(Cluster, "start", start)
    monkeypatch.setattr(ray_host, "REPORT_S", 0.01)
    with pytest.raises(HostReplaced):
        await ray_host.host("auto", tmp_path, send)
    assert joined.requested == [{"h100": 4}, {"h100": 8}, {}], "without runs, nothing"


async def test_the_host_of_a_joined_cluster_finds_it_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayHostSupervisor, "_start", lambda _: None)
    wanted: list[dict[str, int] | None] = [None]
    supervisor = RayHostSupervisor(tmp_path, "10.0.0.1:6379", lambda: wanted[-1])
    await supervisor.tick()
    assert not (tmp_path / WANTED_FILE).exists()
    wanted.append({"h100": 4})
    await supervisor.tick()
    assert (tmp_path / WANTED_FILE).read_text() == '{"h100": 4}'


def test_devices_are_requested_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(cluster_module, "request_resources", lambda **request: told.append(request))
    Cluster().request({"h100": 2, "cpu-core": 1})
    Cluster().request({})
    assert told == [
        {
            "bundles": [{"GPU": 1}, {"GPU": 1}, {"CPU": 1}],
            "bundle_label_selectors": [{"ray.io/accelerator-type": "in(H100)"}] * 2 + [{}],
        },
        {"bundles": [], "bundle_label_selectors": []},
    ]
