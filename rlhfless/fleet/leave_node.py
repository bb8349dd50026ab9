"""The hook of a pod that ends: it drains the pod's Ray node, and waits until no run has anything on it.

    python -m rlhfless.fleet.leave_node SECONDS

Kubernetes runs it before it sends SIGTERM, as part of the pod's grace period. The Ray of a node that is drained ends by
itself when nothing on it is held any more. After SECONDS, or where the cluster refuses to drain it, the hook ends it:
the pod's signal reaches the shell that has started Ray, and not Ray. The node then counts as dead, which loses nothing.
"""

from __future__ import annotations

import os
import sys
import time

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

LOOK_S = 0.5

INSTANCE = "RAY_CLOUD_INSTANCE_ID"
"""The variable with the pod's name, which KubeRay sets: a raylet of another pod may be visible."""

WHY: int = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
"""Ray refuses its other reason, idleness, for a node that works."""


def drain(client: GcsClient, node: str, end_s: float, why: str) -> bool:
    """Drain a node that leaves at `end_s` (unix time; 0 if unknown); return whether the cluster accepts it."""
    accepted, refusal = client.drain_node(node, WHY, why, int(end_s * 1000))
    if not accepted:
        print(f"node {node} is not drained: {refusal}", flush=True)
    return bool(accepted)


def _raylet() -> tuple[psutil.Process, str] | None:
    """Return the raylet of this pod, with Ray's id of the node."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet" and process.environ().get(INSTANCE) == os.environ.get(INSTANCE):
            ids = [word.partition("=")[2] for word in process.cmdline() if word.startswith("--node_id=")]
            return (process, ids[0]) if ids else None
    return None


def main(seconds: float) -> None:
    """Drain this pod's node, and wait until its Ray has ended."""
    end_s, process = time.monotonic() + seconds, _raylet()
    if process is None:
        print("no Ray runs here", flush=True)
        return
    raylet, node = process
    try:
        accepted = drain(GcsClient(address=os.environ["RAY_ADDRESS"]), node, time.time() + seconds, "its pod ends")
        while accepted and _lives(raylet) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
    finally:
        if _lives(raylet):
            raylet.terminate()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(float(sys.argv[1]))
