"""SIGTERM, as Kubernetes, Slurm and `docker stop` send it, in the midst of a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from fakes.commands import assert_nothing_is_left, offspring, start, wait_for
from fakes.live_runs import Whole, fault_values
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.records.traces import compare_samples, read_trace
from rlhfless.scaling.accounting import check_holdings

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(900)]


def test_a_run_that_is_terminated_is_resumed_with_the_same_samples(whole: Whole, assets: Path, tmp_path: Path) -> None:
    """The signal goes to each of its processes, as Slurm sends it; test_joined_cluster.py sends it to the run alone."""
    spec, log = tmp_path / "spec.yaml", tmp_path / "log"
    spec.write_text(yaml.safe_dump(fault_values(assets, 1, output=str(tmp_path / "runs"))))
    process = start(spec, log)
    wait_for("step 5/", log, process, timeout_s=400)
    left = offspring(process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143, log.read_text()
    assert_nothing_is_left(left, tmp_path / "runs")
    assert "SIGTERM: shutting down, for at most 25 s" in log.read_text()
    assert "rlhfless run --resume runs/" in log.read_text()
    assert "Traceback" not in log.read_text()
    folder = next((tmp_path / "runs").iterdir())
    check_holdings(read_trace(folder / "trace").holdings)

    again = tmp_path / "again"
    process = start(spec, again, "--resume", str(folder))
    assert process.wait(timeout=400) == 0, again.read_text()
    trace = read_trace(folder / "trace")
    assert [step.step for step in trace.steps] == [step.step for step in whole.trace.steps]
    same = compare_samples(trace, whole.trace)
    assert (same.compared, same.fraction, same.only_in_first) == (len(whole.trace.rollouts), 1.0, 0)
    newest = Checkpoints(folder / "checkpoints", 2).newest()
    assert newest is not None
    assert newest.notes.digest == whole.digest
    check_holdings(trace.holdings)
