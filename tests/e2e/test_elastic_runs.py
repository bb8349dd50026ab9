"""Elastic runs of a service on two cores: they shrink and grow as others come and go, whatever is killed meanwhile."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from e2e.test_service import Up, posted, up  # noqa: F401  # a fixture
from fakes.live_runs import fault_values
from rlhfless.control.lifecycle import Status
from rlhfless.records import FunctionName
from rlhfless.records.traces import Trace, compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.long, pytest.mark.seldom]

STEPS = 100_000
"""Steps of a run that is cancelled: so many that a change pays, whatever it takes."""


def run_values(assets: Any, name: str, devices: Any, steps: int = STEPS) -> dict[str, Any]:
    """A run with two actors, which is faster on two cores."""
    changes = {"name": name, "steps": steps, "placement": {"devices": devices}, "prompts_per_step": 16}
    return posted(fault_values(assets, actors=2)) | changes


def sizes_of(service: Up, run_id: str) -> list[tuple[int, int]]:
    """The changes of a run's grant, before and after."""
    with service.client as client:
        events = [event.data for event in client.watch(run_id) if event.type == "size" and "after" in event.data]
    return [(data["before"], data["after"]) for data in events]


def has(service: Up, run_id: str, devices: int) -> None:
    """Wait until a run may hold so many devices."""
    end = time.monotonic() + 300
    while True:
        url = json.loads((service.data / "service.json").read_text())["url"]
        kinds = httpx.get(f"{url}/v1/devices", timeout=20).json()["data"]
        granted = {run["run_id"]: run["granted"] for kind in kinds for run in kind["runs"]}
        if granted.get(run_id) == devices:
            return
        assert time.monotonic() < end, granted
        time.sleep(0.1)


def works_on(service: Up, run_id: str, devices: int) -> None:
    """Wait until a run's driver has changed to so many devices, which it does at the end of a step."""
    end = time.monotonic() + 300
    while sizes_in(trace_of(service, run_id))[-1] != devices:
        assert time.monotonic() < end, "the driver does not change"
        time.sleep(1)


def sizes_in(trace: Trace) -> list[float]:
    return [decision.inputs["devices"] for decision in trace.decisions if decision.kind == "size"]


def trace_of(service: Up, run_id: str) -> Trace:
    return read_trace(service.data / "runs" / run_id / "trace")


def test_runs_shrink_and_grow_as_others_come_and_go(up: Up, assets: Any) -> None:  # noqa: F811
    """`first` is alone on both cores. `second` comes: each has one. `third` needs two, and waits. `second` ends, and
    `first` grows; its driver is killed while it shrinks, and the service while it grows. When `first` is cancelled,
    `third` starts on both cores, and generates what the others have generated."""
    elastic = {"min": 1, "max": 2}
    with up.client as client:
        first = client.create_run(run_values(assets, "first", elastic)).id
        up.until(first, lambda run: run.step >= 1)
        second = client.create_run(run_values(assets, "second", elastic, steps=4)).id
        has(up, first, 1)
        up.kill_driver(first)
        up.until(second, lambda run: run.step >= 1)
        third = client.create_run(run_values(assets, "third", 2)).id
        up.until(first, lambda run: run.attempt == 2 and run.status is Status.RUNNING)
        assert client.get_run(third).step == 0
        up.until(second, lambda run: run.status is Status.SUCCEEDED)
    has(up, first, 2)
    up.kill()
    up.start()
    works_on(up, first, 2)
    grown = up.until(first, lambda run: run.attempt == 2).step
    done = up.until(first, lambda run: run.step >= grown + 2).step
    with up.client as client:
        client.cancel_run(first)
    up.until(first, lambda run: run.status is Status.CANCELLED)
    up.until(third, lambda run: run.step >= done + 2)
    with up.client as client:
        client.cancel_run(third)
    up.until(third, lambda run: run.status is Status.CANCELLED)

    assert sizes_of(up, first) == [(0, 2), (2, 1), (1, 2)]
    assert sizes_of(up, second) == [(0, 1)]
    check_engine_stays(trace_of(up, first))
    whole = trace_of(up, third)
    for run_id in (first, second):
        same = compare_samples(trace_of(up, run_id), whole)
        assert (same.fraction, same.only_in_first) == (1.0, 0)
    check_bill(trace_of(up, first), trace_of(up, second))


def check_engine_stays(first: Trace) -> None:
    """As the run grows, the engine on the core that it keeps works on."""
    grows_s = max(decision.at_s for decision in first.decisions if decision.kind == "size")
    engines = [row for row in first.holdings if row.function == FunctionName.GENERATION]
    before, after = ({row.incarnation for row in engines if (row.end_s > grows_s) is late} for late in (False, True))
    assert before & after


def check_bill(first: Trace, second: Trace) -> None:
    """Each trace says on how many devices which steps were, and why; together they never have more than two cores."""
    changes = [decision for decision in first.decisions if decision.kind == "size"]
    assert sizes_in(first)[:2] == [2, 1]
    assert sizes_in(first)[-1] == 2
    assert all(decision.inputs["reason"] for decision in changes)
    held = [(row.start_s, row.end_s, row.device) for trace in (first, second) for row in trace.holdings]
    for at_s, _, _ in held:
        names = [{row.device for row in trace.holdings if row.start_s <= at_s < row.end_s} for trace in (first, second)]
        assert sum(map(len, names)) <= 2
