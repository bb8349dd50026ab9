"""What a reader of a report and of its errors sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fakes.tiny_scenario import scenario, values
from rlhfless.cli.main import app
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.report.charts import DOT, ParetoPoint, pareto
from rlhfless.sim.report.pictures import pictures
from rlhfless.sim.scenarios import Scenario
from rlhfless.sim.statistics import Interval
from rlhfless.spec.errors import InputError


def test_a_policy_that_does_not_fit_the_schedule_is_named() -> None:
    apart = {"schedule": "one_step_off", "placement": {"mode": "disaggregated"}}
    with pytest.raises(InputError, match="static_colocated is placed co-located, and schedule one_step_off overlaps"):
        compare(scenario(**apart, policies=[{"name": "static_colocated"}]))
    plain = {key: value for key, value in values(**apart).items() if key != "policies"}
    names = [entry.name for entry in Scenario.model_validate(plain).policies]
    assert "static_colocated" not in names
    assert {"static_disaggregated", "cost_aware", "best_static"} <= set(names)


def test_error_bars_end_at_0_and_no_dot_hides_another() -> None:
    wide = Interval(1.0, -2.0, 4.0)
    points = [
        ParetoPoint("first", wide, wide),
        ParetoPoint("second", wide, wide),
        ParetoPoint("far", *[Interval(9, 9, 9)] * 2),
    ]
    axes = pareto(points, "title").axes[0]
    bars = [segment for lines in axes.collections for segment in lines.get_segments()]
    assert min(point.min() for point in bars) == 0.0
    sizes = [line.get_markersize() for line in axes.lines if line.get_marker() == "o"]
    assert sizes == [pytest.approx(1.6 * DOT), DOT, DOT]


def test_a_gantt_has_its_deadline_and_says_what_pale_rows_are() -> None:
    contract = {"type": "cheapest", "deadline_s": 50.0}
    entries = [{"name": "static_colocated"}, {"name": "cost_aware", "contract": {"type": "weighted"}}]
    drawn = pictures(compare(scenario(contract=contract, policies=entries, seeds=1)))
    with_deadline, without = (drawn.gantts[label] for label in ("static_colocated", "cost_aware"))
    told = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in (with_deadline, without)]
    assert {"asleep", "without weights", "held, idle"} <= set(told[0])
    assert "deadline" in told[0]
    assert "deadline" not in told[1]
    assert [line.get_xdata()[0] for line in with_deadline.axes[0].lines] == [50.0]


def test_a_pipe_gets_all_columns(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(values(seeds=1)))
    ran = CliRunner().invoke(app, ["simulate", str(path), "--out", str(tmp_path / "out")], env={"COLUMNS": "80"})
    assert ran.exit_code == 0
    assert "regret" in ran.output
    assert "above the clairvoyant" in ran.output.replace("\n", " ")
