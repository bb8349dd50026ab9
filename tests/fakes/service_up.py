"""A service in the background, for tests with real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlhfless import Client
from rlhfless.control.lifecycle import Status
from rlhfless.control.objects import RunObject

COMMAND = str(Path(sys.executable).with_name("rlhfless"))

AT_WORK_S = 0.05
"""Processor time from a look on, with which a process is at work: more than a process that waits takes in a step."""


@dataclass
class Up:
    """A service in the background."""

    data: Path
    roots: tuple[Path, ...]
    options: tuple[str, ...] = ()
    """Of `rlhfless up`."""

    def start(self) -> None:
        roots = [word for root in self.roots for word in ("--root", str(root))]
        command = [COMMAND, "up", "--detach", "--port", "0", "--data", str(self.data), *roots, *self.options]
        subprocess.run(command, check=True, timeout=300)

    @property
    def client(self) -> Client:
        return Client(data=str(self.data))

    def kill(self) -> None:
        pid = json.loads((self.data / "service.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)

    def kill_driver(self, run_id: str) -> None:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "rlhfless.control.driver" in words and words[-1].endswith(run_id):
                process.kill()

    def until(self, run_id: str, reached: Callable[[RunObject], bool], timeout_s: float = 480) -> RunObject:
        end = time.monotonic() + timeout_s
        with self.client as client:
            while True:
                run = client.get_run(run_id)
                if reached(run):
                    return run
                assert time.monotonic() < end, f"{run.status} at step {run.step}: {run.status_reason}"
                assert run.status is not Status.FAILED, run.status_reason
                time.sleep(0.2)


def posted(values: dict[str, Any]) -> dict[str, Any]:
    """A spec as a service takes it: where a run's files are is up to the service."""
    return {key: value for key, value in values.items() if key != "output"}


def front_of(run_id: str, function: str) -> psutil.Process:
    """The replica of a run's function."""
    return running(f"ServeReplica:{run_id}-{function}-")[0]


def engine_of(run_id: str) -> psutil.Process:
    """The engine, in a process of its own."""
    return engine_below(front_of(run_id, "generation"))


def engine_below(front: psutil.Process) -> psutil.Process:
    """The engine of a replica."""
    children = front.children()
    return next(child for child in children if "vllm.loop" in " ".join(child.cmdline()))


def rank_of(run_id: str) -> psutil.Process:
    """The rank of the learner: it listens where the learner's front calls it."""
    called = {each.raddr.port for each in front_of(run_id, "learner").net_connections() if each.raddr}
    return next(r for r in running("ray::LearnerActor") if called & {each.laddr.port for each in r.net_connections()})


def running(named: str) -> list[psutil.Process]:
    """The processes with this in their command."""
    return [p for p in psutil.process_iter(["cmdline"]) if named in " ".join(p.info["cmdline"] or [])]


def kill_at_work(process: psutil.Process) -> None:
    """Kill a process while it computes: so the kernel ends the largest one when memory is short."""
    end, before_s = time.monotonic() + 120, process.cpu_times().user
    while process.cpu_times().user - before_s < AT_WORK_S:
        assert time.monotonic() < end, f"{process} does not work"
        time.sleep(0.02)
    process.kill()
