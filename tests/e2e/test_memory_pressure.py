"""A Ray that is short of memory kills workers. In a process and a turn of its own: what other tests use counts, too."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from fakes.commands import replicas, start, started, wait_for
from fakes.live_runs import Whole, fault_values
from rlhfless.records.traces import compare_samples, read_trace
from rlhfless.scaling.accounting import check_holdings

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(900)]

HEADROOM_BYTES = 6 << 30
"""What Ray and a run of two actors may use, with slot to spare, before Ray begins to kill."""


def test_a_run_outlives_workers_that_ray_kills_for_memory(whole: Whole, assets: Path, tmp_path: Path) -> None:
    memory = psutil.virtual_memory()
    if memory.available < 2 * HEADROOM_BYTES:
        pytest.skip(f"needs {2 * HEADROOM_BYTES >> 30} GiB of free memory; there are {memory.available >> 30}")
    limit = (memory.total - memory.available + HEADROOM_BYTES) / memory.total
    # A second between looks is time enough to give the memory back, so that few are killed and not all.
    with started(RAY_memory_usage_threshold=f"{limit:.3f}", RAY_memory_monitor_refresh_ms="1000") as address:
        spec, log = tmp_path / "spec.yaml", tmp_path / "log"
        values = fault_values(assets, 2, placement={"ray_address": address}, checkpoint={"every_steps": 1})
        spec.write_text(yaml.safe_dump(values | {"output": str(tmp_path / "runs")}))
        process = start(spec, log)
        wait_for("step 1/", log, process, timeout_s=400)
        folder = next((tmp_path / "runs").iterdir())
        use_memory_until_one_is_gone(list(replicas(folder.name).values()))
        assert process.poll() is None, "the run was over before Ray killed anybody"
        assert process.wait(timeout=400) == 0, log.read_text()
    trace = read_trace(folder / "trace")
    assert [step.step for step in trace.steps] == [step.step for step in whole.trace.steps]
    same = compare_samples(trace, whole.trace)
    assert (same.compared, same.fraction, same.only_in_first) == (len(whole.trace.rollouts), 1.0, 0)
    check_holdings(trace.holdings)


def use_memory_until_one_is_gone(processes: Sequence[psutil.Process]) -> None:
    """Fill the memory bit by bit, and give all back as soon as Ray has killed one of the processes."""
    taken: list[bytearray] = []
    while all(process.is_running() for process in processes):
        assert len(taken) < 40, "Ray kills no process, although the memory is full"
        taken.append(bytearray(os.urandom(1 << 20) * 256))
        time.sleep(0.1)
