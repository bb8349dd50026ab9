"""The chart on the cluster of KUBECONFIG: one installation, and what is done to it, in the order of the tests.

The runs are real: vLLM and the learner in pods. Time lines are kept in RLHFLESS_ARTEFACTS, if that names a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import CHART, CRD, helm
from environment import kubectl, made, removed
from release import Release

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG is not set: nothing is installed"),
]

CPU_TRIAL = "values-cpu-trial.yaml"
HEAD, WORKER = "ray.io/node-type=head", "ray.io/node-type=worker"
CONTROL_PLANE = "app.kubernetes.io/component=control-plane"
GPU_GROUP, CPU_GROUP = "ray.io/group=h100", "ray.io/group=cpu"
MODEL = "/data/runs/.helm-test"
"""Where `helm test` leaves its model: the fixture `tested`."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    namespace = f"rlhfless-{uuid.uuid4().hex[:6]}"
    folder = Path(os.environ.get("RLHFLESS_TEST_DATA", "/var/tmp")) / namespace
    given = os.environ.get("RLHFLESS_TEST_VALUES")
    try:
        values = yaml.safe_load(Path(given).read_text()) if given else made(namespace, "rlhfless", folder)
        numbers = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text())
        found = Release(namespace, numbers | values, tmp_path_factory.mktemp("release"), CPU_TRIAL)
        try:
            found.upgrade()
            yield found
        finally:
            found.close()
    finally:
        removed(namespace)


@pytest.fixture(scope="module")
def tested(release: Release) -> subprocess.CompletedProcess[str]:
    """`helm test`, as it ended: a test whose run takes the model that it leaves can run alone."""
    only = ("--filter", f"name={release.name}-test")  # the self-test is for nodes that are up
    return release.helm("test", release.name, *only, "--timeout", "10m", timeout_s=620)


def spec(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "name": "cluster",
        "model": {"path": f"{MODEL}/model"},
        "prompts": {"path": f"{MODEL}/train.jsonl", "id_field": "id"},
        "rewards": [{"type": "exact_match"}],
        "steps": steps,
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "generation": {"max_tokens": 64, "engine": {"kv_cache_gib": 0.25, "eager": True}},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every_steps": 10},
        "placement": {"kind": "cpu-core", "devices": 2},
        "scaling": {"generation": {"min_actors": 1, "max_actors": 1}},
    } | changes


def group(name: str) -> int:
    """The number of a group of pods with GPUs in this folder's values."""
    groups = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text())["ray"]["gpuGroups"]
    return [found["name"] for found in groups].index(name)


def whole(release: Release, run: str, steps: int, folder: Path) -> None:
    """Every sample of every step is there, once."""
    trace = release.trace(run, folder)
    per_step = Counter(traced.step for traced in trace.rollouts)
    assert per_step == dict.fromkeys(range(1, steps + 1), 32)
    keys = Counter((traced.step, traced.prompt_id, traced.sample_index) for traced in trace.rollouts)
    assert set(keys.values()) == {1}
    assert [record.step for record in trace.steps if record.step] == list(range(1, steps + 1))


@pytest.mark.parametrize("file", ["values-gpu-cluster.yaml", "values-single-gpu-node.yaml", CPU_TRIAL])
def test_the_server_takes_all_values(release: Release, file: str) -> None:
    known = kubectl("api-resources", "-o", "name")
    here = ["-n", release.namespace, "--kube-version", "1.34.0", "--api-versions", CRD]
    drawn = helm("template", "other", str(CHART), *here, "-f", str(CHART / file))
    assert drawn.returncode == 0, drawn.stderr
    objects = [found for found in yaml.safe_load_all(drawn.stdout) if found]
    there = [found for found in objects if "monitoring.coreos.com" not in found["apiVersion"]
             or "prometheusrules" in known]  # fmt: skip
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": there})
    release.kubectl("apply", "--dry-run=server", "-f", "-", given=given)


def test_its_accounts_may_do_what_they_need_and_nothing_else(release: Release) -> None:
    def may(account: str, *what: str) -> bool:
        user = f"system:serviceaccount:{release.namespace}:{account}"
        return release.kubectl("auth", "can-i", *what, "--as", user, check=False).strip() == "yes"

    assert may(release.name, "list", "pods")
    refused = [("get", "secrets"), ("create", "pods"), ("delete", "pods"), ("create", "pods/exec"), ("list", "nodes"),
               ("patch", "rayclusters.ray.io")]  # fmt: skip
    assert not [what for what in refused if may(release.name, *what)]
    assert not may(release.name, "list", "pods", "-n", "kube-system")
    assert not may("default", "list", "pods")
    mounts = [volume.get("name", "") for pod in release.objects("pods", GPU_GROUP)
              for volume in pod["spec"]["volumes"]]  # fmt: skip
    assert not [name for name in mounts if "kube-api-access" in name], "a worker has an account's token"


