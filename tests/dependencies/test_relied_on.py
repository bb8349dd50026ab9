"""Behaviour of dependencies that they do not promise, as far as we rely on it."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import ray
import torch
from contracts import package_folder
from ray._private import worker
from ray.exceptions import RayTaskError
from ray.serve.config import RequestRouterConfig

from rlhfless.fleet.cluster import _make_router_configs_one_at_a_time, innermost
from rlhfless.fleet.ray_session import _known_by_loopback, errors_to_log
from rlhfless.functions.devices import engine_fault
from rlhfless.functions.generation.engine_log import _ERROR, _PREFIX
from rlhfless.functions.ranks import _of_network
from rlhfless.functions.training.optimizer import MOMENTS
from rlhfless.util.errors import UserError

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
loopback.set_default_environment(loopback.loopback_environment())
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


def texts_in(file: Path, node_kind: type[ast.AST]) -> Iterator[str]:
    """The texts inside of nodes of a file, with `0` for what is filled in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, node_kind):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.JoinedStr):
                yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "0" for piece in part.values)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("v1/core/kv_cache_utils.py", "No available memory for the cache blocks"),
        ("v1/core/kv_cache_utils.py", "GiB KV cache is needed"),
        ("v1/worker/utils.py", "Free memory on device"),
    ],
)
def test_vllm_says_that_memory_lacks_in_words_that_we_know(module: str, says: str) -> None:
    """functions/devices.py tells a lack of memory by them."""
    said = [text for text in texts_in(package_folder("vllm") / module, ast.Raise) if says in text]
    assert said, f"vllm/{module} raises nothing with {says!r}, by which functions/devices.py knows a lack of memory"
    assert all(engine_fault(f"ValueError: {text}", {}) for text in said)


def test_vllm_begins_a_logged_error_with_what_we_leave_out() -> None:
    """functions/generation/engine_log.py finds the errors in the lines of all processes."""
    logger = package_folder("vllm") / "logger.py"
    line_format, date_format = _formats(logger)
    record = logging.LogRecord("vllm", logging.ERROR, "core.py", 1510, "RuntimeError: it failed", None, None)
    record.vllm_process_name, record.fileinfo = "EngineCore", "core.py"
    line = logging.Formatter(line_format, date_format).format(record)
    assert line.startswith("(EngineCore pid=")
    assert _ERROR.match(_PREFIX.sub("", line)), f"engine_log._PREFIX does not know {line!r}"


def _formats(logger: Path) -> tuple[str, str]:
    """vLLM's formats of lines and of dates, without the prefix that a user may set."""
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(logger.read_text()).body
        if isinstance(node, ast.Assign)
    }
    line = assigned["_FORMAT"]
    assert isinstance(line, ast.JoinedStr)
    return "".join(piece.value for piece in line.values if isinstance(piece, ast.Constant)), ast.literal_eval(
        assigned["_DATE_FORMAT"]
    )


def test_ray_ends_the_text_of_a_failed_task_with_its_error() -> None:
    """rlhfless/fleet/cluster.py reads the cause of a failed start from it."""
    trace = "Traceback (most recent call last):\n  File 'a.py', line 1\nrlhfless.util.errors.UserError: no such model"
    cause = innermost([str(RayTaskError("__init__", trace, UserError("no such model")))])
    assert (cause.name, cause.message) == ("rlhfless.util.errors.UserError", "no such model")


def test_ray_can_be_told_to_know_its_node_by_loopback() -> None:
    """rlhfless/fleet/ray_session.py keeps a private Ray off the network so."""
    with _known_by_loopback():
        assert ray.util.get_node_ip_address() == "127.0.0.1"


def test_torch_names_the_state_of_adamw_as_checkpoints_do() -> None:
    """functions/training/optimizer.py makes the state itself, so that a lack of memory shows at once."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    assert set(optimizer.state[parameter]) == {"step", *MOMENTS}


def test_an_error_of_torchs_network_is_told_from_others() -> None:
    """functions/ranks.py blames the rank that failed, and not the ones that waited for it."""
    with pytest.raises(RuntimeError) as raised:
        torch.distributed.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=timedelta(seconds=1))
    assert _of_network(raised.value)
    assert not _of_network(ValueError("connection"))


def test_a_process_group_listens_on_loopback_alone() -> None:
    command = [sys.executable, "-c", GROUP]
    own = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}  # of other tests
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=own)
    assert result.returncode == 0, result.stderr
    found = result.stdout.split()
    assert len(found) >= 2, "the group listens nowhere, so there is nothing to see"
    assert {ip.removeprefix("::ffff:") for ip in found} == {"127.0.0.1"}


def test_handles_make_their_configurations_while_replicas_are_deployed() -> None:
    """Each handle has a thread of its own for it. Without the lock a few of these fail."""
    _make_router_configs_one_at_a_time()
    _make_router_configs_one_at_a_time()  # a second cluster in the same process
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda _: RequestRouterConfig(), range(64)))
    finally:
        sys.setswitchinterval(switch_s)
    assert len({config.get_serialized_request_router_cls() for config in made}) == 1


def test_a_worker_that_dies_is_not_printed_over_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # put back at the end
    errors_to_log()
    with caplog.at_level(logging.INFO, "rlhfless"):
        # As `listen_error_messages` does.
        worker.print_to_stdstream({"lines": ["A worker died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["raylet: A worker died"]
