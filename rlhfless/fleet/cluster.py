"""The Ray cluster: start or join it, deploy and delete one Serve application per replica.

When a deployment shrinks, Serve chooses the replica to stop. An elastic function is therefore not a deployment with n
replicas, but n applications with one replica each (`route_prefix=None`: no HTTP), created and deleted by name. A
replica requests no devices from Ray: the run has reserved them (rlhfless.fleet.reservations), and the replica is placed
on their node.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import ApplicationStatus

from rlhfless.fleet import private_ray, ray_session
from rlhfless.fleet.each_node import on_node, staying_nodes
from rlhfless.fleet.nodes import ambiguous, nodes_of, selector
from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.serve_handles import ServeHandle
from rlhfless.prepare.machine import first_gpu_bytes
from rlhfless.scaling.latency.devices import NODE_LABEL
from rlhfless.scaling.placement import CPU_KIND, Node
from rlhfless.spec import PlacementSpec
from rlhfless.util.clock import monotonic_s

PROBE_S = 60.0
"""Timeout for reading a node's GPU memory: a small task, whose process may have to start."""

POLL_S = 0.25
"""Interval for reading the status of starting applications, all at once. It is well below the seconds of a start. A
read costs Serve's controller and the driver tens of milliseconds on the cores that the replicas start on."""

SERVE_S = 60.0
"""Timeout for the Serve controller that another driver is starting: a small process that takes a few seconds."""

CONCURRENT_CALLS = 1024
"""Maximum calls in flight per replica: streams, heartbeats, aborts and probes must never queue behind each other
(Serve's default is 5). Samples of a lost actor arrive at another one in a stream for each of its requests."""


_FOUND = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY, ApplicationStatus.DEPLOYING)


_deploying = threading.Lock()
"""Serve describes and pickles one deployment at a time."""

_router_pickling = threading.Lock()
"""While Serve creates a RequestRouterConfig, it registers its own module with cloudpickle as "pickled by value", for
the whole process. Each deployment creates a config, and so does the thread of each handle when its replica's
configuration arrives or changes. Two at the same time fail with `not registered for pickle by value`."""


class Cluster:
    """A running Ray cluster with Serve. Create it with `await Cluster.start(...)`; end it with `await stop()`."""

    def __init__(self, private_in: Path | None = None) -> None:
        """`private_in`: the folder with the files of a private Ray; None for a joined cluster."""
        self._private_in = private_in
        self.private = private_in is not None
        """Whether the cluster ends with this run."""
        self._kinds: Collection[str] = ()
        self._memory_bytes: dict[str, int] = {}
        self._statuses: Mapping[str, Any] = {}
        self._read_s = -math.inf
        self._reading = asyncio.Lock()

    @classmethod
    async def start(
        cls, spec: PlacementSpec, folder: Path, kinds: Collection[str] = (), code: Path | None = None
    ) -> Cluster:
        """Start a private Ray on this machine with its files in `folder`, or join the one at `spec.ray_address` with
        the user's `code` (rlhfless.fleet.each_node). `kinds`: device kinds of the price book.

        Raises NoCluster if there is no cluster at that address, or if the run would join it over a network without a
        token. Raises NotPrivate if other users could change a private Ray's files.
        """
        if spec.ray_address:
            ray_session.require_token(spec, os.environ)
            await ray_session.reach(spec.ray_address)
        cluster = await ray_session.started(lambda: cls._start(spec, folder, code), spec.ray_address, folder)
        cluster._kinds = kinds
        return cluster

    @classmethod
    def _start(cls, spec: PlacementSpec, folder: Path, code: Path | None) -> Cluster:
        if spec.ray_address:
            ray_session.join(spec.ray_address, code)
        else:
            ray_session.start_private(private_ray.make(folder), cores=len(os.sched_getaffinity(0)))
        _make_router_configs_one_at_a_time()
        _start_serve(SERVE_S)
        return cls(None if spec.ray_address else folder)

    @property
    def lost(self) -> bool:
        """Whether a private Ray has ended, with all replicas. Calls would then never return."""
        return self.private and ray_session.is_lost()

    @property
    def address(self) -> str:
        return str(ray.get_runtime_context().gcs_address)

    async def nodes(self, wanted: str | None) -> list[Node]:
        """Return the nodes that are not leaving, with their total and free devices.

        Raises UnknownAccelerator if a node has GPUs that are not in the price book, unless a kind is `wanted`.
        """
        return await asyncio.to_thread(self._nodes, wanted)

    def _nodes(self, wanted: str | None) -> list[Node]:
        reported = staying_nodes()
        for node in ambiguous(reported):
            if node not in self._memory_bytes and (bytes_by_gpu := _gpu_memory_bytes(node)):
                self._memory_bytes[node] = bytes_by_gpu
        return nodes_of(reported, available_resources_per_node(), self._kinds, self._memory_bytes, wanted)

    def request(self, wanted: Mapping[str, int]) -> None:
        """Ask the autoscaler, if the cluster has one, for nodes with so many devices in all, by kind. Replaces the last
        request."""
        kinds = list(Counter(wanted).elements())
        bundles = [{"CPU": 1} if kind == CPU_KIND else {"GPU": 1} for kind in kinds]
        labels = [{} if kind == CPU_KIND else selector(kind) for kind in kinds]
        request_resources(bundles=bundles, bundle_label_selectors=labels)

    async def deploy(
        self, name: str, function: type, arguments: Sequence[Any], node: str, *, stop_s: float
    ) -> ServeHandle:
        """Start one replica on the node with this Ray id, without waiting for it; return its handle."""
        options = {
            "name": name,
            "num_replicas": 1,
            "max_ongoing_requests": CONCURRENT_CALLS,
            "graceful_shutdown_timeout_s": stop_s,
            "graceful_shutdown_wait_loop_s": 0.1,
            # A constructor that fails will fail again: report the first failure instead of trying 20 times.
            "max_constructor_retry_count": 1,
            "ray_actor_options": {"num_cpus": 0, "num_gpus": 0, "label_selector": {NODE_LABEL: node}},
        }
        await asyncio.to_thread(_deploy, function, arguments, options)
        return self.handle(name)

    def handle(self, name: str) -> ServeHandle:
        return ServeHandle(serve.get_app_handle(name))

    async def running(self, prefix: str) -> list[str]:
        """Return the names of replicas with this prefix, such as those of an earlier driver."""
        applications = await self._applications()
        return [name for name, app in applications.items() if name.startswith(prefix) and app.status in _FOUND]

    async def wait_running(self, name: str, timeout_s: float) -> None:
        """Wait until a replica's constructor has returned. Raises FleetError if it raised, or after `timeout_s`. The
        replica itself keeps an error that the user can correct (Function.starting)."""
        began = monotonic_s()
        while True:
            overview = (await self._applications()).get(name)
            if overview is not None and overview.status == ApplicationStatus.RUNNING:
                return
            if overview is not None and overview.status == ApplicationStatus.DEPLOY_FAILED:
                cause = innermost([overview.message, *(d.message for d in overview.deployments.values())])
                raise FleetError(f"{name} did not start: {cause}")
            waited_s = monotonic_s() - began
            if waited_s > timeout_s:
                state = "unknown" if overview is None else str(overview.status)
                raise FleetError(f"waited {waited_s:.0f} s for {name} to start; its state is {state}")
            await asyncio.sleep(POLL_S)

    async def _applications(self) -> Mapping[str, Any]:
        """Return the status of all applications, at most POLL_S old."""
        async with self._reading:
            if monotonic_s() - self._read_s > POLL_S:
                self._statuses = (await asyncio.to_thread(serve.status)).applications
                self._read_s = monotonic_s()
        return self._statuses

    async def delete(self, names: Sequence[str]) -> None:
        """Stop replicas, and wait until they are gone. Unknown names are ignored."""
        if self.lost:
            return
        await asyncio.gather(*(asyncio.to_thread(serve.delete, name) for name in names))

    async def stop(self) -> None:
        """Leave the cluster. A private one stops, and its files are removed."""
        # Do not shut Serve down: a private Ray ends together with it, and in a joined cluster other runs use it.
        await asyncio.to_thread(ray_session.end)
        if self._private_in is not None:
            await asyncio.to_thread(private_ray.remove, self._private_in)


