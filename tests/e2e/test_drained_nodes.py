"""An elastic run on two nodes of one core each: it shrinks before a node leaves that says so, and grows when the node
is back, on a service whenever its driver is killed meanwhile, and from the command line.

Of type sft, which needs no engine. Its learner has two ranks, so its steps are shorter on two cores, also by its plan.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from ray._raylet import GcsClient

from e2e.test_service import COMMAND, Up
from fakes.commands import add_node, start, started, wait_for
from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.control.driver.service_client import undelivered
from rlhfless.control.lifecycle import Status
from rlhfless.fleet.leave_node import drain
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

OTHER = "127.0.0.2"
MANY = 100_000
"""Steps of a run that is cancelled: so many that a change pays, whatever it takes."""


@pytest.fixture
def cluster() -> Iterator[str]:
    """Ray on two nodes; its address. What a service asks its autoscaler for, the tests bring and take."""
    with started(cores=1) as address:
        add_node(address, OTHER)
        yield address


@pytest.fixture
def service(cluster: str, assets: Path, tmp_path: Path) -> Iterator[Up]:
    service = Up(tmp_path / "data", (assets,), ("--ray-address", cluster, "--capacity", "cpu-core=2"))
    service.start()
    yield service
    subprocess.run([COMMAND, "down", "--data", str(service.data)], check=True, timeout=200)


def run_values(assets: Path, name: str, devices: Any, steps: int) -> dict[str, Any]:
    problems = draw_problems(TaskRecipe(), np.random.default_rng(5), 512, held_out=False)
    rows = "".join(json.dumps({"prompt": each.prompt, "response": each.answer}) + "\n" for each in problems)
    (assets / "demonstrations.jsonl").write_text(rows)
    return {
        "type": "sft",
        "name": name,
        "model": {"path": str(assets / "model")},
        "demonstrations": {"path": str(assets / "demonstrations.jsonl")},
        "steps": steps,
        "prompts_per_step": 512,
        "optimizer": {"learning_rate": 1e-3},
        "learner": {"threads": 1, "ranks": 2},
        "checkpoint": {"every_steps": 2},
        "placement": {"devices": devices},
        "timeouts": {"drain_s": 3},
    }


def nodes_at(cluster: str, place: str) -> list[str]:
    """The Ray ids of the live nodes at an address."""
    nodes = GcsClient(address=cluster).get_all_node_info().items()
    return [node.hex() for node, info in nodes if info.node_manager_address == place and info.state == 0]


def until(done: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 240
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def granted(service: Up, run_id: str) -> int:
    url = json.loads((service.data / "service.json").read_text())["url"]
    kinds = httpx.get(f"{url}/v1/devices", timeout=20).json()["data"]
    return next((run["granted"] for kind in kinds for run in kind["runs"] if run["run_id"] == run_id), 0)


class Watched:
    """What the drivers of a run put into its outbox."""

    def __init__(self, service: Up, run_id: str) -> None:
        self._service, self._run_id = service, run_id
        self._folder = service.data / "runs" / run_id
        self._last = 0

    def until(self, kind: str, text: str = "") -> None:
        """Wait for an item after the last one that was waited for."""
        found: list[int] = []

        def there() -> bool:
            items = undelivered(self._folder, self._last)
            found.extend(item.seq for item in items if item.kind == kind and text in str(item.data))
            return bool(found)

        until(there, f"no {kind} {text!r}")
        self._last = found[0]

    def kill_after(self, kind: str, text: str = "") -> None:
        """Kill the driver after such an item; what it put in until then does not count later."""
        self.until(kind, text)
        self._service.kill_driver(self._run_id)
        self._last = max((item.seq for item in undelivered(self._folder, self._last)), default=self._last)

    def works(self) -> None:
        """Wait for three steps."""
        for _ in range(3):
            self.until("metrics")


def leave(cluster: str) -> None:
    (leaving,) = nodes_at(cluster, OTHER)
    drain(GcsClient(address=cluster), leaving, time.time() + 120, "its machine is about to go")


def losses(service: Up, run_id: str) -> dict[int, float]:
    """The loss of each step, which is told once."""
    with service.client as client:
        told = [event.data for event in client.watch(run_id) if event.type == "metrics"]
    assert [data["step"] for data in told] == list(range(1, len(told) + 1))
    return {data["step"]: data["metrics"]["loss"] for data in told}


def begun(service: Up, assets: Path, name: str) -> tuple[str, Watched]:
    """A run at work on both nodes."""
    with service.client as client:
        run = client.create_run(run_values(assets, name, {"min": 1, "max": 2}, MANY)).id
    service.until(run, lambda now: now.step >= 1)
    watched = Watched(service, run)
    watched.works()
    if granted(service, run) != 2:  # its plan was not ready when it asked, so it started on one
        watched.until("sized", "'devices': 2")
        watched.works()
    assert granted(service, run) == 2
    return run, watched


def ended(service: Up, run: str) -> list[tuple[int, int]]:
    """Cancel the run; return its changes of size."""
    with service.client as client:
        client.cancel_run(run)
        service.until(run, lambda now: now.status is Status.CANCELLED)
        events = [event.data for event in client.watch(run) if event.type == "size"]
    return [(data["before"], data["after"]) for data in events if "after" in data]


@pytest.mark.seldom
def test_a_run_shrinks_before_a_node_leaves_and_grows_when_it_is_back(service: Up, cluster: str, assets: Path) -> None:
    run, watched = begun(service, assets, "first")
    leave(cluster)
    watched.until("sized", "'devices': 1")
    watched.works()
    until(lambda: not nodes_at(cluster, OTHER), "the Ray of a node that holds nothing does not end")
    add_node(cluster, OTHER)
    watched.until("sized", "'devices': 2")
    watched.works()
    now = service.until(run, lambda _: True)
    assert now.attempt == 1, "all in one driver"
    assert ended(service, run)[-2:] == [(2, 1), (1, 2)]
    with service.client as client:
        alone = client.create_run(run_values(assets, "alone", 1, now.step)).id
    service.until(alone, lambda now: now.status is Status.SUCCEEDED)
    fixed, elastic = losses(service, alone), losses(service, run)
    assert {step: elastic[step] for step in fixed} == pytest.approx(fixed, abs=1e-6)


@pytest.mark.seldom
def test_a_driver_is_killed_in_every_phase_of_a_change(service: Up, cluster: str, assets: Path) -> None:
    """As it shrinks: before it has saved, while it starts, and before its first step; as it grows, when it has saved
    and stops."""
    run, watched = begun(service, assets, "killed")
    leave(cluster)
    until(lambda: granted(service, run) == 1, "the grant is not lowered")
    service.kill_driver(run)
    watched.kill_after("resolved")
    watched.kill_after("message", "resumed after step")
    watched.works()
    add_node(cluster, OTHER)
    until(lambda: granted(service, run) == 2, "the grant is not raised")
    watched.kill_after("checkpoints")
    watched.works()
    assert service.until(run, lambda _: True).attempt == 5
    assert ended(service, run)[-2:] == [(2, 1), (1, 2)]
    losses(service, run)


@pytest.mark.seldom
def test_a_run_from_the_command_line_follows_its_nodes(cluster: str, assets: Path, tmp_path: Path) -> None:
    """Two nodes, one, two, in one process; once stopped and resumed on one node, it works there."""
    values = run_values(assets, "own", {"min": 1, "max": 2}, MANY) | {"output": str(tmp_path / "runs")}
    values["placement"] |= {"ray_address": cluster}
    spec, log = tmp_path / "spec.yaml", tmp_path / "log"
    spec.write_text(yaml.safe_dump(values))
    process = start(spec, log)
    wait_for(f"3/{MANY}", log, process, timeout_s=240)
    leave(cluster)
    wait_for("works on 1 device(s) after", log, process, timeout_s=240)
    until(lambda: not nodes_at(cluster, OTHER), "the Ray of a node that holds nothing does not end")
    add_node(cluster, OTHER)
    wait_for("works on 2 device(s) after", log, process, timeout_s=240)
    leave(cluster)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, log.read_text()
    (folder,) = (tmp_path / "runs").iterdir()
    again = start(spec, log, "--resume", str(folder))
    wait_for("resumed after step", log, again, timeout_s=240)
    again.send_signal(signal.SIGINT)
    assert again.wait(timeout=60) == 130, log.read_text()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    sizes = [each.inputs["devices"] for each in read_trace(folder / "trace").decisions if each.kind == "size"]
    assert sizes == [2, 1, 2, 1]
