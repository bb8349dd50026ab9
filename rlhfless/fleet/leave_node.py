"""The preStop hook of a pod: drain the pod's Ray node, and wait until no run uses it.

    python -m rlhfless.fleet.leave_node SECONDS

Kubernetes runs the hook before it sends SIGTERM, within the pod's grace period. On a drained node, Ray exits when
nothing there is held any more. After SECONDS, or if the cluster refuses the drain, the hook stops Ray: the pod's signal
reaches only the shell that has started Ray. The node then counts as dead, but no results are lost.
"""

from __future__ import annotations

import os
import sys
import time

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from rlhfless.util.clock import monotonic_s, unix_s

LOOK_S = 0.5

INSTANCE = "RAY_CLOUD_INSTANCE_ID"
"""Variable with the pod's name, set by KubeRay. It identifies this pod's raylet, because others may be visible."""

WHY: int = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
"""Ray's other reason, idleness, is refused for a busy node."""


def drain(client: GcsClient, node: str, end_s: float, why: str) -> bool:
    """Drain a node that leaves at `end_s` (unix time; 0 if unknown); return whether the cluster accepts the drain."""
    accepted, refusal = client.drain_node(node, WHY, why, int(end_s * 1000))
    if not accepted:
        print(f"node {node} is not drained: {refusal}", flush=True)
    return bool(accepted)


def _raylet() -> tuple[psutil.Process, str] | None:
    """Return the raylet of this pod and its Ray node id."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet" and process.environ().get(INSTANCE) == os.environ.get(INSTANCE):
            ids = [word.partition("=")[2] for word in process.cmdline() if word.startswith("--node_id=")]
            return (process, ids[0]) if ids else None
    return None


def main(seconds: float) -> None:
    """Drain this pod's node and wait until Ray has exited; stop Ray after `seconds`."""
    end_s, process = monotonic_s() + seconds, _raylet()
    if process is None:
        print("no Ray runs here", flush=True)
        return
    raylet, node = process
    try:
        accepted = drain(GcsClient(address=os.environ["RAY_ADDRESS"]), node, unix_s() + seconds, "its pod ends")
        while accepted and _lives(raylet) and monotonic_s() < end_s:
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
