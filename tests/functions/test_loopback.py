"""Which hosts are this machine alone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.loopback import interface_environment, is_loopback
from rlhfless.functions.ranks import RankActor


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "head", ""])
def test_others_can_reach_it(host: str) -> None:
    assert not is_loopback(host)


ADDRESSES = {
    "lo": [SimpleNamespace(address="127.0.0.1"), SimpleNamespace(address="::1")],
    "eth0": [SimpleNamespace(address="10.1.2.3"), SimpleNamespace(address="fe80::1%eth0")],
    "ib0": [SimpleNamespace(address="192.168.7.9")],
}


@pytest.mark.parametrize(
    ("address", "name"), [("10.1.2.3", "eth0"), ("192.168.7.9", "ib0"), ("127.0.0.3", "lo"), ("fe80::1", "eth0")]
)
def test_groups_across_nodes_use_the_interface_of_the_nodes_address(
    monkeypatch: pytest.MonkeyPatch, address: str, name: str
) -> None:
    """gloo by itself binds to what the host's name resolves to, which is 127.0.1.1 on Ubuntu."""
    monkeypatch.setattr("psutil.net_if_addrs", lambda: ADDRESSES)
    assert interface_environment(address) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def test_an_address_of_no_interface_chooses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: ADDRESSES)
    assert interface_environment("10.9.9.9") == {}


@pytest.mark.parametrize(
    ("on_one_node", "reaches_others", "interface"), [(True, False, "lo"), (True, True, "eth0"), (False, False, "eth0")]
)
def test_a_ranks_interface(
    monkeypatch: pytest.MonkeyPatch, on_one_node: bool, reaches_others: bool, interface: str
) -> None:
    """A learner on one node that broadcasts to engines elsewhere must not bind to loopback."""
    seen: list[str] = []

    class Rank(RankActor[Any]):
        reaches_other_nodes = reaches_others

        def node(self) -> str:
            return "10.1.2.3"

        def _load(self, address: str) -> None:
            seen.append(os.environ["GLOO_SOCKET_IFNAME"])

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # put back at the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: ADDRESSES)
    Rank(SimpleNamespace(rank_bindings=(DeviceBinding("cpu", ("0",), exclusive=False),)), 0).start("tcp", on_one_node)
    assert seen == [interface]
