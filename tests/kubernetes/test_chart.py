"""What the chart renders, with helm and no cluster."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml
from charts import CHART, Render, helm

import rlhfless

FILES = ("values-gpu-cluster.yaml", "values-single-gpu-node.yaml", "values-cpu-trial.yaml", "values-kueue.yaml")
POSTGRES = {"database": {"existingSecret": "postgres"}}
OPEN = {
    "ingress": {"enabled": True, "host": "rlhf.example", "tlsSecret": "tls", "className": "nginx"},
    "gateway": {"enabled": True, "parents": [{"name": "public"}], "hostnames": ["rlhf.example"]},
}
OWN = {
    "apiKey": {"existingSecret": "mine"},
    "volumes": {name: {"existingClaim": f"my-{name}"} for name in ("data", "runs", "models")},
    "hub": {"existingSecret": "hub"},
    "imagePullSecrets": ["registry"],
    "ray": {"priorityClassName": "low", "queueName": "team"},
}
MATRIX = [({}, ()), *(({}, (file,)) for file in FILES), *((values, (FILES[0],)) for values in (POSTGRES, OPEN, OWN))]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [found for found in objects if found["kind"] == kind]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Specs of all pods, by what makes them."""
    found = {f"{one['kind']}/{one['metadata']['name']}": one["spec"] for one in of_kind(objects, "Pod")}
    for one in of_kind(objects, "Deployment"):
        found[f"Deployment/{one['metadata']['name']}"] = one["spec"]["template"]["spec"]
    for cluster in of_kind(objects, "RayCluster"):
        found["head"] = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        found |= {group["groupName"]: group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]}
    return found


def test_lint() -> None:
    for file in FILES:
        done = helm("lint", "--strict", str(CHART), "-f", str(CHART / file))
        # The check for KubeRay has no cluster to ask.
        assert done.returncode == 0 or "needs KubeRay's operator" in done.stdout + done.stderr, done.stdout


@pytest.mark.parametrize(("values", "files"), MATRIX)
def test_every_pod_is_restricted(render: Render, values: dict[str, Any], files: tuple[str, ...]) -> None:
    """As the `restricted` pod security standard asks, and more: a root file system that is read-only."""
    objects = render(values, *files)
    found = pods(objects)
    assert {"head", "cpu", "Deployment/r-rlhfless", "Pod/r-rlhfless-test"} <= found.keys()
    for name, spec in found.items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in spec["volumes"]}, name
        # The control plane reads pods, the head's autoscaler changes them.
        assert name in ("head", "Deployment/r-rlhfless") or spec["automountServiceAccountToken"] is False


def test_one_image_everywhere(render: Render) -> None:
    digest = "sha256:" + "0" * 64
    objects = render({"image": {"repository": "mine/rlhfless", "digest": digest}}, FILES[0])
    (cluster,) = of_kind(objects, "RayCluster")
    images = {container["image"] for spec in pods(objects).values() for container in spec["containers"]}
    assert images | {cluster["spec"]["autoscalerOptions"]["image"]} == {f"mine/rlhfless@{digest}"}


