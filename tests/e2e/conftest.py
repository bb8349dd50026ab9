"""A small policy with random weights, prompts for it, and one live run that the tests of a module share.

A process has one Ray at a time, so it ends with the module."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from fakes.live_runs import Live, Whole, fault_opening, spec_values
from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems, write_jsonl
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.session import Session, open_session
from rlhfless.planning.preflight import preflight
from rlhfless.records.traces import read_trace
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, train.jsonl and heldout.jsonl."""
    folder = tmp_path_factory.mktemp("assets")
    # Random weights seldom draw an end token, so lengths run up to max_tokens, with a long tail below.
    build_random(folder / "model", seed=0, size=dataclasses.replace(SMALLEST, max_positions=512))
    recipe = TaskRecipe()
    for name, count in (("train", 64), ("heldout", 8)):
        problems = draw_problems(recipe, np.random.default_rng(count), count, held_out=name == "heldout")
        write_jsonl(folder / f"{name}.jsonl", problems)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """A run with real Ray, vLLM and torch, one generation actor up."""
    spec = RunSpec.model_validate(spec_values(assets))
    folder = tmp_path_factory.mktemp("live")
    console = Console("lines", "live", spec.steps, stream=io.StringIO())
    session = Session(preflight(spec), "live-1", folder, console, MetricSinks([]))
    async with open_session(session) as (run, _):
        yield Live(run, folder)


@pytest.fixture(scope="session")
def whole(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    start = fault_opening(assets, folder, actors=1)
    asyncio.run(execute(start))
    newest = start.checkpoints.newest()
    assert newest is not None
    return Whole(read_trace(folder / "trace"), newest.notes.digest)