def test_its_own_test_passes(release: Release, tested: subprocess.CompletedProcess[str]) -> None:
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "Failed" not in tested.stdout
    (run,) = release.call("GET", "/v1/runs")["data"]
    assert (run["status"], run["step"]) == ("succeeded", 2)


@pytest.mark.usefixtures("tested")
def test_killed_pods_lose_nothing(release: Release, tmp_path: Path) -> None:
    """The control plane is killed last: while it is away the run goes on, up to its end."""
    steps = 16
    run = release.call("POST", "/v1/runs", spec(steps, checkpoint={"every_steps": 4}))["id"]
    release.until(run, lambda found: found["step"] >= 2, 300)
    release.kill(WORKER)
    release.kill(HEAD)
    release.until(run, lambda found: found["attempt"] > 1 and found["step"] >= 6, 420)
    release.kill(CONTROL_PLANE)
    release.until(run, lambda found: found["status"] == "succeeded", 420)
    whole(release, run, steps, tmp_path)


@pytest.mark.usefixtures("tested")
def test_a_run_goes_on_over_upgrade_and_rollback(release: Release, tmp_path: Path) -> None:
    steps = 30
    run = release.call("POST", "/v1/runs", spec(steps))["id"]
    release.until(run, lambda found: found["step"] >= 2, 300)
    key, head = release.key, release.pods(HEAD)
    newer = release.drawn("--set", "image.tag=newer")
    (there,) = release.objects("rayclusters")
    (cluster,), (control_plane,) = (
        [found["spec"] for found in newer if found["kind"] == kind] for kind in ("RayCluster", "Deployment")
    )
    assert cluster["headGroupSpec"]["template"] == there["spec"]["headGroupSpec"]["template"]
    assert control_plane["template"]["spec"]["containers"][0]["image"].endswith(":newer")
    release.upgrade("--set", "controlPlane.maxDrivers=2")
    assert release.call("GET", f"/v1/runs/{run}")["attempt"] == 1
    assert release.helm("rollback", release.name).returncode == 0
    ended = release.until(run, lambda found: found["status"] == "succeeded", 300)
    assert (ended["attempt"], release.key, release.pods(HEAD)) == (1, key, head)
    whole(release, run, steps, tmp_path)


def keep(name: str, text: str) -> None:
    """Print, and keep a file."""
    print(text)
    if folder := os.environ.get("RLHFLESS_ARTEFACTS"):
        (Path(folder) / name).write_text(text)


class TimeLine:
    """How many worker pods and held devices there are, second by second."""

    def __init__(self, release: Release) -> None:
        self._release, self._over = release, threading.Event()
        self.rows: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._over.wait(2):
            self.rows.append((time.monotonic() - began_s, len(self._release.pods(GPU_GROUP))))

    def __enter__(self) -> TimeLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        text = "seconds,worker_pods_with_gpus\n" + "".join(f"{at_s:.0f},{pods}\n" for at_s, pods in self.rows)
        keep("gpu-pods.csv", text)


def on_gpus(steps: int) -> dict[str, Any]:
    """Three pods of two GPUs: four actors and a learner of two."""
    return spec(
        steps,
        placement={"kind": "h100", "devices": 6, "mode": "disaggregated", "learner_devices": 2},
        scaling={"generation": {"min_actors": 4, "max_actors": 4}},
    )


def elastic() -> dict[str, Any]:
    """A run of one or two cores, with an actor on each: faster on two by its plan, and of so many steps that changes of
    its size pay."""
    placement = {"kind": "cpu-core", "devices": {"min": 1, "max": 2}}
    scaling = {"generation": {"min_actors": 1, "max_actors": 2}}
    return spec(100_000, prompts_per_step=16, placement=placement, scaling=scaling)


