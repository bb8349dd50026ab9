"""Devices of a real Ray with several nodes on one machine, with fake GPUs and fake functions."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

from fakes.fake_function import stand_in_run
from rlhfless.fleet import ray_session
from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.each_node import ask_each_node
from rlhfless.fleet.leave_node import INSTANCE
from rlhfless.fleet.leaving_watch import LeavingWatch, drain_nodes
from rlhfless.fleet.protocols import NoDevices
from rlhfless.fleet.replica import Replica
from rlhfless.fleet.run_devices import RunDevices
from rlhfless.functions.calls import StaleCall
from rlhfless.records import ReplicaState
from rlhfless.scaling.function_specs import Bounds
from rlhfless.selftest.between_nodes import MEET_S, between_nodes
from rlhfless.spec import PlacementSpec

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(180)]

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"
JOINED = "127.0.0.1:1"
"""Only declares that the cluster may grow; the test process has already joined it."""


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    """Start a head without GPUs, node A with 3 GPUs, and node B with 2 that its mask names 4 and 5."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setattr(ray_session.ray, "init", ray_session._init)  # joining replaces it
        nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            add(nodes, A, 3)
            environment.setenv("CUDA_VISIBLE_DEVICES", "4,5")
            add(nodes, B, 2)
            environment.delenv("CUDA_VISIBLE_DEVICES")
            Cluster._start(PlacementSpec(ray_address=nodes.address), Path("of no private Ray"), None)
            yield nodes
        finally:
            ray_session.end()
            nodes.shutdown()


def add(nodes: RayNodes, address: str, gpus: int) -> Any:
    labels = {"ray.io/accelerator-type": "H100"}
    return nodes.add_node(num_cpus=1, num_gpus=gpus, labels=labels, node_ip_address=address)


async def free_gpus() -> dict[str, int]:
    cluster = Cluster()
    cluster._kinds = ("h100",)
    return {node.address: node.free_gpus for node in await cluster.nodes(None) if node.gpus}


async def until_free(expected: dict[str, int]) -> None:
    end = time.monotonic() + 60
    while (found := await free_gpus()) != expected:
        assert time.monotonic() < end, f"free: {found}"
        await asyncio.sleep(0.2)


async def until_lost(devices: RunDevices, replica: Replica) -> None:
    end = time.monotonic() + 60
    while replica.state is not ReplicaState.DEAD:
        assert time.monotonic() < end, "the devices of a node that died are not missed"
        await devices.renew()
        await asyncio.sleep(0.5)


@pytest.mark.usefixtures("ray_nodes")
async def test_an_actor_is_on_one_node_and_runs_are_kept_apart() -> None:
    spec = PlacementSpec(mode="disaggregated", learner_devices=1)
    async with stand_in_run("one", spec, actors=2, per_actor=2) as one:
        places = await asyncio.gather(*(one.add(one.actors, slot) for slot in (0, 1)))
        # A chooses two of its three GPUs; on B they are named by the existing mask.
        assert [(address, len(gpus)) for address, gpus in places] == [(A, 2), (B, 2)]
        assert places[1][1] == ["4", "5"]
        assert (await one.add(one.scoring, 0))[1] == [], "a CPU function sees GPUs"
        # The learner's device is not taken yet; another run may use it.
        await until_free({A: 1, B: 0})
        async with stand_in_run("two", PlacementSpec(devices=1), actors=1, devices_s=7) as two:
            address, gpus = await two.add(two.actors, 0)
            assert (address, len(gpus)) == (A, 1)
            assert not set(gpus) & set(places[0][1]), "two runs on one GPU"
            async with stand_in_run("three", PlacementSpec(devices=1), actors=1, devices_s=7) as three:
                with pytest.raises(NoDevices, match=r"\(timeouts.devices_s\) for devices: 1 x h100 on one node: 127"):
                    await three.add(three.actors, 0)
        # A stopped actor returns its devices while the run continues.
        await one.actors.stop(one.actors.replicas()[0])
        await until_free({A: 3, B: 0})
    await until_free({A: 3, B: 2})


