"""Runs that train adapters in one fleet, through the service: with real Ray, vLLM and torch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.live_runs import fault_values
from fakes.service_up import COMMAND, Up, engine_below, kill_at_work, posted, rank_of, running
from rlhfless.control.lifecycle import Status
from rlhfless.records import WeightVersion, Work
from rlhfless.records.checkpoints import Checkpoints
from rlhfless.records.traces import Trace, compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6


@pytest.fixture(scope="module")
def up(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    service = Up(tmp_path_factory.mktemp("service") / "data", (assets,), ("--max-drivers", "4"))
    before = {*Path("/dev/shm").glob("rlhfless-fleet-*")}
    service.start()
    yield service
    subprocess.run([COMMAND, "down", "--data", str(service.data)], check=True, timeout=200)
    assert {*Path("/dev/shm").glob("rlhfless-fleet-*")} <= before


def values(assets: Path, name: str, rank: int = 8, **changes: Any) -> dict[str, Any]:
    of_run = fault_values(
        assets,
        actors=1,
        name=name,
        steps=STEPS,
        model={"path": str(assets / "model"), "lora": {"rank": rank, "alpha": 16}},
        optimizer={"learning_rate": 1e-2},
        placement={"share": "adapters", "devices": 2, "learner_devices": 1, "tenants": 4},
    )
    return posted(of_run | changes)


def trace_of(up: Up, run_id: str) -> Trace:
    return read_trace(up.data / "runs" / run_id / "trace")


def digest_of(up: Up, run_id: str) -> str:
    newest = Checkpoints(up.data / "runs" / run_id / "checkpoints", 2).newest()
    assert newest is not None
    return newest.notes.digest


@pytest.fixture(scope="module")
def alone(up: Up, assets: Path) -> str:
    """A run that had the fleet to itself."""
    with up.client as client:
        run_id = client.create_run(values(assets, "alone")).id
    up.until(run_id, lambda now: now.status is Status.SUCCEEDED)
    return run_id


def check_same(up: Up, run_id: str, alone: str) -> None:
    """Assert that a run has the samples and the final adapter of the run alone."""
    same = compare_samples(trace_of(up, run_id), trace_of(up, alone))
    assert (same.fraction, same.only_in_first, same.only_in_second) == (1.0, 0, 0)
    assert digest_of(up, run_id) == digest_of(up, alone)


def test_a_run_is_the_same_alone_and_beside_others(up: Up, assets: Path, alone: str) -> None:
    with up.client as client:
        specs = [values(assets, "same"), *(values(assets, f"other{n}", rank=4 * n, seed=n) for n in (1, 2, 4))]
        runs = [client.create_run(spec).id for spec in specs]
        for run_id in runs:
            up.until(run_id, lambda now: now.status is Status.SUCCEEDED)
    check_same(up, runs[0], alone)
    assert len({digest_of(up, run_id) for run_id in runs}) == len(runs)
    engines = {call.incarnation for run_id in runs for call in trace_of(up, run_id).invocations
               if call.work is Work.GENERATE}  # fmt: skip
    assert len(engines) == 1, "one engine generated for all"
    with up.client as client:
        fleet = client.fleets().data[0]
    assert {run.run_id for run in fleet.runs} >= set(runs)
    parts = fleet.busy_device_s + fleet.idle_device_s + fleet.cold_device_s
    assert parts == pytest.approx(fleet.provisioned_device_s)
    for run in fleet.runs:
        if run.run_id in runs:
            paid = sum(held.device_s for held in trace_of(up, run.run_id).holdings if held.function == "generation")
            assert paid == pytest.approx(run.busy_device_s, rel=0.05, abs=0.05)


def test_runs_that_generate_while_they_learn_load_versions_in_flight(up: Up, assets: Path) -> None:
    """Each keeps its own versions in the engine, and its samples end with the version that they began with."""
    with up.client as client:
        specs = [values(assets, f"ahead{n}", seed=n, schedule={"type": "async"}) for n in range(2)]
        runs = [client.create_run(spec).id for spec in specs]
    for run_id in runs:
        up.until(run_id, lambda now: now.status is Status.SUCCEEDED)
        rollouts = [row for row in trace_of(up, run_id).rollouts if row.step > 0]
        spans = [span.version for row in rollouts for span in row.version_spans]
        assert {WeightVersion.parse(version).run_id for version in spans} == {run_id}
        assert all(len({span.version for span in row.version_spans}) == 1 for row in rollouts)
        assert len({WeightVersion.parse(version).step for version in spans}) > 2


def test_no_run_feels_the_faults_of_the_others(up: Up, assets: Path, alone: str) -> None:
    """One run loses its driver, the learner of another and the engine of all are killed at work, and the gradients of a
    third are not finite."""
    with up.client as client:
        calm, struck = (client.create_run(values(assets, name)).id for name in ("calm", "struck"))
        infinite = client.create_run(values(assets, "infinite", algorithm={"entropy_bonus": 1e300})).id
        up.until(struck, lambda now: now.step >= 1)
        up.kill_driver(struck)
        up.until(infinite, lambda now: now.step >= 1)
        client.cancel_run(infinite)
        up.until(struck, lambda now: now.attempt == 2 and now.step >= 2)
        kill_at_work(engine_below(running("ServeReplica:fleet-")[0]))
        up.until(struck, lambda now: now.step >= 3)
        rank_of(struck).kill()
    up.until(infinite, lambda now: now.status is Status.CANCELLED)
    for run_id in (calm, struck):
        up.until(run_id, lambda now: now.status is Status.SUCCEEDED)
        check_same(up, run_id, alone)
    with up.client as client:
        assert client.functions().data == []
    assert running("ServeReplica:fleet-") == [], "the last run to leave has stopped the engine"
