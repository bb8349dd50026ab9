"""What a cluster of this machine alone, without a registry, needs to run the chart: the CPU image, which is packed from
its content (.ci/image) and loaded as IMAGE, and folders for data.

    python tests/kubernetes/environment.py NAMESPACE RELEASE FOLDER > values.yaml

makes the namespace, volumes and claims, and prints values. Elsewhere RLHFLESS_TEST_VALUES names a file of values, with
an image that has rlhfless.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from charts import tool

IMAGE = ("localhost/rlhfless", "cpu")
USER = 1000
STAND_INS = Path(__file__).with_name("stand_ins")
DATA = ("data", "runs")


def kubectl(*words: str, given: str | None = None, check: bool = True, timeout_s: float = 120) -> str:
    done = subprocess.run([tool("kubectl"), *words], input=given, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


def volume(namespace: str, name: str, claim: str, path: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def made(namespace: str, release: str, folder: Path) -> dict[str, Any]:
    """Make namespace, volumes and claims; returns values. The chart makes the claims of data and runs itself."""
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    ]
    objects.append(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "stand-ins", "namespace": namespace},
            "data": {path.name: path.read_text() for path in STAND_INS.glob("*.py")},
        }
    )
    for name in DATA:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, USER, USER)
        objects.append(volume(namespace, name, f"{release}-{name}", path))
    kubectl("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    stand_ins = "/opt/stand-ins"
    return {
        "image": {"repository": IMAGE[0], "tag": IMAGE[1], "pullPolicy": "Never"},
        "extraEnv": [
            {"name": "PATH", "value": "/opt/rlhfless/venv/bin:/usr/bin:/bin"},  # as the Dockerfile sets it
            {"name": "PYTHONPATH", "value": stand_ins},
        ],
        "extraVolumes": [{"name": "stand-ins", "configMap": {"name": "stand-ins"}}],
        "extraVolumeMounts": [{"name": "stand-ins", "mountPath": stand_ins, "readOnly": True}],
    }


def removed(namespace: str) -> None:
    """Remove what `made` has made."""
    kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=true", timeout_s=300, check=False)
    names = [f"{namespace}-{name}" for name in DATA]
    kubectl("delete", "pv", *names, "--ignore-not-found", check=False)


if __name__ == "__main__":
    yaml.safe_dump(made(sys.argv[1], sys.argv[2], Path(sys.argv[3])), sys.stdout)
