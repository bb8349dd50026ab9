"""Trackers of experiments, each without a network; none of them stops, delays or fails a run."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from rlhfless.spec import MlflowSpec, TrackerSpec, TrackioSpec, WandbSpec
from rlhfless.spec.errors import InputError
from rlhfless.telemetry import trackers
from rlhfless.telemetry.sinks import MetricSinks
from rlhfless.telemetry.trackers import TrackerSink, missing_packages

CONFIG: dict[str, Any] = {"steps": 3, "model": {"path": "m"}}
ROWS = [{"prompt": "1 + 1 =", "response": str(number), "reward": float(number == 2)} for number in range(9)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)


def sent(spec: TrackerSpec, folder: Path, *steps: int) -> None:
    """Send the steps of a run, each with an evaluation after it, from one attempt."""
    sinks = MetricSinks([TrackerSink(spec, folder, "demo-1", CONFIG)])
    for step in steps:
        sinks.emit(step, {"reward_mean": step / 10, "step_s": float("nan")}, {"response_tokens": [1.0, 2.0, 6.0]})
        sinks.responses(step, ROWS)
        sinks.emit(step, {"eval/exact_match": step / 20})
    sinks.close()


def test_mlflow_gets_metrics_parameters_and_responses_also_of_a_resumed_run(tmp_path: Path) -> None:
    spec = MlflowSpec(type="mlflow", experiment="sums", responses=2)
    sent(spec, tmp_path, 1, 2)
    sent(spec, tmp_path, 3)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("select key, step, value from metrics order by key, step").fetchall()
        assert rows == [
            *(("eval/exact_match", step, step / 20) for step in (1, 2, 3)),
            *(("response_tokens/mean", step, 3.0) for step in (1, 2, 3)),
            *(("reward_mean", step, step / 10) for step in (1, 2, 3)),
        ]
        parameters = dict(database.execute("select key, value from params"))
        assert parameters == {"steps": "3", "model.path": "m"}
        assert database.execute("select name, status from runs").fetchall() == [("demo-1", "FINISHED")]
    (shown,) = tmp_path.glob("mlflow-files/*/artifacts/responses/step-000003.json")
    assert json.loads(shown.read_text()) == {"rows": ROWS[:2]}


def test_wandb_writes_offline(tmp_path: Path) -> None:
    sent(WandbSpec(type="wandb", mode="offline", responses=3), tmp_path, 1, 2)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-demo-1")
    written = (folder / "run-demo-1.wandb").read_bytes()
    assert b"reward_mean" in written
    assert b"eval/exact_match" in written
    tables = [json.loads(path.read_text()) for path in folder.rglob("responses_*.table.json")]
    expected = {"columns": ["prompt", "response", "reward"], "data": [list(row.values()) for row in ROWS[:3]]}
    assert tables, "wandb may write equal tables once"
    assert all(table == expected for table in tables)


def test_trackio_writes_to_this_machine(tmp_path: Path) -> None:
    sent(TrackioSpec(type="trackio", project="sums"), tmp_path, 1, 2)
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    metrics = [(name, step, json.loads(text)) for name, step, text in rows]
    assert {name for name, _, _ in metrics} == {"demo-1"}
    assert [(step, row["reward_mean"]) for _, step, row in metrics if "reward_mean" in row] == [(1, 0.1), (2, 0.2)]
    assert len([row for _, _, row in metrics if "responses" in row]) == 2


class Tracked:
    """A tracker that fails or hangs."""

    def __init__(self, faults: int = 0, held: threading.Event | None = None) -> None:
        self.faults, self.held = faults, held
        self.got: list[int] = []

    def log(self, step: int, values: Any) -> None:
        if self.held is not None:
            self.held.wait(60)
        if len(self.got) < self.faults:
            self.got.append(-step)
            raise ConnectionError("no route to the tracker")
        self.got.append(step)

    def finish(self) -> str:
        return "done"


def opened(monkeypatch: pytest.MonkeyPatch, tracked: Any, tmp_path: Path) -> TrackerSink:
    monkeypatch.setitem(trackers._OPENED, "trackio", tracked)
    return TrackerSink(TrackioSpec(type="trackio"), tmp_path, "demo-1", CONFIG)


def test_a_tracker_that_fails_is_tried_again_and_given_up_after_three_failures_in_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for faults, expected in ((2, [-1, -2, 3, 4, 5]), (9, [-1, -2, -3])):
        tracked = Tracked(faults)
        sink = opened(monkeypatch, lambda *_, tracked=tracked: tracked, tmp_path)
        for step in range(1, 6):
            sink.emit(step, {"reward_mean": 0.5})
        sink.close()
        assert tracked.got == expected
    assert "tracker trackio: given up after 3 failures in a row" in caplog.text
    assert "tracker trackio: 2 emissions were dropped" in caplog.text


def test_a_tracker_that_cannot_be_opened_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Any:
        raise SystemExit("no key")

    sink = opened(monkeypatch, refused, tmp_path)
    sink.emit(1, {"reward_mean": 0.5})
    sink.close()
    assert "the run goes on without it: SystemExit: no key" in caplog.text


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    monkeypatch.setattr(trackers, "QUEUE_SIZE", 4)
    held = threading.Event()
    with caplog.at_level(logging.WARNING):
        sink = opened(monkeypatch, lambda *_: Tracked(held=held), tmp_path)
        for step in range(100):
            sink.emit(step, {"reward_mean": 0.5})
        sink.close()
    held.set()
    assert "has not finished after 0.2 s" in caplog.text
    assert "emissions were dropped" in caplog.text


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None if name == "mlflow" else name)
    (problem,) = missing_packages([WandbSpec(type="wandb"), MlflowSpec(type="mlflow")])
    assert problem.where == "logging.trackers.1.type"
    assert problem.hint == "pip install 'rlhfless[mlflow]'"
    with pytest.raises(InputError, match="needs a package"):
        TrackerSink(MlflowSpec(type="mlflow"), tmp_path, "demo-1", CONFIG)
