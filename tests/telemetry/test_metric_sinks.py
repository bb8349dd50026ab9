"""Where metrics go: JSONL, TensorBoard, Prometheus."""

from __future__ import annotations

import json
import math
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhfless.spec import RunSpec
from rlhfless.telemetry.metrics import UndeclaredMetric
from rlhfless.telemetry.open_sinks import open_sinks
from rlhfless.telemetry.prometheus import PortInUse, PrometheusSink
from rlhfless.telemetry.sinks import NO_SAMPLES, JsonlSink, MetricSinks
from rlhfless.telemetry.tensorboard import TensorBoardSink

VALUES = {"reward_mean": 0.5, "reward/exact_match": 0.75, "cost_usd": 0.25, "step_s": 4.0}
SAMPLES = {"response_tokens": [10, 20, 600]}


class Remember:
    """A sink that keeps what it got."""

    def __init__(self, error: Exception | None = None) -> None:
        self.got: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False
        self._error = error

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        self.got.append((step, {**values, **{name: len(many) for name, many in samples.items()}}))

    def close(self) -> None:
        self.closed = True
        if self._error:
            raise self._error


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def exporter(port: int) -> Iterator[PrometheusSink]:
    sink = PrometheusSink(port, "demo-1")
    yield sink
    sink.close()


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


def test_all_sinks_get_all_values() -> None:
    first, second = Remember(), Remember()
    sinks = MetricSinks([first, second])
    sinks.emit(3, VALUES, SAMPLES)
    assert first.got == second.got == [(3, {**VALUES, "response_tokens": 3})]


@pytest.mark.parametrize(
    ("values", "samples"),
    [({"reward_men": 1.0}, {}), ({"response_tokens": 1.0}, {}), ({}, {"reward_mean": [1.0]})],
)
def test_an_undeclared_name_reaches_no_sink(values: dict[str, float], samples: dict[str, list[float]]) -> None:
    sink = Remember()
    with pytest.raises(UndeclaredMetric):
        MetricSinks([sink]).emit(1, values, samples)
    assert sink.got == []


def test_all_sinks_are_closed_even_if_one_fails() -> None:
    first, second = Remember(OSError("disk full")), Remember(OSError("also"))
    with pytest.raises(OSError, match="disk full"):
        MetricSinks([first, second]).close()
    assert first.closed
    assert second.closed


def test_jsonl_has_a_line_per_emission_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.emit(step, VALUES | {"loss": math.nan, "ratio": math.inf}, SAMPLES)
        sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["reward/exact_match"] == 0.75
    assert (lines[0]["loss"], lines[0]["ratio"]) == (None, None)
    assert lines[0]["response_tokens"] == [10, 20, 600]
    assert lines[1]["time_s"] >= lines[0]["time_s"]


def test_a_line_that_a_full_disk_has_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "step_s": 4.0}\n{"step": 2, "st')
    sink = JsonlSink(path)
    for step in (1, 2):
        sink.emit(step, VALUES)
    sink.close()
    first, cut, again = path.read_text().splitlines()
    assert (json.loads(first)["step"], cut, json.loads(again)["step"]) == (1, '{"step": 2, "st', 2)


def test_jsonl_lines_are_whole_before_it_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.emit(1, VALUES)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward_mean"] == 0.5
    sink.close()


def test_tensorboard_reads_back_scalars_and_histograms(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.emit(1, VALUES, SAMPLES)
    sink.emit(2, {"reward_mean": 0.625}, {"response_tokens": []})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 0.5), (2, 0.625)]
    assert events.Scalars("reward/exact_match")[0].value == 0.75
    (lengths,) = events.Histograms("response_tokens")
    histogram = lengths.histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (10, 600, 3, 630)
    assert sum(histogram.bucket) == 3


@pytest.mark.parametrize("kind", [JsonlSink, TensorBoardSink])
def test_a_step_that_is_done_again_is_written_once(
    kind: type[JsonlSink] | type[TensorBoardSink], tmp_path: Path
) -> None:
    """By the driver that did it first, or by its successor after a kill; an evaluation after the step is apart."""
    path = tmp_path / ("metrics.jsonl" if kind is JsonlSink else "tensorboard")
    for steps in ((1, 2, 2), (2, 3)):
        sink = kind(path)
        for step in steps:
            sink.emit(step, VALUES, SAMPLES)
            sink.emit(step, {"eval/greedy": 0.5})
        sink.close()
    if kind is JsonlSink:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        written = [[line["step"] for line in lines if name in line] for name in ("reward_mean", "eval/greedy")]
    else:
        events = EventAccumulator(str(path)).Reload()
        written = [[event.step for event in events.Scalars(name)] for name in ("reward_mean", "eval/greedy")]
    assert written == [[1, 2, 3], [1, 2, 3]]


def test_prometheus_serves_what_was_emitted(exporter: PrometheusSink, port: int) -> None:
    exporter.emit(1, VALUES, SAMPLES)
    exporter.emit(2, {"reward_mean": 0.75, "cost_usd": 0.75, "eval/greedy": 0.5}, {"response_tokens": [20]})
    found = scrape(port)
    assert found["rlhfless_step"] == 2
    assert found['rlhfless_run_info{run_id="demo-1"}'] == 1
    assert found["rlhfless_reward_mean"] == 0.75
    assert found['rlhfless_reward{part="exact_match"}'] == 0.75
    assert found['rlhfless_eval{name="greedy"}'] == 0.5
    assert found["rlhfless_cost_usd_total"] == 0.75
    assert found["rlhfless_step_seconds"] == 4.0
    assert found['rlhfless_response_tokens_bucket{le="32.0"}'] == 3
    assert found["rlhfless_response_tokens_count"] == 4
    assert "rlhfless_loss" not in found


def test_a_counter_never_falls(exporter: PrometheusSink, port: int) -> None:
    for total in (0.5, 0.25, 0.75):
        exporter.emit(1, {"cost_usd": total})
    assert scrape(port)["rlhfless_cost_usd_total"] == 0.75


@pytest.mark.usefixtures("exporter")
def test_a_busy_port_is_named_with_its_mend(port: int) -> None:
    with pytest.raises(PortInUse, match=rf"logging\.metrics_port is {port}.*choose another port"):
        PrometheusSink(port, "demo-2")
    assert scrape(port)['rlhfless_run_info{run_id="demo-1"}'] == 1


def test_closing_frees_the_port(port: int) -> None:
    PrometheusSink(port, "one").close()
    PrometheusSink(port, "two").close()


def spec_with(**logging: Any) -> RunSpec:
    values = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}]}
    return RunSpec.model_validate(values | {"logging": logging})


def test_the_spec_says_which_sinks_there_are(tmp_path: Path, port: int) -> None:
    other = Remember()
    sinks = open_sinks(spec_with(tensorboard=True, metrics_port=port), tmp_path, "demo-1", other)
    sinks.emit(1, VALUES)
    assert scrape(port)["rlhfless_reward_mean"] == 0.5
    sinks.close()
    assert other.got == [(1, VALUES)]
    assert (tmp_path / "metrics.jsonl").exists()
    assert list((tmp_path / "tensorboard").iterdir())


def test_by_default_there_is_only_the_file(tmp_path: Path) -> None:
    sinks = open_sinks(spec_with(), tmp_path, "demo-1")
    sinks.emit(1, VALUES)
    sinks.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