def test_gpu_groups_cost_nothing_while_idle_and_are_known_to_the_scaler(render: Render) -> None:
    objects = render({}, FILES[0])
    (cluster,) = of_kind(objects, "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    assert cluster["spec"]["autoscalerOptions"]["version"] == "v2"
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert {name: group["minReplicas"] for name, group in groups.items()} == {"cpu": 0, "h100": 0, "l40s": 0}
    assert groups["h100"]["labels"] == {"ray.io/accelerator-type": "H100"}
    (container,) = groups["h100"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    arguments = pods(objects)["Deployment/r-rlhfless"]["containers"][0]["args"]
    assert "--capacity=h100=64" in arguments
    assert "--capacity=l40s=32" in arguments
    assert not any("cpu-core" in word for word in arguments)


def test_the_cores_of_a_trial_are_devices(render: Render) -> None:
    arguments = pods(render({}, FILES[2]))["Deployment/r-rlhfless"]["containers"][0]["args"]
    assert "--capacity=cpu-core=2" in arguments


GROUP = yaml.safe_load((CHART / FILES[1]).read_text())["ray"]["gpuGroups"][0]


def test_a_group_has_what_rdma_needs(render: Render) -> None:
    rdma = {
        "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        "hostNetwork": True,
        "capabilities": ["IPC_LOCK"],
        "resources": {"requests": {"cpu": "64", "rdma/hca": 8}, "limits": {"memory": "800Gi", "rdma/hca": 8}},
    }
    objects = render({"ray": {"gpuGroups": [GROUP | rdma]}})
    (cluster,) = of_kind(objects, "RayCluster")
    cpu, node = (group["template"] for group in cluster["spec"]["workerGroupSpecs"])
    assert node["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma"}
    assert (node["spec"]["hostNetwork"], node["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    (container,) = node["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"] == {"memory": "800Gi", "rdma/hca": 8, "nvidia.com/gpu": 8}
    assert "annotations" not in cpu["metadata"]  # and the other pods stay restricted
    assert not {"hostNetwork", "dnsPolicy"} & cpu["spec"].keys()
    assert cpu["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_annotations_of_all_pods_of_the_ray_cluster(render: Render) -> None:
    given = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    (cluster,) = of_kind(render({"ray": {part: {"annotations": given} for part in ("head", "cpuGroup")}}), "RayCluster")
    templates = [cluster["spec"]["headGroupSpec"]["template"], cluster["spec"]["workerGroupSpecs"][0]["template"]]
    assert [template["metadata"]["annotations"] for template in templates] == [given, given]


def test_a_new_pod_finds_what_others_have_fetched_and_compiled(render: Render) -> None:
    caches = {
        "RLHFLESS_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR", "CUDA_CACHE_PATH",
    }  # fmt: skip
    for file, mode in ((FILES[0], "ReadWriteMany"), (FILES[1], "ReadWriteOnce")):
        objects = render({}, file)
        (claim,) = (
            one for one in of_kind(objects, "PersistentVolumeClaim") if one["metadata"]["name"].endswith("cache")
        )
        assert claim["spec"]["accessModes"] == [mode]
        for spec in pods(objects).values():
            (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "cache")
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
            for container in spec["containers"]:
                places = {each["name"]: each.get("value", "") for each in container["env"]}
                assert {name for name, value in places.items() if value.startswith("/cache/")} == caches
                assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
    named = render({"volumes": {"cache": {"enabled": True, "existingClaim": "mine"}}})
    assert len(of_kind(named, "PersistentVolumeClaim")) == 2
    assert "cache" not in {volume["name"] for volume in pods(render())["cpu"]["volumes"]}


def test_k3s_runs_pods_with_gpus_under_its_runtime_class(render: Render) -> None:
    found = pods(render({}, FILES[1]))
    assert found["node"]["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in found["cpu"]


@pytest.mark.parametrize(
    ("shared", "worker", "head"),
    [("256Gi", 8 << 30, 8 << 30), ("16Gi", 2 << 30, 8 << 30), ("1.5G", 200_000_000, 750_000_000)],
)
def test_rays_object_store_is_a_part_of_the_shared_memory(render: Render, shared: str, worker: int, head: int) -> None:
    """It is on the same file system as the weights."""
    values = {"head": {"sharedMemory": shared}, "gpuGroups": [GROUP | {"sharedMemory": shared}]}
    (cluster,) = of_kind(render({"ray": values}), "RayCluster")
    parts = (cluster["spec"]["workerGroupSpecs"][1], cluster["spec"]["headGroupSpec"])
    assert [int(part["rayStartParams"]["object-store-memory"]) for part in parts] == [worker, head]
    for part in parts:
        (volume,) = (each for each in part["template"]["spec"]["volumes"] if each["name"] == "shared-memory")
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": shared}


def test_the_database_by_url_comes_from_its_secret_alone(render: Render) -> None:
    spec = pods(render(POSTGRES))["Deployment/r-rlhfless"]
    for container in (*spec["initContainers"], *spec["containers"]):
        (database,) = [entry for entry in container["env"] if entry["name"] == "RLHFLESS_DATABASE"]
        assert database["valueFrom"] == {"secretKeyRef": {"name": "postgres", "key": "url"}}


def test_what_is_named_is_not_made(render: Render) -> None:
    objects = render(OWN)
    assert of_kind(objects, "PersistentVolumeClaim") == []
    assert [one["metadata"]["name"] for one in of_kind(objects, "Secret")] == ["r-rlhfless-ray-token"]
    (cluster,) = of_kind(objects, "RayCluster")
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in pods(objects)["cpu"]["volumes"]
              if "persistentVolumeClaim" in volume}  # fmt: skip
    assert claims == {"my-runs", "my-models"}


def test_an_operator_bounds_runs_and_drivers(render: Render) -> None:
    bounds = {"sizes": {"step_samples": 40_960_000}, "driverMemoryGiB": 2.5, "quotas": {"team-a": "16:2"}}
    (control,) = of_kind(render({"controlPlane": bounds}), "Deployment")
    words = control["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--size=step_samples=40960000", "--driver-memory=2.5", "--quota=team-a=16:2"} <= set(words)


def test_claims_that_are_kept(render: Render) -> None:
    for keep in (True, False):
        for claim in of_kind(render({"volumes": {"keep": keep}}), "PersistentVolumeClaim"):
            kept = claim["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
            assert kept is keep


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"controlplane": {}}, "controlplane"),
        ({"controlPlane": {"maxDriver": 2}}, "maxDriver"),
        ({"controlPlane": {"maxDrivers": 0}}, "maxDrivers"),
        ({"controlPlane": {"quotas": {"team-a": "many"}}}, "team-a"),
        ({"service": {"type": "Cluster"}}, "type"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"ray": {"gpuGroups": [{"name": "h100"}]}}, "gpuGroups"),
        ({"volumes": {"runs": {"accessMode": "RWX"}}}, "accessMode"),
        ({"ray": {"cpuGroup": {"minNodes": 5, "maxNodes": 4}}}, "minNodes"),
        ({"volumes": {"cache": {"enabled": "yes"}}}, "enabled"),
        ({"ray": {"gpuGroups": [GROUP | {"capabilities": ["ipc_lock"]}]}}, "capabilities"),
        ({"ray": {"gpuGroups": [GROUP | {"hostNetwork": "yes"}]}}, "hostNetwork"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"gateway": {"enabled": True}}, "gateway.parents"),
    ],
)
def test_wrong_values_are_named(refusal: Callable[[dict[str, Any]], str], values: dict[str, Any], named: str) -> None:
    assert named in refusal(values)


