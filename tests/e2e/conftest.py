"""A small policy with random weights, prompts for it, and one live run that the tests of a session share."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.bundled.task import TaskRecipe, draw_problems, write_jsonl
from rlhfless.loop.opening import Opening, opened
from rlhfless.loop.preflight import preflight
from rlhfless.loop.run import Run
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


def spec_values(assets: Path, **changes: Any) -> dict[str, Any]:
    """A spec for the random policy; `changes` replace whole sections."""
    values: dict[str, Any] = {
        "name": "test",
        "model": {"path": str(assets / "model")},
        "prompts": {
            "path": str(assets / "train.jsonl"),
            "held_out": {"path": str(assets / "heldout.jsonl")},
        },
        "rewards": [{"type": "regex", "name": "has_seven", "pattern": "7"}],
        "algorithm": {"kl": {"coefficient": 0.01}},
        "generation": {"max_tokens": 400, "progress_interval_s": 0.1},
        "steps": 2,
        "prompts_per_step": 8,
        "samples_per_prompt": 2,
        "mini_batches": 2,
        "optimizer": {"learning_rate": 1e-4},
        "scaling": {"generation": {"min_actors": 1, "max_actors": 2}},
        "weights": {"store": "http"},
        "logging": {"console": "lines", "record_tokens": True},
        "output": str(assets / "runs"),
    }
    return values | changes


@dataclasses.dataclass
class Live:
    """The shared run, and where its trace goes."""

    run: Run
    folder: Path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def live(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """A run with real Ray, vLLM and torch, one generation actor up."""
    spec = RunSpec.model_validate(spec_values(assets))
    folder = tmp_path_factory.mktemp("live")
    console = Console("lines", "live", spec.steps, stream=io.StringIO())
    opening = Opening(spec, preflight(spec), "live-1", folder, console, MetricSinks([]))
    async with opened(opening) as (run, _):
        yield Live(run, folder)