@pytest.mark.usefixtures("tested")
def test_worker_pods_follow_a_run_over_a_lost_pod_and_a_cordoned_node_and_go(release: Release, tmp_path: Path) -> None:
    """There is one node that executes anything: once it is cordoned, the run waits until it may be used again."""
    steps = 40  # the service lists nodes every 5 s, and the run must not end before it has left the cordoned one
    release.upgrade("--set", "controlPlane.watchNodes=true")
    assert release.pods(GPU_GROUP) == []
    with TimeLine(release) as line:
        run = release.call("POST", "/v1/runs", on_gpus(steps))["id"]
        waiting = release.until(run, lambda found: "pending" in found["status_reason"], 120)
        assert "rlhfless-ray-h100-worker-" in waiting["status_reason"]
        release.until(run, lambda found: found["step"] >= 2, 420)
        pods = release.pods(GPU_GROUP)
        assert len(pods) == 3
        release.kubectl("delete", "pod", pods[0], "--wait=false")
        release.until(run, lambda found: found["step"] >= 6, 420)
        assert max(pods for _, pods in line.rows) == 3
        nodes = {pod["spec"]["nodeName"] for pod in release.objects("pods", GPU_GROUP)}
        kubectl("cordon", *nodes)
        try:
            said = release.until(run, lambda found: "unschedulable" in found["status_reason"], 240)["status_reason"]
            assert said.startswith("waiting for devices"), said
        finally:
            kubectl("uncordon", *nodes)
        release.until(run, lambda found: found["status"] == "succeeded", 420)
        end_s = time.monotonic() + 240
        while release.pods(GPU_GROUP):
            assert time.monotonic() < end_s, "worker pods stay, though no run is there"
            time.sleep(2)
    whole(release, run, steps, tmp_path)
    release.upgrade()


@pytest.mark.usefixtures("tested")
def test_runs_take_turns_on_the_devices_of_a_pod(release: Release, tmp_path: Path) -> None:
    """One pod of two GPUs may come: the second run shares it with the first, whose driver is another one."""
    steps = 8
    placement = {"kind": "h100", "devices": 2, "mode": "disaggregated", "learner_devices": 1, "tenants": 2}
    release.upgrade("--set", f"ray.gpuGroups[{group('h100')}].maxNodes=1,controlPlane.maxDrivers=2")
    runs = [release.call("POST", "/v1/runs", spec(steps, placement=placement))["id"] for _ in range(2)]
    for run in runs:
        release.until(run, lambda found: found["step"] >= 1, 420)
    (kind,) = (found for found in release.call("GET", "/v1/devices")["data"] if found["kind"] == "h100")
    assert [(found["run_id"], found["granted"]) for found in kind["runs"]] == [(run, 2) for run in runs]
    assert (kind["total"], kind["free"], len(release.pods(GPU_GROUP))) == (2, 0, 1)
    for run in runs:
        release.until(run, lambda found: found["status"] == "succeeded", 420)
        whole(release, run, steps, tmp_path)
    release.upgrade()


@pytest.mark.seldom
@pytest.mark.usefixtures("tested")
def test_an_elastic_run_shrinks_when_a_pod_is_drained_and_grows_when_it_is_back(release: Release) -> None:
    """Its pods have one core each. The service asks the autoscaler for the second one. While the node is cordoned, none
    starts."""
    one_core = "cores=1,maxNodes=2,idleSeconds=30,resources.limits.cpu=1"
    release.upgrade("--set", ",".join(f"ray.cpuGroup.{each}" for each in one_core.split(",")))
    run = release.call("POST", "/v1/runs", elastic())["id"]

    def sizes() -> list[tuple[str, int]]:
        """What the service granted, and on how many devices the run then worked."""
        events = release.call("GET", f"/v1/runs/{run}/events?limit=1000")["data"]
        data = [event["data"] for event in events if event["type"] == "size"]
        return [("granted", each["after"]) if "after" in each else ("works", each["devices"]) for each in data]

    def until(*last: tuple[str, int]) -> None:
        release.until(run, lambda _: tuple(sizes()[-len(last) :]) == last, 420)

    begun = release.until(
        run, lambda found: found["step"] >= 2 and sizes()[-1:] in ([("granted", 2)], [("works", 2)]), 420
    )
    first, second = release.pods(CPU_GROUP)
    (node,) = {pod["spec"]["nodeName"] for pod in release.objects("pods", CPU_GROUP)}
    kubectl("cordon", node)
    try:
        release.kubectl("delete", "pod", second, "--wait=false")
        until(("granted", 1), ("works", 1))
        shrunk = release.call("GET", f"/v1/runs/{run}")["step"]
        release.until(run, lambda found: found["step"] >= shrunk + 2, 240)
    finally:
        kubectl("uncordon", node)
    until(("granted", 2), ("works", 2))
    assert release.call("GET", f"/v1/runs/{run}")["attempt"] == begun["attempt"], "all in one driver"
    assert first in release.pods(CPU_GROUP)
    release.call("POST", f"/v1/runs/{run}/cancel")
    end_s = time.monotonic() + 240
    while release.pods(CPU_GROUP):
        assert time.monotonic() < end_s, "worker pods stay, though no run is there"
        time.sleep(2)
    release.upgrade()


