"""A whole comparison of a tiny scenario: the same whatever the processes, and everything that is written of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from fakes.tiny_scenario import scenario
from rlhfless.sim.experiment.compare import NO_BEATS_S, PolicyComparison, compare
from rlhfless.sim.experiment.forecasts import length_forecasts
from rlhfless.sim.experiment.rows import objective
from rlhfless.sim.report import write_report
from rlhfless.sim.report.charts import ParetoPoint, pareto, svg
from rlhfless.sim.report.perfetto import trace_events
from rlhfless.sim.report.pictures import pictures
from rlhfless.sim.report.summary import summary
from rlhfless.sim.report.words import contract_text
from rlhfless.sim.scenarios.draw import batches
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
    assert tags.count["svg"] == 3 + 3
    assert not DRAWN.search(page)
    assert not {"script", "link", "img", "iframe"} & set(tags.count)
    for label in ("static_colocated", "best_static", "clairvoyant"):
        assert f"<td>{label}</td>" in page


def test_pictures_are_pictures(folder: Path, comparison: PolicyComparison) -> None:
    files = {path.stem for path in folder.glob("*.png")}
    assert {"pareto", "lengths", "forecasts", "gantt-static_colocated", "gantt-clairvoyant"} <= files
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            assert image.width == 1520
            assert len(image.convert("L").getcolors() or ()) > 8
    for figure in pictures(comparison).by_name.values():
        assert ElementTree.fromstring(svg(figure)).tag.endswith("svg")
    with pytest.raises(ValueError, match="the scenario has steps 1 to 4"):
        pictures(comparison, step=5)


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


def test_text_in_a_picture_is_escaped() -> None:
    one = Interval(1.0, 0.5, 2.0)
    drawn = svg(pareto([ParetoPoint("1 < 2 & 3", one, one), ParetoPoint('"<x>"', one, one)], "a < b"))
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    assert {"a < b", "1 < 2 & 3", '"<x>"'} <= set(texts)
    assert '"<x>": 1 s and $1 per step' in texts  # shown when the mouse is over the dot


def test_a_picture_is_the_same_every_time_it_is_drawn(comparison: PolicyComparison) -> None:
    first, second = (pictures(comparison).by_name for _ in range(2))
    assert {name: svg(figure) for name, figure in first.items()} == {name: svg(f) for name, f in second.items()}


def test_forecasts_are_better_than_the_mean_and_honest() -> None:
    one = scenario(prompts_per_step=8, samples_per_prompt=8, steps=12)
    found = length_forecasts(batches(one, 0), one.max_tokens)
    assert len(found.real_tokens) == 11 * 64
    assert found.mean_error < 0.8 * found.mean_error_of_mean
    assert found.rank_correlation is not None
    assert found.rank_correlation > 0.5
    assert np.all(np.diff(found.coverage) >= 0)
    with pytest.raises(ValueError, match="1 steps; forecasts need 2"):
        length_forecasts(batches(one, 0)[:1], one.max_tokens)


def test_a_static_fleet_runs_the_same_without_beats() -> None:
    watched = scenario(policies=[{"name": "static", "label": "best_static"}], beat_s=0.05)
    again = scenario(policies=[{"name": "static", "label": "best_static"}], beat_s=NO_BEATS_S)
    first, second = (compare(each).results["best_static"][0] for each in (watched, again))
    assert [step.time_s for step in first.steps] == pytest.approx([step.time_s for step in second.steps], rel=1e-9)
    assert first.usd == pytest.approx(second.usd, rel=1e-9)


def test_a_critics_work_is_named_in_gantt_charts() -> None:
    compared = compare(scenario(critic={}, reference={"devices": 1}, seeds=1, policies=[{"name": "static_colocated"}]))
    (figure,) = pictures(compared).gantts.values()
    tips = {str(bar.get_gid()).split(":")[1].split(" ", 2)[2] for bar in figure.axes[0].patches}
    assert {"critic values", "critic learn", "learn", "reference"} <= tips
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert {"critic values", "critic learn", "reference"} <= {*names}
    assert len(names) == len({*names})
    slices = {event["name"] for event in trace_events(compared.results["static_colocated"][0].trace)["traceEvents"]}
    assert {"critic values", "critic learn", "learn", "reference"} <= slices
