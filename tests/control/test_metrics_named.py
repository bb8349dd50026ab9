"""What alerts and panels of the chart ask Prometheus for is what the service tells it."""

from __future__ import annotations

import re
from pathlib import Path

from fakes.fake_service import RUN, NoDrivers, served, there_is_ray
from fakes.repository import ROOT
from rlhfless.control.settings import ServiceSettings
from rlhfless.telemetry.metrics import METRICS

FILES = ROOT / "deploy" / "helm" / "rlhfless" / "files"


def test_alerts_and_panels_use_metrics_that_exist(tmp_path: Path) -> None:
    there_is_ray(tmp_path)
    with served(ServiceSettings(data=str(tmp_path)), NoDrivers()) as (client, _):
        assert client.post("/v1/runs", json=RUN).status_code == 201
        told = set(re.findall(r"^(?:# TYPE )?(rlhfless_\w+)", client.get("/metrics").text, flags=re.MULTILINE))
    told |= {metric.prometheus_name for metric in METRICS.values()}
    for file in ("rules.yaml", "dashboard.json"):
        used = set(re.findall(r"\brlhfless_[a-z_]+", (FILES / file).read_text()))
        assert used
        assert used <= told, used - told
