"""The report of a comparison: a summary, one page, and a trace for Perfetto."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.figures import Part
from rlhfless.sim.report.page import page
from rlhfless.sim.report.perfetto import trace_events
from rlhfless.sim.report.verdict import verdict
from rlhfless.sim.scenarios.load import resolved_yaml
from rlhfless.sim.statistics import CONFIDENCE


def write_report(comparison: PolicyComparison, folder: str | os.PathLike[str]) -> None:
    """Write scenario.yaml, summary.json, report.html and a Perfetto trace per policy to a folder. Raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.yaml").write_text(resolved_yaml(comparison.scenario), "utf-8")
    (folder / "summary.json").write_text(json.dumps(summary(comparison), indent=1) + "\n", "utf-8")
    (folder / "report.html").write_text(page(comparison), "utf-8")
    for label, runs in comparison.results.items():
        if runs[0].trace is not None:
            events = json.dumps(trace_events(runs[0].trace), separators=(",", ":"))
            (folder / f"perfetto-{label}.json").write_text(events, "utf-8")


SUMMARY_VERSION = 2
"""Raised with any change of a key's name, unit or meaning."""


def summary(comparison: PolicyComparison) -> dict[str, Any]:
    """Return the summary as plain values.

    Equal scenarios and seeds give equal values, on any machine and with any number of jobs.
    """
    scenario = comparison.scenario
    parts: list[Part] = ["all", "first", "later"] if quoted_part(scenario) == "later" else ["all"]
    return {
        "summary_version": SUMMARY_VERSION,
        "scenario": scenario.model_dump(mode="json"),
        "confidence": CONFIDENCE,
        "quoted_part": quoted_part(scenario),
        "verdict": verdict(comparison),
        "parts": {part: [asdict(row) for row in comparison.rows(part)] for part in parts},
        "policies": {
            label: {
                "contract": [contract.model_dump(mode="json") for contract in comparison.contracts[label]],
                "runs": [
                    {
                        "seed": run.seed,
                        "fleet": str(run.fleet),
                        "infeasible": {str(step): reason for step, reason in run.infeasible.items()},
                        "unused_devices": dict(run.unused),
                        "steps": [asdict(step) for step in run.steps],
                    }
                    for run in runs
                ],
            }
            for label, runs in comparison.results.items()
        },
    }