def test_without_kuberay_the_message_says_how_to_install_it() -> None:
    done = helm("template", "r", str(CHART), "--kube-version", "1.34.0")
    assert done.returncode != 0
    assert "helm install kuberay-operator" in done.stderr


def test_the_values_of_the_chart_fit_its_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    jsonschema.validate(yaml.safe_load(text), json.loads((CHART / "values.schema.json").read_text()))


def test_monitoring_is_complete_when_it_is_wanted(render: Render) -> None:
    objects = render({}, FILES[0])
    (rule,) = of_kind(objects, "PrometheusRule")
    alerts = [one["alert"] for group in rule["spec"]["groups"] for one in group["rules"]]
    assert len(alerts) == 7
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"] == {
        "name": "r-rlhfless-api-key",
        "key": "api-key",
    }
    assert json.loads(of_kind(objects, "ConfigMap")[0]["data"]["rlhfless.json"])["panels"]


def test_worker_pods_leave_in_order_within_their_grace_period(render: Render) -> None:
    objects = render({}, FILES[0])
    for name, spec in pods(objects).items():
        if name == "head" or name.startswith(("Deployment/", "Pod/")):
            continue
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "rlhfless.fleet.leave_node", "105"]
        assert spec["terminationGracePeriodSeconds"] == 120


def test_the_right_to_list_nodes_is_asked_for_only_where_it_is_used(render: Render) -> None:
    def arguments(objects: list[dict[str, Any]]) -> list[str]:
        found: list[str] = pods(objects)["Deployment/r-rlhfless"]["containers"][0]["args"]
        return found

    plain = render({})
    assert not of_kind(plain, "ClusterRole")
    assert "--watch-nodes" not in arguments(plain)
    watching = render({"controlPlane": {"watchNodes": True}})
    (role,) = of_kind(watching, "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    (bound,) = of_kind(watching, "ClusterRoleBinding")
    assert bound["roleRef"]["name"] == role["metadata"]["name"]
    assert "--watch-nodes" in arguments(watching)


def test_its_default_image_is_of_this_version():
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == rlhfless.__version__


def test_the_self_test_is_a_job_of_the_ray_cluster_which_only_it_and_the_control_plane_reach(render: Render) -> None:
    objects = render({"networkPolicy": {"enabled": True}}, FILES[0])
    (container,) = pods(objects)["Pod/r-rlhfless-selftest"]["containers"]
    head = "http://r-rlhfless-ray-head-svc.space:8265"
    assert [*container["command"], *container["args"]] == [
        *("ray", "job", "submit", "--address", head, "--"),
        *("rlhfless", "selftest", "--ray-address", "auto"),
    ]
    policies = {one["metadata"]["name"]: one["spec"]["ingress"] for one in of_kind(objects, "NetworkPolicy")}
    (rule,) = policies["r-rlhfless-selftest"]
    (source,) = rule["from"]
    assert rule["ports"] == [{"port": 8265}]
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "selftest"
    without = render({"networkPolicy": {"enabled": False}}, FILES[0])
    assert not of_kind(without, "NetworkPolicy")


def test_gpu_groups_with_the_same_resource_cannot_take_each_others_nodes() -> None:
    for file in FILES:
        groups = yaml.safe_load((CHART / file).read_text()).get("ray", {}).get("gpuGroups", [])
        for one, other in itertools.combinations(groups, 2):
            if one["resourceName"] == other["resourceName"]:
                chosen = [set(group.get("nodeSelector", {}).items()) for group in (one, other)]
                differing = {key for key, _ in chosen[0] ^ chosen[1]}
                assert differing & dict(chosen[0]).keys() & dict(chosen[1]).keys(), (file, one["name"], other["name"])


def test_the_gpu_image_finds_a_driver_that_the_node_mounts() -> None:
    image = (CHART.parents[1] / "images" / "gpu.Dockerfile").read_text()
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64" in image
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in image
    assert "/usr/local/nvidia/bin" in image