@pytest.mark.usefixtures("tested")
def test_a_run_says_why_its_nodes_do_not_come(release: Release) -> None:
    wants = spec(1, placement={"kind": "a100-80gb", "devices": 8})
    run = release.call("POST", "/v1/runs", wants)["id"]
    said = release.until(run, lambda found: "nodes are available" in found["status_reason"], 180)["status_reason"]
    assert f"pod {release.name}-ray-absent-worker-" in said
    assert "didn't match Pod's node affinity/selector" in said
    release.call("POST", f"/v1/runs/{run}/cancel")
    end_s = time.monotonic() + 120
    while release.call("GET", f"/v1/runs/{run}")["status"] != "cancelled":
        assert time.monotonic() < end_s, "the run that waits is not cancelled"
        time.sleep(1)


def test_sixty_four_nodes_of_eight_gpus(release: Release) -> None:
    if len(json.loads(kubectl("get", "nodes", "-l", "type=kwok", "-o", "json"))["items"]) < 64:
        pytest.skip("the cluster has no 64 nodes of KWOK (label type=kwok): its size is not tested")
    release.upgrade("--set", f"ray.gpuGroups[{group('many')}].minNodes=64")
    end_s = time.monotonic() + 300
    while len(there := release.objects("pods", "ray.io/group=many")) < 64 or any(
        pod["status"]["phase"] != "Running" for pod in there
    ):
        assert time.monotonic() < end_s, f"{len(there)} pods of 64"
        time.sleep(2)
    (cluster,) = release.objects("rayclusters")
    taken_s = []
    release.call("GET", "/v1/functions")  # the pod was replaced: a port is forwarded to the new one
    with release.connection() as connection:
        for _ in range(300):
            began_s = time.monotonic()
            connection.get("/v1/functions").raise_for_status()
            taken_s.append(time.monotonic() - began_s)
    p50_s, p99_s = sorted(taken_s)[149], sorted(taken_s)[-3]
    keep("many-nodes.txt", f"RayCluster object: {len(json.dumps(cluster)):,} bytes; 300 GET /v1/functions through a "
                           f"forwarded port: p50 {p50_s * 1e3:.0f} ms, p99 {p99_s * 1e3:.0f} ms\n")  # fmt: skip
    release.upgrade()


def test_uninstalled_nothing_is_left_but_what_keep_names(release: Release) -> None:
    assert release.helm("uninstall", release.name, "--wait", "--timeout", "4m", timeout_s=250).returncode == 0
    kinds = (
        "pods,deployments,services,secrets,configmaps,roles,rolebindings,serviceaccounts,networkpolicies,rayclusters"
    )
    end_s = time.monotonic() + 120
    while left := [found for found in release.objects(kinds + ",pvc") if _is_ours(found)]:
        assert time.monotonic() < end_s, [found["metadata"]["name"] for found in left]
        time.sleep(2)


def _is_ours(found: dict[str, Any]) -> bool:
    labels = found["metadata"].get("labels", {})
    return labels.get("app.kubernetes.io/instance") == "rlhfless" or "ray.io/cluster" in labels


@pytest.mark.skipif(not os.environ.get("RLHFLESS_TEST_DEFINITIONS"), reason="would replace the cluster's definitions")
def test_a_definition_that_is_too_old_is_refused(release: Release) -> None:
    name = "rayclusters.ray.io"
    there = json.loads(kubectl("get", "crd", name, "-o", "json"))
    there["metadata"] = {"name": name, "annotations": there["metadata"].get("annotations", {})}
    older = json.loads(json.dumps(there))
    for version in older["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].pop("authOptions", None)
    kubectl("replace", "-f", "-", given=json.dumps(older))
    try:
        done = release.helm("install", "other", str(CHART), "--dry-run=server")
    finally:
        kubectl("replace", "-f", "-", given=json.dumps(there))
    assert done.returncode != 0
    assert "RayCluster definition is older than KubeRay 1.5.1" in done.stderr
