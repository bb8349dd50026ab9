"""Make replicas listen on loopback only, if all processes that they talk to are on their own node.

Three libraries listen on every interface and offer no option against it. This module patches the binding functions
of torch's rendezvous store and of Serve's server for calls between deployments to use a loopback socket; gloo and
NCCL read the name of an interface from the environment.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"

INTERFACE = "lo"
"""Name of the loopback interface on Linux."""

_BACKLOG = 2048
"""Connections that may wait to be accepted, as for torch's own socket."""


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine's loopback interface, by name or number."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def free_port(host: str) -> int:
    """Return a currently unused port at one of this node's addresses."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def loopback_environment() -> dict[str, str]:
    """Return the environment for a group of processes on one node: the interface for gloo and NCCL sockets."""
    return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}


def interface_environment(address: str) -> dict[str, str]:
    """Return the environment with which gloo and NCCL use the interface that has `address`; empty if none has it.

    By default gloo binds to the address that the host's name resolves to: 127.0.1.1 on Debian and Ubuntu, or a pod's
    own address under `hostNetwork`, and other nodes cannot connect. NCCL takes the first interface it likes.
    """
    on_loopback = is_loopback(address)  # every address of 127.0.0.0/8 is on the loopback interface
    for name, addresses in psutil.net_if_addrs().items():
        found = [each.address.partition("%")[0] for each in addresses]
        if address in found or (on_loopback and any(map(is_loopback, found))):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # "=": no prefix of other names
    return {}


def bind_rendezvous_to_loopback() -> None:
    """Make later process groups at `tcp://127.0.0.1:port` listen on loopback only; other hosts are unaffected."""
    from torch.distributed import TCPStore

    rendezvous: Any = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name
    create: Any = rendezvous._create_c10d_store
    if getattr(create, "on_loopback", False):
        return

    def on_loopback(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        if rank != 0 or not is_loopback(hostname):
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        try:
            listener = socket.create_server((hostname, port), backlog=_BACKLOG)
        except OSError:  # a second group of this process at the same port shares the existing store
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        return TCPStore(
            hostname,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            use_libuv=use_libuv,
            master_listen_fd=listener.detach(),
        )

    on_loopback.on_loopback = True  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = on_loopback


def bind_replica_to_loopback() -> None:
    """Make a Serve replica's server for other deployments listen on loopback if its node's address is loopback.

    We never call this server. Call this function in the constructor; Serve binds the server afterwards.
    """
    replica: Any = sys.modules.get("ray.serve._private.replica")
    if replica is None:
        return
    import ray

    bind = replica.add_port_to_grpc_server
    if getattr(bind, "on_loopback", False) or not is_loopback(ray.util.get_node_ip_address()):
        return

    def on_loopback(server: Any, address: str) -> int:
        return int(bind(server, address.replace("[::]:", f"{LOOPBACK}:")))

    on_loopback.on_loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = on_loopback


def set_default_environment(environment: dict[str, str]) -> None:
    """Set variables of this process that the user has not set."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
