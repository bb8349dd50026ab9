"""The check of the network between nodes: its broadcast is real, the nodes are threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhfless.cli.main import app
from rlhfless.fleet import each_node
from rlhfless.fleet.cluster import Cluster
from rlhfless.functions.loopback import free_port
from rlhfless.selftest import between_nodes as module
from rlhfless.selftest.between_nodes import between_nodes, is_there, join, port_on, take_part
from rlhfless.selftest.report import node_report, node_without_report
from rlhfless.spec import PlacementSpec

Answers = tuple[Mapping[str, Any], Mapping[str, str]]


def nodes(*addresses: str, part: Callable[..., Any] = take_part) -> Callable[..., Answers]:
    """A cluster of threads, all of which are at 127.0.0.1."""

    def on_nodes(work: Callable[..., Any], *arguments: Any) -> Answers:
        if work is port_on:
            return {address: free_port("127.0.0.1") if address == arguments[0] else None for address in addresses}, {}
        if work is not join:
            return {address: work(*arguments) for address in addresses}, {}
        meeting = f"tcp://127.0.0.1:{arguments[0].rpartition(':')[2]}"
        with ThreadPoolExecutor() as threads:
            parts = [threads.submit(part, meeting, "127.0.0.1", rank, len(addresses)) for rank in range(len(addresses))]
            return {address: each.result() for address, each in zip(addresses, parts, strict=True)}, {}

    return on_nodes


def test_a_broadcast_says_its_interfaces_and_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    outcome = between_nodes(nodes("10.0.0.1", "10.0.0.2"))
    assert outcome.state == "ok", outcome
    for about in outcome.measured.values():
        assert (about["gloo"], about["nccl"]) == ("lo", "=lo")
        assert about["gloo_gb_per_s"] > 0
        assert about["nccl_not_run"] == "2 of 2 nodes have no GPU"


def test_one_node_has_nothing_to_check() -> None:
    outcome = between_nodes(nodes("10.0.0.1"))
    assert (outcome.state, outcome.why) == ("not applicable", "the cluster has one node")
    alone = between_nodes(None)
    assert (alone.state, alone.why) == ("not applicable", "one machine was tested; --ray-address names a cluster")


def test_a_node_that_cannot_take_part_is_named_with_its_fault() -> None:
    def part(_meeting: str, _address: str, rank: int, _ranks: int) -> dict[str, Any]:
        return {"fault": "connection refused"} if rank else {"gloo": "eth0"}

    outcome = between_nodes(nodes("10.0.0.1", "10.0.0.2", part=part))
    assert (outcome.state, outcome.why) == ("failed", "node 10.0.0.2: connection refused")
    assert "GLOO_SOCKET_IFNAME" in outcome.remedy
    assert outcome.measured["10.0.0.1"] == {"gloo": "eth0"}


@pytest.mark.parametrize("lost_at", [is_there, port_on, join])
def test_a_node_that_does_not_answer_fails_the_check(lost_at: Callable[..., Any]) -> None:
    """Such a node was left out before: the others passed, and the self-test with them."""

    def on_nodes(work: Callable[..., Any], *arguments: Any) -> Answers:
        if work is lost_at:
            return {"10.0.0.1": {}}, {"10.0.0.2": "NodeDiedError: it is gone"}
        return nodes("10.0.0.1", "10.0.0.2")(work, *arguments)

    outcome = between_nodes(on_nodes)
    assert (outcome.state, outcome.why) == ("failed", "node 10.0.0.2: NodeDiedError: it is gone")


def test_a_node_takes_part_at_the_address_that_ray_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.2")
    monkeypatch.setattr(module, "interface_environment", lambda address: {"a": "b"} if address == "10.0.0.2" else {})
    monkeypatch.setattr(module, "take_part", lambda *arguments: {"part": arguments})
    assert join("tcp://10.0.0.1:1", ("10.0.0.1", "10.0.0.2")) == {"part": ("tcp://10.0.0.1:1", "10.0.0.2", 1, 2)}
    assert "its address is 10.0.0.2" in join("tcp://10.0.0.1:1", ("10.0.0.1", "10.0.0.3"))["fault"]
    assert port_on("10.0.0.1") is None
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    assert "none of its interfaces" in join("tcp://10.0.0.1:1", ("10.0.0.1", "10.0.0.2"))["fault"]


def test_a_node_without_a_report_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node tests itself, the other has an error that the user can correct."""
    joined: list[PlacementSpec] = []

    async def start(spec: PlacementSpec, _: Path) -> SimpleNamespace:
        joined.append(spec)
        return SimpleNamespace(stop=lambda: asyncio.sleep(0))

    def ask(work: Callable[..., Any], *_: Any, **__: Any) -> Answers:
        if work is not node_report:
            return {}, {}
        return {"10.0.0.1": node_without_report("no shared memory")}, {"10.0.0.2": "no C compiler"}

    monkeypatch.setattr(Cluster, "start", start)
    monkeypatch.setattr(each_node, "ask_each_node", ask)
    result = CliRunner().invoke(app, ["selftest", "--ray-address", "10.0.0.1:6379"])
    assert joined[0].ray_address == "10.0.0.1:6379"
    assert result.exit_code == 1, result.output
    words = " ".join(result.output.split())
    assert "between nodes not applicable 0.0 s the cluster has one node" in words
    assert "node 10.0.0.2 self-test failed 0.0 s no C compiler" in words
