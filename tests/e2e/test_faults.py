"""Whatever dies in a run, it ends with the very weights of a run in which nothing died."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import saboteur
from conftest import spec_values

from rlhfless.loop.driver import Driver
from rlhfless.loop.opening import Opening, opened
from rlhfless.loop.preflight import preflight
from rlhfless.loop.run import Run
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.accounting import check_holdings
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = 8

IN_GENERATION = {
    1: saboteur.kill_actor,
    2: saboteur.stop_engine,
    3: saboteur.kill_learner,
    4: saboteur.kill_scoring,
    5: saboteur.stop_actor,
    6: saboteur.kill_rank,
}


def opening(assets: Path, folder: Path, **changes: Any) -> Opening:
    values = spec_values(
        assets,
        algorithm={},
        weights={},
        # Lengths differ, so every step moves the weights.
        rewards=[{"type": "length_penalty", "free_tokens": 0, "max_tokens": 400}],
        steps=STEPS,
        prompts_per_step=4,
        # So that the policy, whose end token is rare, draws long enough to be hit.
        generation={"max_tokens": 400, "progress_interval_s": 0.1},
        optimizer={"learning_rate": 1e-3},
        scaling={"generation": {"min_actors": 2, "max_actors": 2}},
        checkpoint={"every_steps": 2},
        recovery={"lease_s": 6, "beat_s": 3},
        timeouts={"drain_s": 3},
    )
    spec = RunSpec.model_validate(values | changes)
    console = Console("lines", "faults", spec.steps, stream=io.StringIO())
    return Opening(spec, preflight(spec), folder.name, folder, console, MetricSinks([]))


async def sabotage(run: Run) -> None:
    for step, act in IN_GENERATION.items():
        await saboteur.generating(run, step)
        await act(run)


def cut_file_before(run: Run, step: int) -> None:
    """Let the weights of `step` be damaged before any actor has read them, once."""
    sync = run.sync

    async def damaged(call: Any) -> None:
        if call.step == step and run.published.version.step == step - 1:
            run.sync = sync  # type: ignore[method-assign]
            await saboteur.cut_store_file(run)
        await sync(call)

    run.sync = damaged  # type: ignore[method-assign]


async def drive(start: Opening, *, break_things: bool) -> tuple[int, str]:
    """(faults mended by doing a step again, digest of the last weights)."""
    async with opened(start) as (run, first):
        saboteurs: asyncio.Task[None] | None = None
        if break_things:
            cut_file_before(run, STEPS)
            saboteurs = asyncio.create_task(sabotage(run))
        mended = await Driver(start).drive(run, first)
        if saboteurs is not None:
            assert saboteurs.done(), "a step ended before it was broken"
            saboteurs.result()
        return mended, run.published.version.digest


def keys(trace: Trace) -> Counter[tuple[int, str, int]]:
    return Counter((row.step, row.prompt_id, row.sample_index) for row in trace.rollouts)


def test_a_run_that_is_broken_in_every_way_ends_as_if_nothing_had_happened(assets: Path, tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    _, expected = asyncio.run(drive(opening(assets, tmp_path / "whole"), break_things=False))
    mended, digest = asyncio.run(drive(opening(assets, tmp_path / "broken"), break_things=True))
    assert digest == expected
    assert mended >= 4  # learner, rank, scoring, store; a lost actor's work moves without the step being done again
    whole, broken = read_trace(tmp_path / "whole" / "trace"), read_trace(tmp_path / "broken" / "trace")
    assert keys(broken) == keys(whole)
    assert set(keys(broken).values()) == {1}
    tokens = {(row.step, row.prompt_id, row.sample_index): row.token_ids for row in whole.rollouts}
    assert all(row.token_ids == tokens[row.step, row.prompt_id, row.sample_index] for row in broken.rollouts)
    assert [step.step for step in broken.steps] == list(range(1, STEPS + 1))
    assert sum(decision.kind == "recover" for decision in broken.decisions) == mended
    check_holdings(broken.holdings)
    with contextlib.suppress(psutil.NoSuchProcess):
        names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        assert not [name for name in names if "ServeReplica" in name or "vllm.loop" in name]
