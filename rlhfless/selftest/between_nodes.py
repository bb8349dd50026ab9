"""A check of the network between a cluster's nodes: the interfaces of gloo and NCCL, and a broadcast."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from rlhfless.functions.loopback import free_port, interface_environment, set_default_environment
from rlhfless.functions.on_node import node_address
from rlhfless.selftest.check import CheckOutcome, Measured, NotHere, Wrong, outcome_of

OnNodes = Callable[..., Mapping[str, Any]]
"""Runs a function with arguments on every node at once; returns the results by address."""

MEET_S = 60.0
"""Longest wait for the other nodes, and for a broadcast."""

BUFFER_BYTES, ROUNDS = 2**26, 5

REMEDY = (
    "open the ports between the nodes; where the interface is wrong set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on "
    "all of them; NCCL_DEBUG=INFO says what NCCL tries"
)


def between_nodes(on_nodes: OnNodes) -> CheckOutcome:
    measures = "A broadcast from the first node to all, by gloo and on GPUs by NCCL, and the interfaces that they take."
    return outcome_of("between nodes", REMEDY, measures, lambda: _broadcast(on_nodes))


def _broadcast(on_nodes: OnNodes) -> Measured:
    addresses = tuple(sorted(on_nodes(is_there)))
    if len(addresses) < 2:
        raise NotHere("the cluster has one node")
    ports = on_nodes(port_on, addresses[0])
    if (port := ports.get(addresses[0])) is None:
        raise Wrong(f"node {addresses[0]} found no free port at its own address", ports=dict(ports))
    answers = on_nodes(join, f"tcp://{addresses[0]}:{port}", addresses)
    measured = {address: dict(answers.get(address) or {"fault": "no answer"}) for address in addresses}
    if faults := [f"{address}: {about['fault']}" for address, about in measured.items() if "fault" in about]:
        raise Wrong("; ".join(faults), **measured)
    return measured


def is_there() -> bool:
    """Return True, as a sign that the node answers."""
    return True


def port_on(address: str) -> int | None:
    """Return a free port at `address` on the node with that address; None on other nodes."""
    return free_port(address) if node_address() == address else None


def join(meeting: str, addresses: tuple[str, ...]) -> dict[str, Any]:
    """Join a broadcast among `addresses` from this node. Returns the result of `take_part`, or `fault`."""
    own = node_address()
    if own not in addresses:
        return {"fault": f"Ray says that its address is {own}, and the nodes are {', '.join(addresses)}"}
    if not interface_environment(own):
        return {"fault": f"none of its interfaces has its address {own}"}
    return take_part(meeting, own, addresses.index(own), len(addresses))


def take_part(meeting: str, address: str, rank: int, ranks: int) -> dict[str, Any]:
    """Run one rank of the broadcast in a new process, because it sets the environment and may hang.

    Returns interfaces and GB/s by backend, or `fault` if it fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, meeting, address, rank, ranks), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(3 * MEET_S):  # the start of Python, the rendezvous, the broadcasts
            return {"fault": f"it did not end within {3 * MEET_S:.0f} s"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        return {"fault": "its process ended"}
    finally:
        process.kill()
        process.join()


def _work(end: Connection, meeting: str, address: str, rank: int, ranks: int) -> None:
    try:
        end.send(_measured(meeting, address, rank, ranks))
    except Exception as error:
        end.send({"fault": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def _measured(meeting: str, address: str, rank: int, ranks: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    set_default_environment(interface_environment(address))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    backend = "cpu:gloo,cuda:nccl" if len(devices) == 2 else "gloo"
    dist.init_process_group(backend, meeting, timedelta(seconds=MEET_S), world_size=ranks, rank=rank)
    found: dict[str, Any] = {name: os.environ.get(f"{name.upper()}_SOCKET_IFNAME") for name in ("gloo", "nccl")}
    for device in devices:
        expected = torch.arange(BUFFER_BYTES // 4, dtype=torch.int32, device=device)
        buffer, times = expected.clone() if rank == 0 else torch.zeros_like(expected), []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            dist.broadcast(buffer, 0)
            buffer[0].item()  # waits for the device
            times.append(time.perf_counter() - began_s)
        if not torch.equal(buffer, expected):
            raise ValueError(f"the broadcast on {device} has other values than were sent")
        name = "gloo" if device == "cpu" else "nccl"
        found[f"{name}_gb_per_s"] = BUFFER_BYTES / sorted(times)[ROUNDS // 2] / 1e9
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return found
