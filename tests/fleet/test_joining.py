"""Failures to join a cluster are reported within bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ray.exceptions import ActorAlreadyExistsError

from rlhfless.fleet import cluster, ray_session
from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.ray_session import NoCluster
from rlhfless.spec import PlacementSpec


async def test_an_address_where_nothing_listens_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(NoCluster, match=f"no Ray cluster answers at placement.ray_address '{address}'"):
            await Cluster.start(PlacementSpec(ray_address=address), tmp_path)


@pytest.mark.parametrize("address", ["auto", "ray://head:10001"])
async def test_other_forms_of_addresses_are_left_to_ray(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "_start", starts(fails_with=ConnectionError("could not find any running Ray")))
    with pytest.raises(NoCluster, match=f"no Ray cluster at placement.ray_address '{address}': could not find"):
        await Cluster.start(PlacementSpec(ray_address=address), tmp_path)


def test_a_controller_that_another_driver_makes_at_the_same_moment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve fails if the controller's name is taken after its look-up; the next look-up finds the controller."""
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    calls: list[object] = []

    def start(**_: object) -> None:
        calls.append(None)
        if len(calls) <= taken:
            raise ActorAlreadyExistsError("Actor with name 'SERVE_CONTROLLER_ACTOR' already exists")

    monkeypatch.setattr(cluster.serve, "start", start)
    taken = 1
    cluster._start_serve(within_s=60)
    assert len(calls) == 2
    calls.clear()
    taken = 10**9
    with pytest.raises(ActorAlreadyExistsError):
        cluster._start_serve(within_s=0)


async def test_a_cluster_that_fails_a_driver_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service starts another attempt after NoCluster; another kind of error would pause the run."""
    monkeypatch.setattr(Cluster, "_start", starts(fails_with=ActorAlreadyExistsError("SERVE_CONTROLLER_ACTOR")))
    with pytest.raises(NoCluster, match="did not let this run in: ActorAlreadyExistsError: SERVE_CONTROLLER_ACTOR"):
        await Cluster.start(PlacementSpec(ray_address="auto"), tmp_path)


async def test_a_listener_that_is_no_ray_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "START_S", 0.05)
    never = threading.Event()
    monkeypatch.setattr(Cluster, "_start", starts(waits_for=never))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NoCluster, match=rf"waited 0 s for Ray at placement.ray_address '{address}' to let this"):
            await Cluster.start(PlacementSpec(ray_address=address), tmp_path)
    never.set()


async def test_a_ray_that_is_not_up_in_time_is_no_fault_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare Exception, and has no setting for its start timeout."""
    monkeypatch.setattr(Cluster, "_start", starts(fails_with=Exception("The current node timed out during startup.")))
    with pytest.raises(
        NoCluster,
        match=rf"Ray did not start: The current node timed out .* See the logs in {tmp_path}/ray, and start again",
    ):
        await Cluster.start(PlacementSpec(), tmp_path)


async def test_what_else_goes_wrong_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_start", starts(fails_with=PermissionError("/tmp/ray")))
    with pytest.raises(PermissionError, match="/tmp/ray"):
        await Cluster.start(PlacementSpec(), tmp_path)


def starts(*, fails_with: Exception | None = None, waits_for: threading.Event | None = None) -> Callable[..., Cluster]:
    def start(_: PlacementSpec, __: Path, ___: Path | None = None) -> Cluster:
        if waits_for is not None:
            waits_for.wait(60)
        raise fails_with or PermissionError("nothing hears this")

    return start


