"""Writes the table of recipes into recipes/README.md, between its two markers, from the recipes and their plans.

Run it after a change of a recipe, of the planner or of prices; `--check` only says whether the page is up to date (exit
code 1 if not).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from marked_page import write_part
from typer.testing import CliRunner

from rlhfless.cli.init import notes_of, recipes, summary_of
from rlhfless.cli.main import app
from rlhfless.telemetry.terminal import clock, money

PAGE = Path(__file__).parents[1] / "recipes" / "README.md"
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"


def table() -> str:
    """One row per recipe, with the run's time and cost by `rlhfless plan`."""
    head = "| recipe | | devices | time, by the plan | cost, by the plan |\n|---|---|---|--:|--:|"
    return "\n".join([head, *_rows(), ""])


def _rows() -> Iterator[str]:
    for name, text in recipes().items():
        notes = notes_of(text)
        options = ["--devices", notes["devices"], *notes.get("plan", "").split(), "--json"]
        done = CliRunner().invoke(app, ["plan", str(PAGE.parent / f"{name}.yaml"), *options], catch_exceptions=False)
        plan = json.loads(done.stdout)
        if not plan["fits"]:
            raise SystemExit(f"{name} does not fit on {notes['devices']}: {plan['problems']}")
        predicted = plan["predicted"]
        summary = summary_of(text).rstrip(".")
        row = (f"[{name}]({name}.yaml)", summary, notes["devices"])
        yield f"| {' | '.join(row)} | {clock(predicted['wall_s'])} | {money(predicted['cost_usd'])} |"


if __name__ == "__main__":
    sys.exit(write_part(PAGE, BEGIN, END, table()))
