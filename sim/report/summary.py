"""A comparison as JSON: every figure of the table for each part of the run, and every step of every run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.rows import Part
from rlhfless.sim.report.verdict import verdict
from rlhfless.sim.statistics import CONFIDENCE

SUMMARY_VERSION = 2
"""Raised with any change of a key's name, unit or meaning."""


def summary(comparison: PolicyComparison) -> dict[str, Any]:
    """The summary as plain values. Equal scenarios and seeds give equal values, on any machine, with any number of
    jobs."""
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
                        "infeasible": list(run.infeasible),
                        "steps": [asdict(step) for step in run.steps],
                    }
                    for run in runs
                ],
            }
            for label, runs in comparison.results.items()
        },
    }
