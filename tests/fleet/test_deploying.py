"""Deployments are described to Serve one at a time."""

import asyncio
import time
from typing import Any

import pytest
from ray import cloudpickle, serve
from ray.serve._private import request_router

from rlhfless.fleet.cluster import Cluster


class Function:
    """A function to deploy."""


async def test_many_replicas_are_deployed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = []

    def run_many(targets: list[Any], **_: Any) -> None:
        # As Serve does when it describes a deployment; a concurrent caller finds its module unregistered.
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
    assert [handle._handle for handle in handles] == names
    assert sorted(deployed) == sorted(names)
