"""Specs and checks of runs with the real engine."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.host import Host, StopCause, Verdict
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session
from rlhfless.orchestrator.step import rollout, train
from rlhfless.planning.preflight import preflight
from rlhfless.records import FunctionName, ReplicaState, StepRecord, WeightVersion
from rlhfless.records.traces import Trace
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks


def spec_values(assets: Path, **changes: Any) -> dict[str, Any]:
    """Return the values of a spec for the random policy. `changes` replace whole sections."""
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
        "weights": {"transport": "http"},
        "logging": {"console": "lines", "record_tokens": True},
        "output": str(assets / "runs"),
    }
    return values | changes


EXAMPLES = 40
"""Number of problems of seven tokens that precede each prompt of `write_prompts`."""


def write_prompts(path: Path) -> None:
    """Write sixteen problems, all preceded by the same forty."""
    problems = draw_problems(TaskRecipe(), np.random.default_rng(1), EXAMPLES + 16, held_out=False)
    before = "".join(example.prompt for example in problems[:EXAMPLES])
    rows = [{"id": problem.id, "prompt": before + problem.prompt} for problem in problems[EXAMPLES:]]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


async def train_step(run: RLRun, step: int) -> StepRecord:
    """Run a whole step, as the schedule `sync` does."""
    context = run.begin(step)
    return await train(run, context, await rollout(run, context))


@dataclasses.dataclass
class Live:
    """The shared run, and the folder of its trace."""

    run: RLRun
    folder: Path


class PausesAfter(Host):
    """Pauses a run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: BaseRun, step: int) -> Verdict:
        return Verdict(stop=StopCause.PAUSE if step == self._step else None)


FAULT_STEPS = 8


def fault_values(assets: Path, actors: int, **changes: Any) -> dict[str, Any]:
    """Return the values of a spec for fault tests. All these runs generate the same samples and learn the same
    weights."""
    values = spec_values(
        assets,
        algorithm={},
        weights={},
        # Lengths differ, so every step changes the weights.
        rewards=[{"type": "length_penalty", "free_tokens": 0, "max_tokens": 400}],
        steps=FAULT_STEPS,
        prompts_per_step=4,
        optimizer={"learning_rate": 1e-3},
        # Makes all weights bit-identical on any number of cores.
        learner={"threads": 1},
        # The test decides which actors join and leave.
        scaling={"generation": {"min_actors": actors, "max_actors": actors}},
        checkpoint={"every_steps": 2},
        timeouts={"drain_s": 3},
    )
    return values | changes


@dataclasses.dataclass
class Whole:
    """A run of FAULT_STEPS steps with one actor and without faults."""

    trace: Trace
    digest: str
    """Digest of its last weights."""

    def digest_after(self, step: int) -> str:
        """Return the digest of the weights after `step`, for comparison with runs that end earlier."""
        rows = [row for row in self.trace.rollouts if row.step == step + 1]
        (label,) = {span.version for row in rows for span in row.version_spans}
        return WeightVersion.parse(label).digest


def tokens_of(trace: Trace) -> dict[tuple[int, str, int], Any]:
    """Return the tokens of each sample."""
    return {(row.step, row.prompt_id, row.sample_index): row.token_ids for row in trace.rollouts}


def check_one_awake(trace: Trace) -> None:
    """Assert that no two functions that share a device's memory are awake at the same time."""
    states = (ReplicaState.STALE, ReplicaState.SERVING)
    awake = [row for row in trace.holdings if row.state in states and row.function != FunctionName.SCORING]
    for one in awake:
        for other in awake:
            if one.function != other.function:
                assert one.end_s <= other.start_s or other.end_s <= one.start_s, (one, other)


def fault_opening(assets: Path, folder: Path, actors: int, **changes: Any) -> Session:
    spec = RunSpec.model_validate(fault_values(assets, actors, **changes))
    console = Console("lines", "faults", spec.steps, stream=io.StringIO())
    # Other test processes have runs in folders of the same name, and all runs of a machine share its memory.
    run_id = f"{folder.name.replace('_', '-')}-{uuid4().hex[:6]}"
    return Session(preflight(spec), run_id, folder, console, MetricSinks([]))
