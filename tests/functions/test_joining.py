"""A cluster that cannot be joined is said so, in bounded time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from rlhfless.fleet import cluster
from rlhfless.fleet.cluster import Cluster, NoCluster
from rlhfless.spec import PlacementSpec


async def test_an_address_where_nobody_listens_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(NoCluster, match=f"no Ray cluster answers at placement.ray_address '{address}'"):
            await Cluster.start(PlacementSpec(ray_address=address))


@pytest.mark.parametrize("address", ["auto", "ray://head:10001"])
async def test_other_forms_of_addresses_are_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_start", starts(fails_with=ConnectionError("could not find any running Ray")))
    with pytest.raises(NoCluster, match=f"no Ray cluster at placement.ray_address '{address}': could not find"):
        await Cluster.start(PlacementSpec(ray_address=address))


async def test_a_listener_that_is_no_ray_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "START_S", 0.05)
    never = threading.Event()
    monkeypatch.setattr(Cluster, "_start", starts(waits_for=never))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NoCluster, match=rf"waited 0 s for Ray at placement.ray_address '{address}' to let this"):
            await Cluster.start(PlacementSpec(ray_address=address))
    never.set()


async def test_what_else_goes_wrong_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_start", starts(fails_with=PermissionError("/tmp/ray")))
    with pytest.raises(PermissionError, match="/tmp/ray"):
        await Cluster.start(PlacementSpec())


def starts(*, fails_with: Exception | None = None, waits_for: threading.Event | None = None) -> Callable[..., Cluster]:
    def start(_: PlacementSpec) -> Cluster:
        if waits_for is not None:
            waits_for.wait(10)
        raise fails_with or PermissionError("nobody hears this")

    return start
