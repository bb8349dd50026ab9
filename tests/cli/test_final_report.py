"""The report at the end of a run."""

from __future__ import annotations

import io
from pathlib import Path

from rlhfless.cli.tables import final_report
from rlhfless.control.objects import FunctionUsage
from rlhfless.telemetry.terminal import Terminal


def usage(function: str, *figures: float) -> tuple[str, FunctionUsage]:
    names = ("invocations", "cold_starts", "busy_device_s", "idle_device_s", "cold_device_s", "cost_usd")
    return function, FunctionUsage(function=function, kind="h100", **dict(zip(names, figures, strict=True)))


def test_the_final_report_fits_a_terminal_and_says_it_all() -> None:
    usages = [
        usage("generation", 412, 2, 1201.25, 340.5, 61.0, 0.0171),
        usage("learner", 812, 2, 660.25, 479.125, 16.0, 12.4829),
    ]
    files = {"checkpoint": Path("/a/" + "very-long/" * 12), "trace": Path("/runs/demo/trace")}
    before, after = {"exact_match": 0.09}, {"exact_match": 0.61, "greedy": 0.5}
    report = final_report(
        "run demo succeeded", 200, 912.3, usages, before, after, files, replicas_lost=1, steps_again=2
    )
    terminal = Terminal(width=80, record=True, file=io.StringIO(), force_terminal=True)
    terminal.print(report)
    text = terminal.export_text()
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert "run demo succeeded  200 steps in 15:12 for $12.50" in text
    assert "recovered: 1 replica lost, 2 steps done again" in text
    assert ["exact", "match", "0.090", "0.610", "+0.520"] in lines
    assert ["greedy", "-", "0.500", "-"] in lines
    assert ["generation", "1,201.2", "340.5", "61.0", "1,602.8", "75", "412", "2", "$0.0171"] in lines
    assert ["total", "1,861.5", "819.6", "77.0", "2,758.1", "67", "1,224", "4", "$12.50"] in lines
    assert f"checkpoint  {files['checkpoint']}" in text.splitlines(), "a path is never broken"
    assert max(len(line) for line in text.splitlines() if "very-long" not in line) <= 80


def test_time_and_cost_of_a_resumed_run_are_of_all_its_attempts() -> None:
    terminal = Terminal(width=80, record=True, file=io.StringIO())
    terminal.print(
        final_report("run demo succeeded", 20, 912.3, [usage("generation", 4, 2, 1, 0, 1, 0.5)], {}, {}, {}, attempts=3)
    )
    assert "20 steps in 15:12 for $0.5000, in 3 attempts" in terminal.export_text()
