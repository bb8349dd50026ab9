"""Runs whose steps overlap, with real Ray, vLLM and torch."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fakes import saboteur
from fakes.live_runs import fault_opening
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session
from rlhfless.records import WeightVersion, Work
from rlhfless.records.traces import Trace, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 4


def opening(assets: Path, folder: Path, **changes: Any) -> Session:
    folder.mkdir(exist_ok=True)
    return fault_opening(assets, folder, actors=1, **{"steps": STEPS, "schedule": "one_step_off"} | changes)


def drawn_with(trace: Trace) -> dict[int, set[int]]:
    """By step: the steps of the versions that drew its samples."""
    versions: dict[int, set[int]] = {}
    for row in trace.rollouts:
        versions.setdefault(row.step, set()).update(WeightVersion.parse(s.version).step for s in row.version_spans)
    return versions


def overlap_s(trace: Trace, drawn: int, learned: int) -> float:
    """Seconds in which one step was drawn while another one was learned."""
    draws = [call for call in trace.invocations if call.step == drawn and call.work is Work.GENERATE]
    learns = [call for call in trace.invocations if call.step == learned and call.work is Work.LEARN]
    return sum(
        max(min(one.end_s, other.end_s) - max(one.start_s, other.start_s), 0) for one in draws for other in learns
    )


async def kill_learner_at_work(run: RLRun) -> None:
    await saboteur.generating(run, 3)  # it learns step 2
    await saboteur.kill_learner(run)


@pytest.mark.seldom
def test_a_learner_that_is_lost_is_replaced_while_the_next_step_is_drawn(assets: Path, tmp_path: Path) -> None:
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    start = opening(assets, calm)
    asyncio.run(execute(start))
    newest = start.checkpoints.newest()
    assert newest is not None
    trace = read_trace(calm / "trace")
    assert drawn_with(trace) == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    assert [step.metrics["staleness_max"] for step in trace.steps] == [0, 1, 1, 1]
    assert all(overlap_s(trace, step + 1, step) > 0 for step in range(1, STEPS))
    for one, other in zip(trace.steps, trace.steps[1:], strict=False):
        assert other.start_s >= one.end_s
    recovered, digest = asyncio.run(saboteur.drive(opening(assets, broken), kill_learner_at_work))
    assert recovered.steps_again <= 3  # by how far step 2, and its checkpoint, the first one, had come
    assert recovered.replicas_lost == 1
    assert digest == newest.notes.digest
    again = read_trace(broken / "trace")
    assert drawn_with(again) == drawn_with(trace)
    keys = Counter((row.step, row.prompt_id, row.sample_index) for row in again.rollouts)
    assert set(keys.values()) == {1}
    begun = [call for call in again.invocations if call.step == 3 and call.work is Work.GENERATE]
    assert len(begun) == 1, "the rollout of step 3 went on"


def test_weights_are_loaded_while_samples_are_drawn_and_no_token_is_lost(assets: Path, tmp_path: Path) -> None:
    start = opening(assets, tmp_path, schedule={"type": "async", "max_staleness": 2}, checkpoint={"every_steps": None})
    asyncio.run(execute(start))
    trace = read_trace(tmp_path / "trace")
    keys = Counter((row.step, row.prompt_id, row.sample_index) for row in trace.rollouts)
    assert len(keys) == STEPS * 4 * 2
    assert set(keys.values()) == {1}
    mixed = 0
    for row in trace.rollouts:
        spans = row.version_spans
        assert (spans[0].start, spans[-1].end) == (0, row.response_tokens)
        assert all(one.end == other.start for one, other in itertools.pairwise(spans))
        steps = [WeightVersion.parse(span.version).step for span in spans]
        assert steps == sorted(steps)
        assert row.step - 1 - steps[0] <= 2, "within the bound"
        mixed += len(spans) > 1
    assert mixed > 0
    for step in trace.steps:  # rounding alone where no weights are old: what was computed again is what was drawn with
        assert step.metrics["staleness_max"] <= 2
        assert step.metrics["rollout_logprob_difference"] < (1e-4 if step.metrics["staleness_max"] == 0 else 0.5)
