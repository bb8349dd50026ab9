"""Pods of the Ray cluster in Kubernetes: why pods are pending, and which are leaving. Uses this pod's service
account."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless.control.periodic import PeriodicTask

log = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Time between two lists of pods. The cluster's scheduler or autoscaler takes as long to decide."""

TIMEOUT_S = 5.0
"""Maximum wait for the API server."""

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

CLUSTER_LABEL = "ray.io/cluster"
GROUP_LABEL = "ray.io/group"

HEAD = ("ray.io/node-type", "head")

LEAVING_TAINTS = frozenset(
    {
        "node.kubernetes.io/unschedulable",
        "node.kubernetes.io/out-of-service",
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable",
    }
)
"""Taints of a node that is about to leave, set by kubectl cordon and drain, cluster-autoscaler, Karpenter, and cloud
termination notices (aws-node-termination-handler, GKE, AKS)."""

LONGEST_REASON = 300
"""Maximum number of characters of a reason. The scheduler's reason has a clause for each kind of node that does not
fit."""


@dataclass(frozen=True, slots=True)
class PendingPod:
    name: str
    group: str
    why: str
    since: float


def pending_of(pods: Iterable[Any]) -> list[PendingPod]:
    """Return the pods (V1Pod objects) that are not running yet, the longest waiting first."""
    pending = [
        PendingPod(
            pod.metadata.name,
            (pod.metadata.labels or {}).get(GROUP_LABEL, ""),
            _pending_reason(pod)[:LONGEST_REASON],
            pod.metadata.creation_timestamp.timestamp(),
        )
        for pod in pods
        if pod.metadata.deletion_timestamp is None and _is_pending(pod)
    ]
    return sorted(pending, key=lambda pod: (pod.since, pod.name))


def leaving_of(pods: Iterable[Any], nodes: Iterable[Any] = ()) -> dict[str, float]:
    """Return the addresses of worker pods that are terminating or whose node (a V1Node) is about to leave.

    Each value is the unix time of termination; 0 if unknown.
    """
    leaving_nodes = {
        node.metadata.name
        for node in nodes
        if node.spec.unschedulable or any(taint.key in LEAVING_TAINTS for taint in node.spec.taints or ())
    }
    leaving = {}
    for pod in pods:
        ends, address = pod.metadata.deletion_timestamp, pod.status.pod_ip
        label, head = HEAD
        if address and (pod.metadata.labels or {}).get(label) != head and (ends or pod.spec.node_name in leaving_nodes):
            leaving[str(address)] = ends.timestamp() if ends else 0.0
    return leaving


def status_clause(pending: list[PendingPod], now: float) -> str:
    """Return a clause for a run's status: the longest pending pod and the number of others; empty without pending
    pods."""
    if not pending:
        return ""
    first = pending[0]
    others = Counter(pod.group for pod in pending[1:])
    more = "".join(f", and {count} more of group {group}" for group, count in sorted(others.items()))
    return f"pod {first.name} is pending for {now - first.since:.0f} s: {first.why}{more}"


def _is_pending(pod: Any) -> bool:
    if pod.status.phase == "Pending":
        return True
    return pod.status.phase == "Running" and any(_waits(status) for status in pod.status.container_statuses or ())


def _waits(status: Any) -> Any:
    return status.state.waiting if status.state is not None else None


def _pending_reason(pod: Any) -> str:
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.message or condition.reason or "it is not scheduled"
    for status in (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())):
        if (waiting := _waits(status)) is not None and waiting.reason not in (None, "PodInitializing"):
            return f"{waiting.reason}: {waiting.message}" if waiting.message else str(waiting.reason)
    return "its containers start"


def pod_lister(cluster: str, with_nodes: bool) -> Callable[[], tuple[list[Any], list[Any]]]:
    """Return a function that lists the pods of a RayCluster in this pod's namespace. `with_nodes` also lists the
    cluster's nodes, which needs a ClusterRole."""
    from kubernetes import client, config

    config.load_incluster_config()
    namespace, api = NAMESPACE_FILE.read_text("utf-8").strip(), client.CoreV1Api()

    def listed() -> tuple[list[Any], list[Any]]:
        selector = f"{CLUSTER_LABEL}={cluster}"
        items: list[Any] = api.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=TIMEOUT_S).items
        nodes: list[Any] = api.list_node(_request_timeout=TIMEOUT_S).items if with_nodes else []
        return items, nodes

    return listed


class PodWatch(PeriodicTask):
    def __init__(self, listed: Callable[[], tuple[list[Any], list[Any]]]) -> None:
        """`listed`: see `pod_lister`."""
        super().__init__(PERIOD_S)
        self._listed = listed
        self.leaving: dict[str, float] = {}
        """See `leaving_of`."""
        self._pending: list[PendingPod] = []

    @property
    def status_clause(self) -> str:
        """The clause for the status of a run that waits for devices."""
        return status_clause(self._pending, time.time())

    async def tick(self) -> None:
        try:
            pods, nodes = await asyncio.to_thread(self._listed)
            self._pending, self.leaving = pending_of(pods), leaving_of(pods, nodes)
        except Exception as error:  # the client raises its own errors and urllib3's
            self._pending, self.leaving = [], {}
            log.warning("cannot list the pods of the Ray cluster: %s", str(error).partition("\n")[0])
