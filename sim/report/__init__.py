"""The report of a comparison: summary, pictures, one page, and a trace for Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlhfless.sim.experiment.compare import PolicyComparison
from rlhfless.sim.report.charts import write_png
from rlhfless.sim.report.page import page
from rlhfless.sim.report.perfetto import trace_events
from rlhfless.sim.report.pictures import pictures
from rlhfless.sim.report.summary import summary
from rlhfless.sim.scenarios.load import resolved_yaml


def write_report(comparison: PolicyComparison, folder: str | os.PathLike[str], step: int | None = None) -> None:
    """Writes everything into a folder, which is made if it is missing: scenario.yaml, summary.json, report.html, a PNG
    per picture, and a Perfetto trace per policy. Raises ValueError for an unknown step, OSError."""
    folder = Path(folder)
    drawn = pictures(comparison, step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.yaml").write_text(resolved_yaml(comparison.scenario), "utf-8")
    (folder / "summary.json").write_text(json.dumps(summary(comparison), indent=1) + "\n", "utf-8")
    (folder / "report.html").write_text(page(comparison, drawn), "utf-8")
    for name, figure in drawn.by_name.items():
        write_png(figure, folder / f"{name}.png")
    for label, runs in comparison.results.items():
        if runs[0].trace is not None:
            events = json.dumps(trace_events(runs[0].trace), separators=(",", ":"))
            (folder / f"perfetto-{label}.json").write_text(events, "utf-8")
