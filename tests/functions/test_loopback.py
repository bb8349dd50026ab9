"""What replicas listen on is on loopback, where all that they talk to is on their node."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhfless.functions.loopback import is_loopback

# In a process of its own: a process group belongs to a process, and the store is made by torch.
GROUP = """
import socket, sys
from datetime import timedelta
import psutil
import torch
import torch.distributed as dist
from rlhfless.functions import loopback
loopback.bind_rendezvous_to_loopback()
loopback.bind_rendezvous_to_loopback()  # a second engine in the same process
loopback.prefer(loopback.loopback_environment())
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
for group in range(2):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(1))
    for socket_ in psutil.Process().net_connections("inet"):
        if socket_.status == psutil.CONN_LISTEN:
            print(socket_.laddr.ip)
    dist.destroy_process_group()
"""


def test_a_process_group_listens_on_loopback_alone() -> None:
    command = [sys.executable, "-c", GROUP]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = result.stdout.split()
    assert len(found) >= 2, "the group listens nowhere, so there is nothing to see"
    assert {ip.removeprefix("::ffff:") for ip in found} == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "head", ""])
def test_others_can_reach_it(host: str) -> None:
    assert not is_loopback(host)
