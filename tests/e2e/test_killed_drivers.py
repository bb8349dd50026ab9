"""SIGKILL to a driver with two steps alive, in each schedule that has two: nothing is lost, and nothing drawn twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fakes.commands import start
from fakes.live_runs import fault_values
from rlhfless.orchestrator.session import JOURNAL_FILE
from rlhfless.records import FinishReason, Rollout, WeightVersion
from rlhfless.records.journal import Journal
from rlhfless.records.traces import TracedRollout, read_trace
from rlhfless.scaling.accounting import check_holdings

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS, GROUPS, SAMPLES = 6, 4, 2

SCHEDULES: dict[str, dict[str, Any]] = {
    "one_step_off": {"type": "one_step_off"},
    "async": {"type": "async", "max_staleness": 2},
    "partial": {"type": "partial", "ahead": 1},
}


def alive(run: Path) -> list[Rollout]:
    """What the journal has of steps that are not done, if it is of two steps at least and one of them is unfinished."""
    metrics = run / "metrics.jsonl"
    done = {json.loads(line)["step"] for line in metrics.read_text().splitlines()} if metrics.exists() else set()
    if not done:
        return []  # nor may there be a journal
    following = max(done) + 1
    journal = Journal(run / JOURNAL_FILE)
    try:
        left = {(group.begun, group.prompt_id) for group in journal.groups(following)}
        steps = range(1, STEPS + 1)
        rows = {step: journal.rollouts(step) for step in steps}
    finally:
        journal.close()
    if left:  # those that a step learns from are drawn by several
        rows = {step: [row for row in rows[step] if (step, row.prompt_id) in left] for step in steps}
    else:
        rows = {step: rows[step] for step in steps if step >= following}
    begun = [step for step in steps if rows.get(step)]
    return [*chain.from_iterable(rows.values())] if len(begun) > 1 else []


def killed_with_two_steps_alive(spec: Path, folder: Path) -> tuple[Path, list[Rollout]]:
    """The folder of a run whose driver was killed, and what was alive then."""
    process = start(spec, folder / "log")
    end = time.monotonic() + 400
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < end, (folder / "log").read_text()
        run = next(iter((folder / "runs").glob("*")), None)
        if run is not None and (run / JOURNAL_FILE).exists() and alive(run):
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return run, alive(run)


def resume(spec: Path, folder: Path, run: Path) -> None:
    process = start(spec, folder / "again", "--resume", str(run))
    try:
        assert process.wait(timeout=400) == 0, (folder / "again").read_text()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError((folder / "again").read_text()) from None


def check_goes_on(before: Rollout, row: TracedRollout) -> None:
    """A finished sample is as it was; an aborted one keeps all tokens but the last, which is drawn again."""
    ended = before.finish_reason != FinishReason.ABORT
    kept = len(before.token_ids) - (not ended)
    assert row.token_ids is not None
    assert np.array_equal(row.token_ids[:kept], before.token_ids[:kept])
    assert not ended or row.response_tokens == kept
    for span in row.version_spans:
        assert span.start >= kept or WeightVersion.parse(span.version).attempt == 1, "it was drawn again"


@pytest.mark.seldom
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_killed_driver_loses_nothing_of_two_steps_and_draws_nothing_twice(
    schedule: str, assets: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    # So many passes that samples of the next step end while a step is learned.
    epochs = 1 if schedule == "partial" else 20
    changes = {"steps": STEPS, "schedule": SCHEDULES[schedule], "epochs": epochs, "checkpoint": {"every_steps": 1}}
    spec.write_text(yaml.safe_dump(fault_values(assets, 1, output=str(tmp_path / "runs"), **changes)))
    run, before = killed_with_two_steps_alive(spec, tmp_path)
    assert before
    resume(spec, tmp_path, run)
    trace = read_trace(run / "trace")
    assert [step.step for step in trace.steps] == list(range(1, STEPS + 1))
    samples = Counter((row.prompt_id, row.sample_index) for row in trace.rollouts)
    assert set(samples.values()) == {1}
    assert Counter(row.step for row in trace.rollouts) == dict.fromkeys(range(1, STEPS + 1), GROUPS * SAMPLES)
    rows = {(row.prompt_id, row.sample_index): row for row in trace.rollouts}
    for rollout in before:
        check_goes_on(rollout, rows[rollout.key])
    bound = trace.meta.spec["schedule"].get("max_staleness", 1)
    assert max(step.metrics["staleness_max"] for step in trace.steps) <= bound
    if schedule == "partial":
        assert any(rollout.finish_reason == FinishReason.ABORT for rollout in before)
        assert sum(step.metrics["resumed_tokens"] for step in trace.steps) > 0
        assert trace.steps[-1].metrics["deferred_groups"] == 0
    check_holdings(trace.holdings)
