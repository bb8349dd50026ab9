"""How Ray and Serve are kept in order: deployments one at a time, and what Ray has to say goes to the log."""

import asyncio
import logging
import time
from typing import Any

import pytest
import ray
from ray import cloudpickle, serve
from ray._private import worker
from ray.serve._private import request_router

from rlhfless.fleet.cluster import Cluster, _errors_to_log


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

    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(serve, "run_many", run_many)
    monkeypatch.setattr(serve, "get_app_handle", lambda name: name)
    cluster = Cluster()
    names = [f"generation-{i}" for i in range(24)]
    handles: list[Any] = await asyncio.gather(*(cluster.deploy(name, Function, (), None, stop_s=1) for name in names))
    assert handles == names
    assert sorted(deployed) == sorted(names)


def test_a_worker_that_dies_is_not_printed_over_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # put back at the end
    _errors_to_log()
    with caplog.at_level(logging.INFO, "rlhfless"):
        # As `listen_error_messages` does.
        worker.print_to_stdstream({"lines": ["A worker died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["raylet: A worker died"]
