"""What a cluster of this machine alone, without a registry, needs to run the chart: this checkout and its virtual
environment as volumes of a small image, and folders for data.

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

IMAGE = ("localhost/base", "12")
ROOT = Path(__file__).parents[2]
USER = 1000


def kubectl(*words: str, given: str | None = None, check: bool = True, timeout_s: float = 120) -> str:
    done = subprocess.run([tool("kubectl"), *words], input=given, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


def read_only() -> dict[str, Path]:
    """Folders of this machine by name: the virtual environment, its interpreter, and the code."""
    venv = Path(sys.prefix)
    home = next(line for line in (venv / "pyvenv.cfg").read_text().splitlines() if line.startswith("home"))
    return {"venv": venv, "python": Path(home.partition("=")[2].strip()).parent, "code": ROOT}


def volume(namespace: str, name: str, claim: str, path: Path, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": [mode],
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def claim(namespace: str, name: str, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": [mode],
            "volumeName": f"{namespace}-{name}",
            "storageClassName": "",
            "resources": {"requests": {"storage": "1Gi"}},
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
    for name, path in read_only().items():
        objects += [volume(namespace, name, name, path, "ReadOnlyMany"), claim(namespace, name, "ReadOnlyMany")]
    for name in ("data", "runs"):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, USER, USER)
        objects.append(volume(namespace, name, f"{release}-{name}", path, "ReadWriteOnce"))
    kubectl("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    mounts = [{"name": name, "mountPath": str(path), "readOnly": True} for name, path in read_only().items()]
    return {
        "image": {"repository": IMAGE[0], "tag": IMAGE[1], "pullPolicy": "Never"},
        "extraEnv": [
            {"name": "PATH", "value": f"{sys.prefix}/bin:/usr/bin:/bin"},
            {"name": "PYTHONPATH", "value": os.pathsep.join([str(Path(__file__).parent / "stand_ins"), str(ROOT)])},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "extraVolumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}} for name in read_only()
        ],
        "extraVolumeMounts": mounts,
    }


def removed(namespace: str) -> None:
    """Remove what `made` has made."""
    kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=true", timeout_s=300, check=False)
    names = [f"{namespace}-{name}" for name in (*read_only(), "data", "runs")]
    kubectl("delete", "pv", *names, "--ignore-not-found", check=False)


if __name__ == "__main__":
    yaml.safe_dump(made(sys.argv[1], sys.argv[2], Path(sys.argv[3])), sys.stdout)
