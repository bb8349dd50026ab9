"""The chart's alerts, with Prometheus's own tool: each fires when it should, and stays silent otherwise."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import Render, tool

RUN = '{run_id="run_1", run="mine"}'
WORKING = '{run_id="run_1", run="mine", status="running"}'
HOUR = 60
"""Samples, one a minute."""


def series(name: str, values: str) -> dict[str, str]:
    return {"series": name, "values": values}


def constant(value: float) -> str:
    return f"{value:g}x{2 * HOUR}"


def rising(by: float) -> str:
    return f"0+{by:g}x{2 * HOUR}"


FIRES: dict[str, list[dict[str, str]]] = {
    "RlhflessDown": [series("rlhfless_ray_up", constant(0))],
    "RlhflessRunStuck": [
        series(f"rlhfless_run_status_since_seconds{WORKING}", constant(0)),
        series(f"rlhfless_step{RUN}", constant(7)),
    ],
    "RlhflessReplicasFlapping": [
        series(f"rlhfless_cold_starts{RUN}", rising(2)),
        series(f"rlhfless_step{RUN}", rising(0.1)),
    ],
    "RlhflessDriversDie": [series(f"rlhfless_run_attempts{RUN}", rising(0.2))],
    "RlhflessWeightsDiffer": [series(f"rlhfless_rollout_logprob_difference_nats{RUN}", constant(0.4))],
    "RlhflessNoCapacity": [series('rlhfless_devices_wanted{kind="h100"}', constant(8))],
    "RlhflessCostOverBudget": [series(f"rlhfless_run_cost_usd_total{RUN}", rising(5))],
}

HEALTHY = [
    series("rlhfless_ray_up", constant(1)),
    series(f"rlhfless_run_status_since_seconds{WORKING}", constant(0)),
    series(f"rlhfless_step{RUN}", rising(1)),
    series(f"rlhfless_cold_starts{RUN}", rising(1)),
    series(f"rlhfless_run_attempts{RUN}", constant(1)),
    series(f"rlhfless_rollout_logprob_difference_nats{RUN}", constant(0.01)),
    series('rlhfless_devices_wanted{kind="h100"}', constant(0)),
    series(f"rlhfless_run_cost_usd_total{RUN}", rising(1)),
]


@pytest.fixture(scope="module")
def rules(render: Render, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules as Prometheus reads them, with a budget of 200 USD per hour."""
    (rule,) = (one for one in render({}, "values-gpu-cluster.yaml") if one["kind"] == "PrometheusRule")
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    return file


def promtool(*words: str) -> str:
    done = subprocess.run([tool("promtool"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fired(rules: Path, input_series: list[dict[str, str]], alert: str, expected: list[dict[str, Any]]) -> None:
    case = {
        "interval": "1m",
        "input_series": input_series,
        "promql_expr_test": [
            {"expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)', "eval_time": "110m",
             "exp_samples": [{"labels": "{}", "value": len(expected)}]}
        ],
    }  # fmt: skip
    file = rules.with_name(f"{alert}.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", str(file))


def test_rules_are_correct(rules: Path) -> None:
    assert f"{len(FIRES)} rules found" in promtool("check", "rules", str(rules))


@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires(rules: Path, alert: str) -> None:
    fired(rules, FIRES[alert], alert, [{}])


@pytest.mark.parametrize("alert", FIRES)
def test_a_healthy_service_is_silent(rules: Path, alert: str) -> None:
    fired(rules, HEALTHY, alert, [])
