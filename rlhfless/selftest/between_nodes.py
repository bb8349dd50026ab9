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

from rlhfless.fleet.each_node import node_address
from rlhfless.functions.loopback import free_port, interface_environment, set_default_environment
from rlhfless.selftest.check import CheckOutcome, Measured, NotHere, Wrong, outcome_of

OnNodes = Callable[..., tuple[Mapping[str, Any], Mapping[str, str]]]
"""Runs a function with arguments on every node at once; returns results and faults by address."""

MEET_S = 60.0
"""Longest wait for the other nodes, and for a broadcast."""

BUFFER_BYTES, ROUNDS = 2**26, 5

REMEDY = (
    "open the ports between the nodes; where the interface is wrong set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on "
    "all of them; NCCL_DEBUG=INFO says what NCCL tries"
)


def between_nodes(on_nodes: OnNodes | None) -> CheckOutcome:
    """Check the network between a cluster's nodes; None for a machine that is tested alone."""
    measures = "A broadcast from the first node to all, by gloo and on GPUs by NCCL, and the interfaces that they take."
    return outcome_of("between nodes", REMEDY, measures, lambda: _broadcast(on_nodes))


def _broadcast(on_nodes: OnNodes | None) -> Measured:
    if on_nodes is None:
        raise NotHere("one machine was tested; --ray-address names a cluster")
    there, faults = on_nodes(is_there)
    _raise_faults(faults, {})
    addresses = tuple(sorted(there))
    if len(addresses) < 2:
        raise NotHere("the cluster has one node")
    ports, faults = on_nodes(port_on, addresses[0])
    _raise_faults(faults, {})
    if (port := ports.get(addresses[0])) is None:
        raise Wrong(f"node {addresses[0]} found no free port at its own address", ports=dict(ports))
    answers, faults = on_nodes(join, f"tcp://{addresses[0]}:{port}", addresses)
    own = {address: about["fault"] for address, about in answers.items() if "fault" in about}
    _raise_faults({**faults, **own}, answers)
    return answers


def _raise_faults(faults: Mapping[str, str], measured: Mapping[str, Any]) -> None:
    if faults:
        raise Wrong("; ".join(f"node {address}: {fault}" for address, fault in sorted(faults.items())), **measured)


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
    dist.init_process_group("gloo", meeting, timedelta(seconds=MEET_S), world_size=ranks, rank=rank)
    found: dict[str, Any] = {name: os.environ.get(f"{name.upper()}_SOCKET_IFNAME") for name in ("gloo", "nccl")}
    without = torch.tensor(not torch.cuda.is_available(), dtype=torch.int32)
    dist.all_reduce(without)  # all nodes must take part in NCCL's broadcast, or none
    groups = {"cpu": dist.group.WORLD}
    if without.item():
        found["nccl_not_run"] = f"{without.item()} of {ranks} nodes have no GPU"
    else:
        groups["cuda"] = dist.new_group(timeout=timedelta(seconds=MEET_S), backend="nccl")
    for device, group in groups.items():
        expected = torch.arange(BUFFER_BYTES // 4, dtype=torch.int32, device=device)
        buffer, times = expected.clone() if rank == 0 else torch.zeros_like(expected), []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            dist.broadcast(buffer, 0, group=group)
            buffer[0].item()  # waits for the device
            times.append(time.perf_counter() - began_s)
        if not torch.equal(buffer, expected):
            raise ValueError(f"the broadcast on {device} has other values than were sent")
        name = "gloo" if device == "cpu" else "nccl"
        found[f"{name}_gb_per_s"] = BUFFER_BYTES / sorted(times)[ROUNDS // 2] / 1e9
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return found
