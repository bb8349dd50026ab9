"""`rlhfless simulate`, as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from fakes.recorded_run import record
from fakes.tiny_scenario import values
from rlhfless.cli import main
from rlhfless.cli.simulate_progress import Estimates
from rlhfless.sim.scenarios import load_scenario


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main.app, ["simulate", *(str(argument) for argument in arguments)])


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values(steps=2)))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    record(folder / "trace", actors=2, steps=4)
    return folder


def test_a_comparison_is_shown_and_written(scenario: Path, tmp_path: Path) -> None:
    result = invoke(scenario, "--policies", "static_colocated,clairvoyant", "--seeds", 1, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "static_colocated" in result.stdout
    assert "best_static" not in result.stdout
    assert "1 seed: no interval." in result.stdout
    assert "simulating tiny: 2 policies, 1 seeds, runs of 2 steps, --jobs 1" in result.stderr
    written = {path.name for path in (tmp_path / "out" / "tiny").iterdir()}
    assert {"report.html", "summary.json", "scenario.yaml", "perfetto-clairvoyant.json"} <= written


def test_two_seeds_have_no_interval_and_the_best_static_fleet_is_named(scenario: Path, tmp_path: Path) -> None:
    result = invoke(scenario, "--policies", "static_colocated,best_static", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "2 seeds: no interval." in result.stdout
    assert re.search(r"^best_static: \d+ devices?, ", result.stdout, re.MULTILINE)
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("best_static ")][:1]
    assert len(row.split()) == 6, "means alone"
    page = (tmp_path / "out" / "tiny" / "report.html").read_text()
    assert "no intervals: too few seeds" in page


def test_the_time_that_is_left_is_said_soon_and_again_when_it_has_doubled() -> None:
    said: list[str] = []
    now_s = 0.0
    estimates = Estimates(said.append, lambda: now_s)
    estimates.progress(0, 101)
    now_s = 2.0
    estimates.progress(1, 101)
    assert said == []
    now_s = 3.0
    estimates.show_if_new()  # by the clock: the second step takes longer
    now_s = 4.0
    estimates.progress(2, 101)
    estimates.progress(2, 101)
    now_s = 42.0
    estimates.progress(21, 101)  # 2 s each, as foreseen
    now_s = 600.0
    estimates.progress(22, 101)
    assert said == [
        "1 of 101 steps in 3 s: too few for an estimate, which follows",
        "2 of 101 steps in 4 s: about 3:18 left",
        "22 of 101 steps in 10:00: about 37:30 left",
    ]


def test_a_contract_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    path, limit = tmp_path / "tiny.yaml", {"type": "cheapest", "deadline_s": 0.01, "per": "step"}
    names = ["static_colocated", "cost_aware"]
    path.write_text(yaml.safe_dump(values(contract=limit, seeds=1, policies=[{"name": name} for name in names])))
    result = invoke(path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    said = "cost_aware: 4 of 4 steps did not keep the contract; for 4 of them no plan could by its forecast"
    assert said in " ".join(result.stdout.split())
    assert said in (tmp_path / "out" / "tiny" / "report.html").read_text()
    runs = json.loads((tmp_path / "out" / "tiny" / "summary.json").read_text())["policies"]
    assert [len(runs[name]["runs"][0]["infeasible"]) for name in names] == [0, 4]


def test_several_runs_on_one_cluster(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values(policies=[{"name": "static"}], steps=2)))
    result = invoke(path, "--runs", "2")
    assert result.exit_code == 0, result.output
    assert "one after the other" in result.stdout
    assert "all devices, in turns" in result.stdout
    assert "1.00" in result.stdout
    assert not (tmp_path / "simulations").exists()


def test_runs_that_come_and_go(tmp_path: Path) -> None:
    path, file = tmp_path / "tiny.yaml", tmp_path / "runs.csv"
    path.write_text(yaml.safe_dump(values(policies=[{"name": "static"}], steps=2)))
    result = invoke(path, "--arrivals", "poisson:0.3,0.6", "--runs", "20", "--run-steps", "4,8")
    assert result.exit_code == 0, result.output
    assert "20 runs of 4,8 steps, 60 s a change" in result.stdout
    assert re.search(r"^load 0.3 .*\nload 0.6 ", result.stdout, re.MULTILINE)
    file.write_text("at_s,steps\n0,4\n")
    result = invoke(path, "--arrivals", file)
    assert result.exit_code == 0, result.output
    assert "All have ended 1.00 times as soon" in result.stdout
    for text, wrong in (
        ("poisson:much", "'much' has no numbers"),
        ("poisson:3", "at most 2"),
        ("none.csv", "cannot be read"),
    ):
        result = invoke(path, "--arrivals", text)
        assert result.exit_code
        assert wrong in " ".join((result.output + str(result.exception)).split())
    assert invoke(path, "--runs", "9").exit_code == 2


def test_a_recorded_run_is_a_workload_by_its_own_folder(run: Path, tmp_path: Path) -> None:
    path, entry = tmp_path / "tiny.yaml", [{"name": "static"}]
    recorded = values(workload={"type": "recorded", "path": str(run)}, policies=entry, seeds=1, engine={})
    held = {"prompts_per_step": 16, "samples_per_prompt": 4, "max_tokens": 112, "steps": 4}
    path.write_text(yaml.safe_dump({key: value for key, value in recorded.items() if key not in held}))
    result = invoke(path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    scenario = load_scenario(path)
    assert scenario.model_dump(include=set(held)) == held
    assert (scenario.engine.max_sequences, scenario.engine.max_batch_tokens) == (256, 8192)
    path.write_text(yaml.safe_dump({**recorded, **held, "steps": 3, "engine": {"max_sequences": 8}}))
    asked = load_scenario(path)
    assert (asked.steps, asked.engine.max_sequences, asked.engine.max_batch_tokens) == (3, 8, 8192)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.yaml"], "nowhere.yaml: 1 problem\n- no such file"),
        ([], "no scenario file was given"),
        (["--calibrate"], "no folder of a recorded run was given"),
        (["--replay", "nowhere"], "name the folder of a run, or the `trace` in it"),
        (["a.yaml", "--replay", "nowhere"], "--replay takes no scenario, got a.yaml"),
    ],
)
def test_faults_are_one_message_and_exit_code_2(arguments: list[str], told: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert told in " ".join(result.stderr.split("\u2502")) or told in result.stderr


def test_a_policy_that_is_not_there(scenario: Path, run: Path) -> None:
    result = invoke(scenario, "--policies", "static_colocted")
    assert result.exit_code == 2
    assert "did you mean `static_colocated`?" in result.stderr
    result = invoke("--replay", run, "--policy", "statik")
    assert result.exit_code == 2
    assert "did you mean `static`?" in result.stderr


def test_a_run_is_calibrated_and_replayed(run: Path, tmp_path: Path) -> None:
    result = invoke("--calibrate", run, "--out", tmp_path / "latency.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'latency.yaml'}: fitted to 4 steps of demo-2\n"
    result = invoke("--replay", run, "--latency", tmp_path / "latency.yaml")
    assert result.exit_code == 0, result.output
    assert "as recorded; fitted to the file given" in result.stdout
    assert "KV memory of an actor  not in the trace: assumed to suffice" in result.stdout
    result = invoke("--replay", run, "--policy", "static", "--actors", 3, "--out", tmp_path / "replay.json")
    assert result.exit_code == 0, result.output
    assert "extrapolated to 3 actors, not measured" in " ".join(result.stdout.split())
    lines = result.stdout.splitlines()
    heads = [line.split() for line in lines if "as recorded" in line or "simulated" in line]
    assert ["static", "on", "3", "actors", "as", "recorded", "as", "recorded"] in heads
    assert ["seconds", "per", "step", "simulated", "simulated", "measured"] in heads, "what is measured stands apart"
    (row,) = [line.split() for line in lines if line.startswith("cost of all")]
    assert [cell[0] for cell in row[3:]] == ["$"] * 3
    assert lines[-1].startswith("static on 3 actors would take ")
    assert "of the run as recorded, both simulated; both plan the same in " in lines[-1]
    written = json.loads((tmp_path / "replay.json").read_text())
    assert written["as_recorded"]["policy"] == "as recorded"
    assert written["times"] < 1
    assert written["errors"][-1]["stage"] == "step"
    assert written["errors"][-1]["skill"] <= 1
    result = invoke("--replay", run, "--latency", tmp_path / "latency.yaml")
    assert "generation" in result.stdout
    assert "cost of these steps" in result.stdout