def _gpu_memory_bytes(node: str) -> int | None:
    """Return the memory of a node's first GPU; None if unknown."""
    try:
        return int(ray.get(on_node(node, first_gpu_bytes), timeout=PROBE_S))
    except (RayError, GetTimeoutError):
        return None


def _start_serve(within_s: float) -> None:
    """Start Serve without an HTTP proxy, unless it is running.

    Serve looks for its controller, and creates one if there is none. This fails if another driver creates one in
    between, or if Ray repeats the request because the head was just replaced; a retry finds the controller.
    """
    end_s = monotonic_s() + within_s
    while True:
        try:
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            return
        except ActorAlreadyExistsError:
            if monotonic_s() > end_s:
                raise
            time.sleep(POLL_S)


def _deploy(function: type, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    with _deploying:
        deployment: Any = serve.deployment(function)
        app = deployment.options(**options).bind(*arguments)
        target = serve.RunTarget(target=app, name=options["name"], route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)


def _make_router_configs_one_at_a_time() -> None:
    """Add the lock that Serve lacks (ray/serve/config.py): see `_router_pickling`."""
    pickles = RequestRouterConfig._serialize_request_router_cls
    if getattr(pickles, "one_at_a_time", False):
        return

    def locked(config: RequestRouterConfig) -> None:
        with _router_pickling:
            pickles(config)

    locked.one_at_a_time = True  # type: ignore[attr-defined]
    RequestRouterConfig._serialize_request_router_cls = locked  # type: ignore[method-assign, assignment]


# The exception line of a traceback: at the left margin, a class with its module, or a built-in class.
_EXCEPTION = re.compile(
    r"^(?P<name>(?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?:: |$)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    """The exception's class with its module; empty if Serve names none."""
    message: str

    def __str__(self) -> str:
        return f"{self.name.rpartition('.')[2]}: {self.message}" if self.name else self.message


def innermost(texts: Sequence[str]) -> Cause:
    """Return the last exception in the texts. Serve puts the cause last; its message may have several lines."""
    for text in reversed(texts):
        named = list(_EXCEPTION.finditer(text))
        if named:
            return Cause(named[-1]["name"], text[named[-1].end() :].strip())
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return Cause("", lines[-1] if lines else "no reason given")
