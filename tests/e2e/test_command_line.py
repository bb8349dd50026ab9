"""`rlhfless run` as a user calls it: a whole run, and one that is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes.commands import COMMAND, assert_nothing_is_left, offspring, start, user_environment, wait_for, write_spec
from rlhfless.records import FunctionName
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_a_run_leaves_a_model_metrics_and_a_bill(assets: Path, tmp_path: Path) -> None:
    """In the environment of a user, who has no package that only the tests need."""
    (tmp_path / "my_rewards.py").write_text("def longer(response_tokens):\n    return response_tokens / 400\n")
    rewards = [{"type": "python", "target": "my_rewards:longer", "name": "length"}]
    scaling = {"hold_reference": "never"}
    kl = {"kl": {"coefficient": 0.01}}
    spec = write_spec(assets, tmp_path, rewards=rewards, algorithm=kl, scaling=scaling)
    log = tmp_path / "out.log"
    process = start(spec, log, command=[str(user_environment(tmp_path / "environment"))])
    assert process.wait(timeout=400) == 0, log.read_text()
    text = log.read_text()
    for expected in ("step 2/2", "held-out prompts", "length greedy", "generation", "learner", "checkpoint"):
        assert expected in text
    folder = next((tmp_path / "runs").iterdir())
    checkpoint = folder / "checkpoints" / "step-000002"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token == "<eos>"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step_s" in line] == [1, 2]
    assert 0 < lines[-2]["reward/length"] <= 1
    assert lines[-2]["reference_kl"] > 0
    trace = read_trace(folder / "trace")
    held = [holding for holding in trace.holdings if holding.function == FunctionName.REFERENCE]
    assert len({holding.replica for holding in held}) == 2, "the reference was not released between the steps"
    released = [decision for decision in trace.decisions if decision.kind == "release"]
    assert sum(decision.inputs["function"] == "reference" for decision in released) >= 2
    assert not list(Path("/dev/shm").glob(f"rlhfless-{folder.name}*"))
    assert not [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
    summary = subprocess.run(
        [*COMMAND, "trace", "summary", str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "generation" in summary.stdout
    assert "overhead" in summary.stdout


def test_ctrl_c_twice_stops_everything_and_keeps_the_trace(assets: Path, tmp_path: Path) -> None:
    """The second comes while the first is obeyed; it starts nothing, least of all another Ray."""
    log = tmp_path / "out.log"
    process = start(write_spec(assets, tmp_path, steps=1000), log)
    try:
        wait_for("step    2/1000", log, process, timeout_s=300)
        left = offspring(process)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)  # as fast as one can press it again
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130, log.read_text()
    finally:
        process.kill()
    assert_nothing_is_left(left, tmp_path / "runs")
    assert "Traceback" not in log.read_text()
    assert "rlhfless run --resume runs/" in log.read_text()
    folder = next((tmp_path / "runs").iterdir())
    trace = read_trace(folder / "trace")
    assert len(trace.steps) >= 2
    assert {holding.state for holding in trace.holdings} >= {"starting", "serving", "draining"}


@pytest.mark.seldom
@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "signals"), [("starting 1 generation actor(s), learner and helpers ...", 1), ("starting Ray ...", 3)]
)
def test_a_start_that_is_terminated_leaves_nothing(phase: str, signals: int, assets: Path, tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    process = start(write_spec(assets, tmp_path), log)
    try:
        wait_for(phase, log, process, timeout_s=300)
        time.sleep(3)  # into the midst of it
        left = offspring(process)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert process.wait(timeout=120) == 143, log.read_text()
    finally:
        process.kill()
    assert_nothing_is_left(left, tmp_path / "runs")
    assert "Traceback" not in log.read_text()
    assert "--resume" not in log.read_text(), "nothing was drawn that could be resumed"


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system to fill")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.long
@pytest.mark.seldom
def test_a_full_disk_stops_the_run_which_goes_on_when_there_is_room_until_it_is_killed(
    assets: Path, tmp_path: Path
) -> None:
    spec, log = write_spec(assets, tmp_path, steps=50, checkpoint={"every_steps": 2}), tmp_path / "out.log"
    runs = tmp_path / "runs"
    with small_disk(runs, size_mib=3):
        process = start(spec, log)
        assert process.wait(timeout=400) == 2, log.read_text()
        assert "could not be" in log.read_text()
        assert "rlhfless run --resume runs/" in log.read_text()
        assert "Traceback" not in log.read_text()
        subprocess.run(["mount", "-o", "remount,size=200m", str(runs)], check=True)
        folder = next(runs.iterdir())
        done = len(read_trace(folder / "trace").steps)
        again = tmp_path / "again.log"
        process = start(spec, again, "--resume", str(folder))
        wait_for(f"step {done + 2:>2}/50", again, process, timeout_s=300)
        # Ray's own two agents look for their raylet now and then, and end later; they hold no device.
        left = [child for child in offspring(process) if not child.name().endswith("Agent")]
        process.kill()
        process.wait(timeout=30)
        # A container without an init of its own may leave the dead unreaped: they have given everything back.
        end = time.monotonic() + 60
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left):
            assert time.monotonic() < end, "a killed driver left processes behind"
            time.sleep(0.5)
        assert not list(Path("/dev/shm").glob(f"rlhfless-{folder.name}*")), "and its weights"
        steps = [record.step for record in read_trace(folder / "trace").steps]
        assert steps == list(range(1, len(steps) + 1))
