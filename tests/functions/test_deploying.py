"""How Ray and Serve are kept in order: deployments one at a time, and what Ray has to say goes to the log."""

import asyncio
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ray import cloudpickle, serve
from ray._private import worker
from ray.serve._private import request_router
from ray.serve.config import RequestRouterConfig

from rlhfless.fleet.cluster import Cluster, _make_router_configs_one_at_a_time
from rlhfless.fleet.ray_session import errors_to_log


class Function:
    """A function that would be deployed."""


async def test_many_replicas_are_deployed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = []

    def run_many(targets: list[Any], **_: Any) -> None:
        # As Serve does when it describes a deployment; a second caller in between finds its module unregistered.
        cloudpickle.register_pickle_by_value(request_router)
        time.sleep(0.005)
        cloudpickle.unregister_pickle_by_value(request_router)
        deployed.extend(target.name for target in targets)

    monkeypatch.setattr(serve, "run_many", run_many)
    monkeypatch.setattr(serve, "get_app_handle", lambda name: name)
    cluster = Cluster()
    names = [f"generation-{i}" for i in range(24)]
    handles: list[Any] = await asyncio.gather(
        *(cluster.deploy(name, Function, (), "a-node", stop_s=1) for name in names)
    )
    assert handles == names
    assert sorted(deployed) == sorted(names)


def test_handles_make_their_configurations_while_replicas_are_deployed() -> None:
    """Each handle has a thread of its own for it. Without the lock a few of these fail."""
    _make_router_configs_one_at_a_time()
    _make_router_configs_one_at_a_time()  # a second cluster in the same process
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda _: RequestRouterConfig(), range(64)))
    finally:
        sys.setswitchinterval(switch_s)
    assert len({config.get_serialized_request_router_cls() for config in made}) == 1


def test_a_worker_that_dies_is_not_printed_over_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # put back at the end
    errors_to_log()
    with caplog.at_level(logging.INFO, "rlhfless"):
        # As `listen_error_messages` does.
        worker.print_to_stdstream({"lines": ["A worker died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["raylet: A worker died"]
