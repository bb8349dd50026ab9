"""The chart with helm alone; on a cluster see test_cluster.py."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from charts import CHART, CRD, Render, helm, tool


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders the chart with values (and files of values); objects in their order."""
    folder = tmp_path_factory.mktemp("values")

    def objects(values: dict[str, Any] | None = None, *files: str, wanted: bool = True) -> list[dict[str, Any]]:
        own = folder / "own.yaml"
        own.write_text(json.dumps(values or {}))
        words = [word for file in files for word in ("-f", str(CHART / file))]
        done = helm(
            "template",
            "r",
            str(CHART),
            "-n",
            "space",
            "--kube-version",
            "1.34.0",
            "--api-versions",
            CRD,
            *words,
            "-f",
            str(own),
        )
        assert done.returncode == 0, done.stderr
        return [found for found in yaml.safe_load_all(done.stdout) if found]

    return objects


@pytest.fixture(scope="session")
def refusal() -> Callable[[dict[str, Any]], str]:
    """What helm says to values that are wrong."""

    def said(values: dict[str, Any]) -> str:
        done = subprocess.run(
            [tool("helm"), "template", "r", str(CHART), "--kube-version", "1.34.0", "--api-versions", CRD, "-f", "-"],
            input=json.dumps(values), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode != 0
        return done.stderr

    return said
