"""A release of the chart on the cluster of KUBECONFIG, and its API through a port that is forwarded."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import tarfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import yaml
from charts import CHART, helm, tool
from environment import kubectl

from rlhfless.records.traces import Trace, read_trace

READY_S = 300
"""Longest wait for the pods of an installation on two cores that do other work, too."""


class Release:
    """An installation of the chart."""

    def __init__(self, namespace: str, values: dict[str, Any], folder: Path, *files: str) -> None:
        self.namespace, self.name = namespace, "rlhfless"
        own = folder / "values.yaml"
        own.write_text(yaml.safe_dump(values))
        self._values = [word for file in (*(CHART / name for name in files), own) for word in ("-f", str(file))]
        self._forward: subprocess.Popen[str] | None = None
        self._port = 0

    # -- helm and kubectl

    def upgrade(self, *words: str) -> str:
        """`helm upgrade --install`, with what the pods of it need to become ready."""
        done = self.helm("upgrade", "--install", self.name, str(CHART), *self._values, *words)
        assert done.returncode == 0, done.stderr
        assert "would violate PodSecurity" not in done.stderr, done.stderr
        self.kubectl("rollout", "status", f"deployment/{self.name}", f"--timeout={READY_S}s", timeout_s=READY_S + 10)
        return done.stdout

    def drawn(self, *words: str) -> list[dict[str, Any]]:
        """The objects that an upgrade would make, as the server has it look up what is there."""
        done = self.helm("upgrade", self.name, str(CHART), *self._values, *words, "--dry-run=server", "-o", "json")
        assert done.returncode == 0, done.stderr
        return [found for found in yaml.safe_load_all(json.loads(done.stdout)["manifest"]) if found]

    def helm(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return helm(*words, "-n", self.namespace, timeout_s=timeout_s)

    def kubectl(self, *words: str, given: str | None = None, check: bool = True, timeout_s: float = 120) -> str:
        return kubectl("-n", self.namespace, *words, given=given, check=check, timeout_s=timeout_s)

    def objects(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        found = json.loads(self.kubectl("get", kinds, "-o", "json", *(["-l", selector] if selector else [])))
        items: list[dict[str, Any]] = found["items"]
        return items

    def pods(self, selector: str) -> list[str]:
        """Names of the pods that are not on their way out."""
        return [pod["metadata"]["name"] for pod in self.objects("pods", selector)
                if "deletionTimestamp" not in pod["metadata"]]  # fmt: skip

    def kill(self, selector: str) -> None:
        """As a machine that fails does it: without a grace period."""
        self.kubectl("delete", "pod", "-l", selector, "--force", "--grace-period=0", timeout_s=120)

    # -- the API

    @property
    def key(self) -> str:
        """The API key, as NOTES.txt has it shown."""
        return base64.b64decode(
            self.kubectl("get", "secret", f"{self.name}-api-key", "-o", "jsonpath={.data.api-key}")
        ).decode()

    @cached_property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def call(self, method: str, path: str, body: Any = None, within_s: float = 120) -> Any:
        """Call the API, and retry while the control plane is away. A refusal fails the test."""
        return self._answer(method, path, body, within_s).json()

    def _answer(self, method: str, path: str, body: Any = None, within_s: float = 120) -> httpx.Response:
        end_s = time.monotonic() + within_s
        while True:
            try:
                answer = httpx.request(
                    method, f"http://127.0.0.1:{self._forwarded()}{path}", json=body, timeout=60,
                    headers=self._headers,
                )  # fmt: skip
            except httpx.HTTPError:
                self.close()
                assert time.monotonic() < end_s, f"{method} {path} was not answered for {within_s:.0f} s"
                time.sleep(1)
                continue
            assert answer.status_code < 400, answer.text
            return answer

    def connection(self) -> httpx.Client:
        """A client that keeps its connection: what `call` takes to make a client and to have a stream forwarded is
        not the service's time."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self._forwarded()}", headers=self._headers, timeout=20)

    def until(self, run: str, holds: Callable[[dict[str, Any]], bool], within_s: float) -> dict[str, Any]:
        """Poll the run until `holds`, and return it. Fails at once if the run ended and `holds` does not."""
        end_s = time.monotonic() + within_s
        while not holds(found := self.call("GET", f"/v1/runs/{run}")):
            ended = found["status"] in ("succeeded", "failed", "cancelled", "paused")
            assert not ended, f"{found['status']}: {found['status_reason']}"
            assert time.monotonic() < end_s, f"{found['status']} after {within_s:.0f} s: {found['status_reason']}"
            time.sleep(1)
        return dict(found)

    def _forwarded(self) -> int:
        if self._forward is None or self._forward.poll() is not None:
            words = ["-n", self.namespace, "port-forward", f"service/{self.name}", ":8080"]
            self._forward = subprocess.Popen(
                [tool("kubectl"), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._forward.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", self._forward.stdout.readline())
            if found is None:  # the pod is not there yet
                self.close()
                raise httpx.ConnectError("nothing is forwarded")
            self._port = int(found[1])
        return self._port

    def close(self) -> None:
        """End the forwarding."""
        if self._forward is not None:
            self._forward.kill()
            self._forward.wait()
            self._forward = None

    def trace(self, run: str, folder: Path) -> Trace:
        """The run's trace, downloaded."""
        answer = self._answer("GET", f"/v1/runs/{run}/trace")
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            archive.extractall(folder, filter="data")
        return read_trace(folder / f"{run}-trace")