@pytest.mark.parametrize("address", ["10.1.2.3:6379", "head.example:6379", "ray://head:10001", "auto"])
async def test_a_cluster_on_the_network_is_not_joined_without_a_token(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(NoCluster) as refused:
        await Cluster.start(PlacementSpec(ray_address=address), tmp_path)
    text = str(refused.value)
    assert text.startswith(f"RAY_AUTH_MODE is 'disabled', and placement.ray_address '{address}' is not on loopback")
    assert "Set RAY_AUTH_MODE=token" in text
    assert "`placement.trusted_network: true`" in text


@pytest.mark.parametrize(
    ("address", "mode", "trusted"),
    [
        ("127.0.0.1:6379", "disabled", False),
        ("localhost:6379", "disabled", False),
        ("[::1]:6379", "disabled", False),
        ("10.1.2.3:6379", "token", False),
        ("10.1.2.3:6379", "disabled", True),
        ("10.1.2.3:6379", "", False),
    ],
)
def test_others_are(address: str, mode: str, trusted: bool) -> None:
    spec = PlacementSpec(ray_address=address, trusted_network=trusted)
    ray_session.require_token(spec, {"RAY_AUTH_MODE": mode})


def test_an_address_without_a_port_is_told() -> None:
    """It was once called a network address: "'127.0.0.1' is not on loopback"."""
    with pytest.raises(ray_session.NoCluster, match=r"'127\.0\.0\.1' has no port; write HOST:PORT"):
        ray_session.require_token(PlacementSpec(ray_address="127.0.0.1"), {"RAY_AUTH_MODE": "disabled"})
    ray_session.require_token(PlacementSpec(ray_address="auto"), {"RAY_AUTH_MODE": "token"})


async def test_a_private_start_that_is_called_off_is_waited_for_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    up = threading.Event()

    def start(_: PlacementSpec, __: Path, ___: Path | None = None) -> Cluster:
        up.wait(60)
        ended.append("started")
        raise PermissionError("nothing hears this")

    monkeypatch.setattr(Cluster, "_start", start)
    monkeypatch.setattr(ray_session, "end", lambda: ended.append("ended"))
    (tmp_path / "ray" / "session").mkdir(parents=True)
    starting = asyncio.create_task(Cluster.start(PlacementSpec(), tmp_path))
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.sleep(0.05)
    assert not starting.done()
    up.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ended == ["started", "ended"]
    assert not (tmp_path / "ray").exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_token_is_for_the_user_alone(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        file = ray_session.private_token(tmp_path)
    finally:
        os.umask(before)
    token = file.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.chmod(0o644)  # as left by Ray itself
    ray_session.private_token(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == token
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]


def test_a_token_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file where the folder should be")
    with pytest.raises(NoCluster, match=r"Ray's token '.*/\.ray/auth_token' could not be .* or set RAY_AUTH_TOKEN"):
        ray_session.private_token(tmp_path)


NOTHING_STARTS_ONE = """
import ray
from ray import serve
from rlhfless.fleet import cluster, ray_session

ray.init = ray_session._refused
for call in (lambda: serve.delete("late"), serve.status, lambda: ray.get_actor("late"), lambda: ray.put(1)):
    try:
        call()
    except ray_session.NoRay as error:
        assert "nothing may start another" in str(error), error
    else:
        raise SystemExit("a call of Ray's own was not refused")
assert not ray.is_initialized()
"""


def test_nothing_starts_a_second_ray() -> None:
    """Without the refusal, `serve.delete` and every call of Ray's own API start a Ray if there is none.

    Runs in a separate process, because this one may have joined the Ray that other tests share.
    """
    ended = subprocess.run([sys.executable, "-c", NOTHING_STARTS_ONE], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_calls_under_way_say_nothing_when_ray_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of a stopped run used to end with a stack trace of Serve's callback for a generation call in progress."""

    def end() -> None:
        try:
            raise RuntimeError("Ray has not been started yet")
        except RuntimeError:
            logging.getLogger("ray.serve").exception("failed to consume generator ref after _on_ready")

    serve_log = logging.getLogger("ray.serve")
    before = serve_log.level
    monkeypatch.setattr(ray_session.ray, "shutdown", end)
    try:
        ray_session.end()
    finally:
        serve_log.setLevel(before)
    assert not caplog.records
