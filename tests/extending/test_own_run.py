"""`rlhfless run` with parts of one's own: two steps, two learner ranks in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems, write_jsonl
from rlhfless.records import Work
from rlhfless.records.traces import read_trace
from rlhfless.scaling.accounting import summarise
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.recorded import setup_of

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

COMMAND = str(Path(sys.executable).with_name("rlhfless"))


def test_a_run_of_one_s_own_parts(own: Path) -> None:
    build_random(own / "model", seed=0, size=dataclasses.replace(SMALLEST, max_positions=512))
    write_jsonl(own / "train.jsonl", draw_problems(TaskRecipe(), np.random.default_rng(0), 16, held_out=False))
    done = subprocess.run(
        [COMMAND, "run", "run.yaml", "--set", "logging.console=lines"],
        cwd=own,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (own / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_s" in line]
    assert [line["step"] for line in steps] == [1, 2]

    # The algorithm, in the driver and in the ranks.
    for line in steps:
        assert line["algorithm/logprob"] < 0
        assert "clipped_high" not in line
        assert "reference_kl" not in line
    assert yaml.safe_load((folder / "spec.yaml").read_text())["algorithm"] == {
        "type": "leave_one_out:LeaveOneOut",
        "max_advantage": 2.0,
    }

    trace = read_trace(folder / "trace")

    # The function: its column is in the batch, its work in the bill, and the simulator has a slot for it.
    second = [call for call in trace.invocations if call.function == "second"]
    assert {call.step for call in second} == {1, 2}
    assert {call.work for call in second} == {Work.LOGPROBS}
    assert steps[0]["algorithm/second_logprobs"] < 0
    assert "prompt_tokens_computed/second" in steps[0]
    (bill,) = (row for row in summarise(trace, load_price_book(None)).functions if row.name == "second")
    assert bill.busy_device_s > 0
    (service,) = (one for one in setup_of(trace, calibrate([trace])).services if one.function == "second")
    assert service.token_s + service.group_s > 0

    # The schedule: both steps are drawn with the same weights, before either is learned from.
    drawn_with = {row.step: row.version_spans[0].version for row in trace.rollouts}
    assert len(set(drawn_with.values())) == 1
    assert [line["staleness_max"] for line in steps] == [0, 1]
    second, learned = (
        next(call for call in trace.invocations if call.step == step and call.work is work)
        for step, work in ((2, Work.GENERATE), (1, Work.LEARN))
    )
    assert second.end_s < learned.start_s

    # The scaling policy: 12 samples a step are few enough for one actor, and its answers were no faults.
    assert all(line["policy_faults"] == 0 for line in steps)
    assert {call.replica for call in trace.invocations if call.work is Work.GENERATE} == {second.replica}

    # The reward.
    rows = trace.rollouts
    assert len(rows) == 2 * 4 * 3
    assert all(0 <= row.reward_parts["sevens"] <= 0.5 for row in rows)
