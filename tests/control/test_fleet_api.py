"""Devices over time, and the pods that runs wait for."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import httpx

from fakes.fake_service import NoDrivers, begun_run
from rlhfless.control.objects import DeviceWork
from rlhfless.control.pods import PodWatch, leaving_of, pending_of, status_clause
from rlhfless.control.service import HISTORY_S, DeviceHistory, Service
from rlhfless.telemetry.sinks import FOR_DEVICES


def worked(work: str, start_s: float, end_s: float, *devices: str) -> DeviceWork:
    return DeviceWork(function="learner", work=work, step=1, devices=list(devices), start_s=start_s, end_s=end_s)


def test_work_of_all_runs_by_device_of_the_cluster() -> None:
    history = DeviceHistory()
    history.add("a", [worked("learn", 10, 12, "node 0", "node 1")], 12)
    history.add("b", [worked("learn", 12, 14, "node 0")], 14)
    rows = {row.device: [(bar.run_id, bar.start_s) for bar in row.bars] for row in history.since(0).rows}
    assert rows == {"node 0": [("a", 10), ("b", 12)], "node 1": [("a", 10)]}
    assert {row.device for row in history.since(13).rows} == {"node 0"}


def test_what_is_old_is_forgotten() -> None:
    history = DeviceHistory()
    history.add("a", [worked("learn", 10, 12, "node 0", "node 1")], 12)
    history.add("b", [worked("learn", HISTORY_S + 12, HISTORY_S + 13, "node 0")], HISTORY_S + 13)
    assert [(row.device, [bar.run_id for bar in row.bars]) for row in history.since(0).rows] == [("node 0", ["b"])]


BORN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NOW = BORN.timestamp() + 90


def pod(name: str, phase: str = "Pending", *, age_s: float = 41, group: str = "h100", **more: Any) -> Any:
    status = {
        "phase": phase,
        "conditions": None,
        "init_container_statuses": None,
        "container_statuses": None,
        "pod_ip": None,
    } | more
    born = datetime.datetime.fromtimestamp(NOW - age_s, datetime.UTC)
    labels = {"ray.io/group": group}
    metadata = SimpleNamespace(name=name, labels=labels, creation_timestamp=born, deletion_timestamp=None)
    spec = SimpleNamespace(node_name=None)
    return SimpleNamespace(metadata=metadata, spec=spec, status=SimpleNamespace(**status))


def unscheduled(message: str) -> list[Any]:
    return [SimpleNamespace(type="PodScheduled", status="False", message=message, reason="Unschedulable")]


def waits(reason: str, message: str | None = None) -> list[Any]:
    return [SimpleNamespace(state=SimpleNamespace(waiting=SimpleNamespace(reason=reason, message=message)))]


def test_the_pod_that_waits_longest_is_told_with_its_reason() -> None:
    pods = [
        pod("ray-h100-b", age_s=20, conditions=unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")),
        pod("ray-head", "Running", container_statuses=[SimpleNamespace(state=SimpleNamespace(waiting=None))]),
        pod("ray-h100-a", age_s=41, conditions=unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")),
        pod("ray-cpu-a", age_s=5, group="cpu"),
    ]
    assert status_clause(pending_of(pods), NOW) == (
        "pod ray-h100-a is pending for 41 s: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu., "
        "and 1 more of group cpu, and 1 more of group h100"
    )


def test_what_keeps_a_scheduled_pod_from_running() -> None:
    image = pod("a", container_statuses=waits("ImagePullBackOff", 'Back-off pulling image "nowhere/x:1"'))
    crashes = pod("b", "Running", container_statuses=waits("CrashLoopBackOff"))
    starts = pod("c", init_container_statuses=waits("PodInitializing"))
    assert [found.why for found in pending_of([image, crashes, starts])] == [
        'ImagePullBackOff: Back-off pulling image "nowhere/x:1"',
        "CrashLoopBackOff",
        "its containers start",
    ]


def test_a_pod_that_ends_is_not_waited_for() -> None:
    ending = pod("a")
    ending.metadata.deletion_timestamp = BORN
    assert pending_of([ending, pod("b", "Succeeded")]) == []
    assert status_clause([], NOW) == ""


async def test_an_api_server_that_is_away_is_no_reason() -> None:
    answers: list[Any] = [[pod("a"), ending("b", "10.0.0.2")], OSError("connection refused")]

    def listed() -> tuple[list[Any], list[Any]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer), []

    watch = PodWatch(listed)
    await watch.tick()
    assert "pod a is pending" in watch.status_clause
    assert list(watch.leaving) == ["10.0.0.2"]
    await watch.tick()
    assert watch.status_clause == ""
    assert watch.leaving == {}


def ending(name: str, address: str | None, *, node_type: str = "worker") -> Any:
    found = running(name, address, "n")
    found.metadata.deletion_timestamp = BORN
    found.metadata.labels["ray.io/node-type"] = node_type
    return found


def running(name: str, address: str | None, node: str) -> Any:
    found = pod(name, "Running", pod_ip=address)
    found.spec = SimpleNamespace(node_name=node)
    return found


def machine(name: str, *taints: str, cordoned: bool = False) -> Any:
    spec = SimpleNamespace(unschedulable=cordoned or None, taints=[SimpleNamespace(key=key) for key in taints] or None)
    return SimpleNamespace(metadata=SimpleNamespace(name=name), spec=spec)


def test_worker_pods_that_end_leave_and_the_head_does_not() -> None:
    pods = [ending("a", "10.0.0.1"), ending("head", "10.0.0.9", node_type="head"), ending("never-ran", None)]
    assert leaving_of([*pods, running("stays", "10.0.0.3", "n")]) == {"10.0.0.1": BORN.timestamp()}


def test_pods_on_machines_that_are_about_to_go_leave() -> None:
    pods = [running(name, f"10.0.0.{number}", name) for number, name in enumerate(("cordoned", "spot", "gpu", "plain"))]
    machines = [
        machine("cordoned", cordoned=True),
        machine("spot", "aws-node-termination-handler/spot-itn"),
        machine("gpu", "nvidia.com/gpu"),  # only keeps other pods away
        machine("plain"),
    ]
    assert leaving_of(pods, machines) == {"10.0.0.0": 0.0, "10.0.0.1": 0.0}


async def test_a_run_that_waits_for_devices_in_mid_run_is_told_of_pods_too(
    service: tuple[httpx.Client, Service], drivers: NoDrivers
) -> None:
    client, served = service
    served.pods = PodWatch(lambda: ([pod("a", conditions=unscheduled("0/2 nodes are available"))], []))
    await served.pods.tick()
    _, driver = begun_run(client, drivers)
    driver(("status", {"status": "running", "reason": "running"}), reason="step 3 of 9: generation")
    where = f"/v1/runs/{driver.order.run_id}"
    assert client.get(where).json()["status_reason"] == "step 3 of 9: generation"
    driver(reason=f"{FOR_DEVICES} (12 s of at most 600 s): 2 x h100 for learner-0; 0 free")
    assert "0 free; pod a is pending for" in client.get(where).json()["status_reason"]
    assert "0/2 nodes are available" in client.get(where).json()["status_reason"]
