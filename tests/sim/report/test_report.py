"""A whole comparison of a tiny scenario: the same whatever the processes, and everything that is written of it."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from fakes.tiny_scenario import scenario, values
from rlhfless.cli.main import app
from rlhfless.sim.experiment.compare import NO_HEARTBEATS_S, PolicyComparison, compare
from rlhfless.sim.experiment.figures import objective
from rlhfless.sim.report import summary, write_report
from rlhfless.sim.report.page import _pareto
from rlhfless.sim.report.perfetto import trace_events
from rlhfless.sim.report.verdict import contract_text
from rlhfless.sim.scenarios import Scenario
from rlhfless.sim.statistics import Interval
from rlhfless.spec import WeightedSpec
from rlhfless.spec.errors import InputError

DRAWN = re.compile(r"""(?:src|href|url|@import)\s*[=(](?!["']?#)""", re.IGNORECASE)
"""A reference to anything outside the page itself."""


@pytest.fixture(scope="module")
def comparison() -> PolicyComparison:
    return compare(scenario())


@pytest.fixture(scope="module")
def folder(comparison: PolicyComparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "tiny"
    write_report(comparison, folder)
    return folder


class Tags(HTMLParser):
    """Counts tags, and checks that they close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_same_seeds_give_the_same_summary_in_any_number_of_processes(comparison: PolicyComparison) -> None:
    told: list[tuple[int, int]] = []
    again = compare(scenario(), jobs=2, on_progress=lambda done, total: told.append((done, total)))
    assert json.dumps(summary(again)) == json.dumps(summary(comparison))
    steps = 4 * 2 * (3 + 3)  # per seed: three policies, and the three static fleets of two devices
    assert {total for _, total in told} == {steps}
    assert told == sorted(told)
    assert (told[0], told[-1]) == ((0, steps), (steps, steps))


def test_policies_of_one_seed_drew_the_same_lengths(comparison: PolicyComparison) -> None:
    drawn = {
        tuple(step.response_tokens for step in runs[seed].steps)
        for runs in comparison.results.values()
        for seed in range(2)
    }
    assert len(drawn) == 2


def test_bounds_bound_and_the_best_fleet_is_no_worse(comparison: PolicyComparison) -> None:
    rows = {row.label: row for row in comparison.rows("later")}
    assert rows["static_colocated"].speed_up.mean == 1.0
    assert rows["clairvoyant"].regret is not None
    assert rows["clairvoyant"].regret.mean == 0.0
    for mine, other in zip(
        comparison.totals("best_static", "later"), comparison.totals("static_colocated", "later"), strict=True
    ):
        assert objective(WeightedSpec(), mine, other) <= 1.0
    for row in rows.values():
        held = row.busy_device_s.mean + row.idle_device_s.mean + row.cold_device_s.mean
        assert 0 < held <= 2 * row.step_s.mean * (1 + 1e-9)


def test_relative_contracts_are_measured_by_runs_of_the_same_seed() -> None:
    limit = {"type": "cheapest", "deadline": {"times": 2.0, "policy": "static_colocated"}, "per": "run"}
    found = compare(scenario(contract=limit, policies=[{"name": "static_colocated"}, {"name": "cost_aware"}]))
    for mine, other in zip(found.results["cost_aware"], found.results["static_colocated"], strict=True):
        assert mine.steps[0].limit == pytest.approx(2 * other.time_s / 4)
        assert sum(step.time_s for step in other.steps) < 4 * (other.steps[0].limit or 0.0)


def test_faults_of_policies_and_settings_are_told() -> None:
    with pytest.raises(InputError, match=r"'cost_awre' is no policy\n    did you mean `cost_aware`\?"):
        compare(scenario(policies=[{"name": "cost_awre"}]))
    with pytest.raises(InputError, match=r"actorz: unknown key\n    did you mean `actors`\?"):
        compare(scenario(policies=[{"name": "static", "settings": {"actorz": 2}}]))
    with pytest.raises(InputError, match=r"'clairvoyan' is not one of them\n    did you mean `clairvoyant`\?"):
        compare(scenario(), ["clairvoyan"])


def test_the_page_is_whole_and_asks_no_server(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.count["table"] == 3
    assert tags.count["svg"] == 1
    assert not DRAWN.search(page)
    assert not {"script", "link", "img", "iframe"} & set(tags.count)
    for label in ("static_colocated", "best_static", "clairvoyant"):
        assert f"<td>{label}</td>" in page


def test_the_picture_has_a_dot_for_each_policy_and_its_text_is_escaped(comparison: PolicyComparison) -> None:
    rows = comparison.rows("later")
    wide = Interval(1.0, -2.0, 4.0)  # an interval may reach below 0, where no cost can be
    odd = [dataclasses.replace(rows[0], label=label, step_usd=wide, step_s=wide) for label in ("1 < 2 & 3", '"<x>"')]
    elements = list(ElementTree.fromstring(_pareto([*rows, *odd])).iter())
    assert sum(element.tag == "circle" for element in elements) == len(rows) + 2
    assert {"1 < 2 & 3", '"<x>"', *(row.label for row in rows)} <= {element.text for element in elements}
    assert all(float(each) >= 0 for element in elements for each in re.findall(r"-?[0-9.]+", element.get("d", "")))


def test_the_summary_holds_every_step(folder: Path) -> None:
    read = json.loads((folder / "summary.json").read_text())
    assert read["quoted_part"] == "later"
    assert {row["label"] for row in read["parts"]["first"]} == set(read["policies"])
    runs = read["policies"]["best_static"]["runs"]
    assert [len(run["steps"]) for run in runs] == [4, 4]
    assert all("devices" in run["fleet"] for run in runs)


def test_the_perfetto_trace_is_one(folder: Path, comparison: PolicyComparison) -> None:
    read = json.loads((folder / "perfetto-static_colocated.json").read_text())
    events = read["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= named
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    trace = comparison.results["static_colocated"][0].trace
    assert trace is not None
    assert len(spans) == len(trace.holdings) + len(trace.invocations) + len(trace.steps)
    worked_us = sum(event["dur"] for event in spans if event["name"] == "learn")
    assert worked_us == pytest.approx(1e6 * sum(c.duration_s for c in trace.invocations if c.work == "learn"))


def test_contracts_in_words() -> None:
    def words(**values: object) -> str:
        return contract_text(scenario(contract=values).contract)

    measure = {"times": 1.5, "policy": "a"}
    assert words(type="cheapest", deadline=measure, per="run").endswith("in at most 1.5 x the time of a over the run")
    assert words(type="cheapest", deadline_s=30).endswith("in at most 30 s in each step")
    assert words(type="fastest", budget=measure).endswith("for at most 1.5 x the cost of a in each step")
    assert words(type="fastest", budget_usd=2, per="run").endswith("for at most $2 over the run")
    assert words(type="weighted", time_weight=0.25) == "time weighs 0.25, cost 0.75"


def test_a_static_fleet_runs_the_same_without_beats() -> None:
    watched = scenario(policies=[{"name": "static", "label": "best_static"}], heartbeat_s=0.05)
    again = scenario(policies=[{"name": "static", "label": "best_static"}], heartbeat_s=NO_HEARTBEATS_S)
    first, second = (compare(each).results["best_static"][0] for each in (watched, again))
    assert [step.time_s for step in first.steps] == pytest.approx([step.time_s for step in second.steps], rel=1e-9)
    assert first.usd == pytest.approx(second.usd, rel=1e-9)


def test_a_critics_work_is_named_in_a_trace() -> None:
    compared = compare(scenario(critic={}, reference={"devices": 1}, seeds=1, policies=[{"name": "static_colocated"}]))
    slices = {event["name"] for event in trace_events(compared.results["static_colocated"][0].trace)["traceEvents"]}
    assert {"critic values", "critic learn", "learn", "reference"} <= slices


def test_a_policy_that_does_not_fit_the_schedule_is_named() -> None:
    apart = {"schedule": "one_step_off", "placement": {"mode": "disaggregated"}}
    with pytest.raises(InputError, match="static_colocated is placed co-located, and schedule one_step_off overlaps"):
        compare(scenario(**apart, policies=[{"name": "static_colocated"}]))
    plain = {key: value for key, value in values(**apart).items() if key != "policies"}
    names = [entry.name for entry in Scenario.model_validate(plain).policies]
    assert "static_colocated" not in names
    assert {"static_disaggregated", "cost_aware", "best_static"} <= set(names)


def test_a_pipe_gets_all_columns(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(values(seeds=1)))
    ran = CliRunner().invoke(app, ["simulate", str(path), "--out", str(tmp_path / "out")], env={"COLUMNS": "80"})
    assert ran.exit_code == 0
    assert "regret" in ran.output
    assert "above the clairvoyant" in ran.output.replace("\n", " ")