async def test_a_node_that_joins_is_used_and_one_that_dies_is_missed(
    ray_nodes: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    spec = PlacementSpec(mode="disaggregated", learner_devices=2, devices=6, ray_address=JOINED)
    async with stand_in_run("grows", spec, actors=1, per_actor=4) as run:
        began_s = time.monotonic()
        with caplog.at_level(logging.WARNING, "rlhfless"):
            starting = asyncio.create_task(run.add(run.actors, 0))
            while not run.shown:
                await asyncio.sleep(0.1)
        said_s, text = run.shown[0]
        assert said_s - began_s < 10
        assert "127.0.0.2 has 3 of 3 free, 127.0.0.3 has 2 of 2 free" in text
        assert "4 x h100 on one node: no node has that many" in text
        assert text in caplog.text
        assert not run.actors.replicas()[0].open_device_s, "devices that are waited for are billed"
        joined = add(ray_nodes, C, 4)
        joined_s = time.monotonic()
        assert await starting == (C, ["0", "1", "2", "3"])
        print(f"from node joined to its actor serving: {time.monotonic() - joined_s:.1f} s")
        (replica,) = run.actors.replicas()
        ray_nodes.remove_node(joined, allow_graceful=False)
        await until_lost(run.devices, replica)
    await until_free({A: 3, B: 2})


@pytest.mark.seldom
async def test_devices_whose_only_node_has_died_are_waited_for(ray_nodes: RayNodes) -> None:
    doomed = add(ray_nodes, C, 4)
    spec = PlacementSpec(mode="disaggregated", learner_devices=2, devices=6, ray_address=JOINED)
    async with stand_in_run("waits", spec, actors=1, per_actor=4) as run:
        assert (await run.add(run.actors, 0))[0] == C
        (lost,) = run.actors.replicas()
        ray_nodes.remove_node(doomed, allow_graceful=False)
        await until_lost(run.devices, lost)
        starting = asyncio.create_task(run.add(run.actors, 0))
        while not run.shown and not starting.done():
            await asyncio.sleep(0.1)
        joined = add(ray_nodes, C, 4)
        assert (await starting)[0] == C
        ray_nodes.remove_node(joined, allow_graceful=False)
    await until_free({A: 3, B: 2})


async def test_an_actor_starts_elsewhere_and_a_resumed_run_keeps_its_devices(ray_nodes: RayNodes) -> None:
    doomed = add(ray_nodes, C, 4)
    spec = PlacementSpec(devices=2, ray_address=JOINED)
    async with stand_in_run("moves", spec, actors=2) as run:
        assert (await run.add(run.actors, 0))[0] == C, "the node with the most free devices"
        (lost,) = run.actors.replicas()
        ray_nodes.remove_node(doomed, allow_graceful=False)
        await until_lost(run.devices, lost)
        place = await run.add(run.actors, 0)
        assert place[0] in (A, B)
        name = run.actors.replicas()[0].name
        async with stand_in_run("moves", spec, actors=2, attempt=2) as resumed:
            await resumed.devices.adopt()
            await resumed.actors.adopt([name], resumed.call, {})
            await resumed.devices.settle()
            (taken_over,) = resumed.actors.replicas()
            assert await resumed.where(taken_over) == place
            with pytest.raises(StaleCall, match="attempt 2 has replaced it"):
                await run.devices.renew()
            await run.devices.release(name)
            await asyncio.sleep(1)
            assert sum((await free_gpus()).values()) == 3, "a driver that was replaced gave the devices back"
    await until_free({A: 3, B: 2})


async def test_a_node_that_is_drained_is_left_and_its_ray_ends(ray_nodes: RayNodes) -> None:
    """The actor returns its devices and starts elsewhere, although the leaving node has more free devices."""
    leaving = add(ray_nodes, C, 4)
    spec = PlacementSpec(devices=2, ray_address=JOINED)
    async with stand_in_run("leaves", spec, actors=2) as run:
        run.actors._blueprint = replace(run.actors._blueprint, bounds=Bounds(1))
        assert (await run.add(run.actors, 0))[0] == C, "the node with the most free devices"
        watch = LeavingWatch([run.actors, run.scoring], run.call)
        await watch.look()
        assert run.actors.expected == 1
        before = run.actors.at(0)
        await asyncio.to_thread(drain_nodes, {C: time.time() + 60})
        assert C not in await free_gpus()
        await watch.look()
        end = time.monotonic() + 60
        while not run.actors.serving() or run.actors.at(0) is before:
            assert time.monotonic() < end, "the actor has not moved"
            await asyncio.sleep(0.2)
        assert (await run.where(run.actors.serving()[0]))[0] in (A, B)
        while any(node["Alive"] and node["NodeID"] == leaving.node_id for node in ray.nodes()):
            assert time.monotonic() < end, "the Ray of a node that holds nothing does not end"
            await asyncio.sleep(0.5)
    ray_nodes.remove_node(leaving, allow_graceful=False)
    await until_free({A: 3, B: 2})


@pytest.mark.parametrize("holds", [pytest.param(False, marks=pytest.mark.seldom), True], ids=["idle", "held"])
async def test_the_hook_of_a_pod_that_ends(ray_nodes: RayNodes, monkeypatch: pytest.MonkeyPatch, holds: bool) -> None:
    """The hook drains only its own node, waits no longer than necessary, and leaves no Ray behind."""
    monkeypatch.setenv(INSTANCE, "pod-1")
    ending = add(ray_nodes, C, 4)
    async with stand_in_run("hooked", PlacementSpec(devices=1, ray_address=JOINED), actors=1) as run:
        if holds:
            assert (await run.add(run.actors, 0))[0] == C
        began_s, limit_s = time.monotonic(), 5
        environment = os.environ | {"RAY_ADDRESS": ray_nodes.address}
        command = [sys.executable, "-m", "rlhfless.fleet.leave_node", str(limit_s)]
        hook = await asyncio.to_thread(subprocess.run, command, env=environment, timeout=90, capture_output=True)
        assert hook.returncode == 0, hook.stderr.decode()
        assert holds == (time.monotonic() - began_s > limit_s)
        end = time.monotonic() + 60
        while any(node["Alive"] and node["NodeID"] == ending.node_id for node in ray.nodes()):
            assert time.monotonic() < end, "its Ray is still there"
            await asyncio.sleep(0.5)
        if holds:
            await until_lost(run.devices, run.actors.replicas()[0])
    ray_nodes.remove_node(ending, allow_graceful=False)
    await until_free({A: 3, B: 2})


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_nodes")
def test_the_self_test_broadcasts_between_the_nodes() -> None:
    """Each node participates with its own address, in processes that its Ray starts."""
    outcome = between_nodes(partial(ask_each_node, timeout_s=4 * MEET_S, with_cores=True))
    assert outcome.state == "ok", outcome.why
    assert outcome.measured.keys() >= {A, B}
    for about in outcome.measured.values():
        assert about["gloo_gb_per_s"] > 0
