"""On a cluster that outlives the driver: a killed driver leaves nothing behind, and a resumed one takes over."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fakes.commands import COMMAND, believed_gpu, replicas, start, started, wait_for, write_spec
from fakes.live_runs import Whole, fault_values
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.records.traces import compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

LEASE_S = 12.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray of its own with three devices; its address."""
    with started() as address:
        yield address


def killed_after(text: str, spec: Path, log: Path) -> Path:
    """Start the run, kill its driver when it has printed `text`; returns the run's folder."""
    process = start(spec, log)
    try:
        wait_for(text, log, process, timeout_s=400)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    return next((spec.parent / "runs").iterdir())


@pytest.mark.seldom
def test_a_resumed_run_takes_over_what_its_killed_driver_left(
    cluster: str, whole: Whole, assets: Path, tmp_path: Path
) -> None:
    """Weights and all, which the learner serves; and with three actors it draws what one draws."""
    joined = {"ray_address": cluster}
    spec = tmp_path / "spec.yaml"
    values = fault_values(
        assets, 3, steps=4, placement=joined, recovery={"lease_s": 120}, checkpoint={"every_steps": 1}
    )
    values |= {
        "scaling": {"generation": {"min_actors": 3, "max_actors": 3}},
        "weights": {"transport": "http"},
        "output": str(tmp_path / "runs"),
    }
    spec.write_text(yaml.safe_dump(values))
    folder = killed_after("step 2/4", spec, tmp_path / "log")
    left = {name: process.pid for name, process in replicas(folder.name).items()}
    assert Counter(name.rsplit("-", 2)[-2] for name in left) == {"generation": 3, "scoring": 1, "learner": 1}
    result = subprocess.run(
        [*COMMAND, "run", "--resume", str(folder)], capture_output=True, text=True, timeout=400, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    trace = read_trace(folder / "trace")
    assert [step.step for step in trace.steps] == [1, 2, 3, 4]
    assert {holding.replica for holding in trace.holdings} == set(left), "a replica was started although one was there"
    same = compare_samples(trace, whole.trace)
    assert (same.compared, same.fraction, same.only_in_first) == (len(trace.rollouts), 1.0, 0)
    newest = Checkpoints(folder / "checkpoints", 2).newest()
    assert newest is not None
    assert (newest.notes.step, newest.notes.attempt) == (4, 2)
    assert replicas(folder.name) == {}


def ended(values: Mapping[str, Any], spec: Path, *options: str, command: Sequence[str] = COMMAND) -> Path:
    """Start the run; returns its folder when it has ended well."""
    spec.write_text(yaml.safe_dump(dict(values)))
    done = subprocess.run([*command, "run", str(spec), *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((spec.parent / "runs").iterdir())


@pytest.mark.seldom
def test_a_learner_on_devices_of_another_kind_and_back_on_those_of_generation(
    cluster: str, whole: Whole, assets: Path, tmp_path: Path
) -> None:
    """It learns on another node than the actors are on, which pull its weights; the samples are those of one node. A
    resumed run has it on devices of their kind."""
    values = fault_values(assets, 1, steps=2, output=str(tmp_path / "runs"))
    values["learner"] = values.get("learner", {}) | {"dtype": "float32"}
    apart = {"mode": "disaggregated", "kind": "cpu-core", "ray_address": cluster}
    other = apart | {"devices": 1, "learner_kind": "l40s", "float32_on_gpus": True}
    with believed_gpu(cluster, "L40S", tmp_path / "gpu"):
        folder = ended(values | {"placement": other}, tmp_path / "first.yaml")
        again = values | {"placement": apart | {"devices": 2}, "steps": 4}
        ended(again, tmp_path / "again.yaml", "--resume", str(folder))
    trace = read_trace(folder / "trace")
    held = sorted(trace.holdings, key=lambda one: one.start_s)
    kinds = {
        name: list(dict.fromkeys(one.device_kind for one in held if one.function == name))
        for name in ("generation", "learner")
    }
    assert kinds == {"generation": ["cpu-core"], "learner": ["l40s", "cpu-core"]}
    same = compare_samples(trace, whole.trace)
    assert (same.compared, same.fraction, same.only_in_first) == (len(trace.rollouts), 1.0, 0)


TRAVELS = """
import shutil, sys
from pathlib import Path
from rlhfless.fleet.each_node import on_each_node
from rlhfless.fleet.ray_session import end, join
from rlhfless.fleet.each_node import gather_modules, import_faults
from rlhfless.spec import RunSpec

folder, address = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(folder / "mine"))
reward = {"type": "python", "name": "own", "target": "own_reward:score"}
spec = RunSpec.model_validate({"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [reward]})
code = gather_modules(spec, folder / "run")
join(address, code)
for gone in (folder / "mine", code):
    shutil.rmtree(gone)
print(on_each_node(import_faults, ["own_reward:score"], timeout_s=60))
print(on_each_node(import_faults, ["other_reward:score"], timeout_s=60))
end()
"""


def test_the_users_modules_travel_to_the_nodes(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper.py").write_text("SCORE = 1.0")
    (tmp_path / "mine" / "own_reward.py").write_text("from helper import SCORE\ndef score(**_): return SCORE")
    command = [sys.executable, "-c", TRAVELS, str(tmp_path), cluster]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, lacking = done.stdout.splitlines()[-2:]
    assert found.endswith(": None}")
    assert "there is no module 'other_reward'" in lacking


@pytest.mark.seldom
def test_a_killed_driver_leaves_nothing_behind_after_the_lease(cluster: str, assets: Path, tmp_path: Path) -> None:
    changes = {"placement": {"ray_address": cluster}, "recovery": {"lease_s": LEASE_S}, "timeouts": {"drain_s": 3}}
    folder = killed_after("step  1/50", write_spec(assets, tmp_path, steps=50, **changes), tmp_path / "log")
    assert replicas(folder.name)
    end = time.monotonic() + LEASE_S + 90
    while replicas(folder.name) or list(Path("/dev/shm").glob(f"rlhfless-{folder.name}*")):
        assert time.monotonic() < end, f"still there: {sorted(replicas(folder.name))}"
        time.sleep(0.5)


@pytest.mark.seldom
def test_a_signal_stops_the_runs_own_functions_and_no_other(cluster: str, assets: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(write_spec(assets, tmp_path, steps=50, placement={"ray_address": cluster}), log)
    wait_for("step  1/50", log, process, timeout_s=400)
    before = {found.pid for found in psutil.process_iter(["cmdline"]) if belongs(found, cluster)}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143, log.read_text()
    assert replicas(next((tmp_path / "runs").iterdir()).name) == {}
    assert {found.pid for found in psutil.process_iter(["cmdline"]) if belongs(found, cluster)} == before


def belongs(process: psutil.Process, cluster: str) -> bool:
    """One of the cluster's own daemons, which were there before the run."""
    command = " ".join(process.info["cmdline"] or ())
    return f"rlhfless-ray-{cluster.rpartition(':')[2]}" in command and (
        "gcs_server" in command or "/raylet " in command
    )
