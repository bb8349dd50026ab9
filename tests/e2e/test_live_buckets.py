"""A run whose engines copy weights from the learner's bucket, which it fills also while it sleeps; both die on the way.
On a core: a file in shared memory is in the place of a GPU's memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import saboteur
from fakes.live_runs import Whole, check_one_awake, fault_opening
from rlhfless.orchestrator import launch
from rlhfless.orchestrator.run import RLRun
from rlhfless.records import Work
from rlhfless.records.ledger import TRANSPORT
from rlhfless.records.traces import compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 4


async def sabotage(run: RLRun) -> None:
    await saboteur.generating(run, 2)
    await saboteur.kill_actor(run)  # its replacement asks a learner that sleeps
    await saboteur.generating(run, 3)
    await saboteur.kill_learner(run)


def test_engines_that_copy_from_a_sleeping_learner_draw_the_same_samples(
    assets: Path, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_keeps_from_gpus", lambda *_: None)
    start = fault_opening(
        assets, tmp_path / "run", actors=1, steps=STEPS, placement={"turns": True, "devices": 1},
        learner={"threads": 1}, weights={"transport": "cuda_ipc"},
    )  # fmt: skip
    start.folder.mkdir()
    recovered, _ = asyncio.run(saboteur.drive(start, sabotage))
    assert recovered.replicas_lost >= 2
    trace = read_trace(start.folder / "trace")
    same = compare_samples(trace, whole.trace)
    assert (same.fraction, same.only_in_first) == (1.0, 0)
    assert {row.step for row in trace.rollouts} == set(range(1, STEPS + 1))
    check_one_awake(trace)
    assert "cuda_ipc" in {row.inputs["transport"] for row in trace.decisions if row.kind == TRANSPORT}
    assert [call for call in trace.invocations if call.work is Work.LOAD_WEIGHTS]
