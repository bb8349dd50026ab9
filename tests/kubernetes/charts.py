"""helm, and the chart."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "rlhfless"
CRD = "ray.io/v1/RayCluster"

Render = Callable[..., list[dict[str, Any]]]


TOOLS = {
    "helm": "go install helm.sh/helm/v3/cmd/helm@v3.22.0",
    "promtool": "Debian: prometheus",
    "kubectl": "comes with a Kubernetes",
}
"""How to get each."""


def tool(name: str) -> str:
    """A program; the test is skipped where it is not installed."""
    local = Path(os.environ.get("KUBE_CACHE", Path.home() / ".cache" / "local-kube")) / "bin" / name
    found = shutil.which(name) or (str(local) if local.exists() else None)
    if found is None:
        pytest.skip(f"{name} is not installed ({TOOLS[name]}): the chart is not tested with it")
    return found


def helm(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *words], capture_output=True, text=True, timeout=timeout_s)
