"""Prompts computed apart, in live runs with real engines: the same samples as with one pool, each prompt computed once,
and nothing lost with an actor of either pool."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.live_runs import spec_values, tokens_of, write_prompts
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session
from rlhfless.planning.preflight import preflight
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS
from rlhfless.records import FunctionName, Work
from rlhfless.records.traces import Trace, read_trace
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 3
KILLED = {2: FunctionName.PREFILL, 3: FunctionName.GENERATION}
"""Steps in which an actor of the pool is killed."""


def session(assets: Path, folder: Path, **scaling: Any) -> Session:
    folder.mkdir()
    write_prompts(folder / "train.jsonl")
    spec = RunSpec.model_validate(
        spec_values(
            assets,
            prompts={"path": str(folder / "train.jsonl")},
            generation={"max_tokens": 60, "progress_interval_s": 0.05},
            # Lengths differ, so every step moves the weights.
            rewards=[{"type": "length_penalty", "free_tokens": 0, "max_tokens": 60}],
            weights={},
            steps=STEPS,
            scaling=scaling,
        )
    )
    console = Console("lines", "prefill", spec.steps, stream=io.StringIO())
    run_id = f"prefill-{folder.name}-{os.getpid()}"
    return Session(preflight(spec), run_id, folder, console, MetricSinks([]))


def drawn(opened: Session) -> Trace:
    asyncio.run(execute(opened))
    return read_trace(opened.folder / "trace")


ONE = {"generation": {"min_actors": 1, "max_actors": 1}}
APART = ONE | {"prefill": {"min_actors": 1, "max_actors": 1, "kv_connector": "folder"}}


@pytest.fixture(scope="module")
def one(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The run with one pool."""
    return drawn(session(assets, tmp_path_factory.mktemp("one") / "run", **ONE))


def check_same_samples(trace: Trace, one: Trace) -> None:
    """Tokens are equal. Logprobs are so but for the rounding of sums, whose order depends on what is in a batch."""
    tokens, expected = tokens_of(trace), tokens_of(one)
    assert tokens.keys() == expected.keys()
    assert all(np.array_equal(tokens[key], expected[key]) for key in expected)
    logprobs = {(row.step, row.prompt_id, row.sample_index): row.logprobs for row in trace.rollouts}
    for row in one.rollouts:
        assert logprobs[row.step, row.prompt_id, row.sample_index] == pytest.approx(row.logprobs, abs=1e-5)


@pytest.mark.parametrize("connector", ["folder", "nixl"])
def test_prompts_are_computed_apart_and_samples_are_the_same(
    assets: Path, tmp_path: Path, one: Trace, connector: str
) -> None:
    trace = drawn(session(assets, tmp_path / "apart", **ONE, prefill=APART["prefill"] | {"kv_connector": connector}))
    check_same_samples(trace, one)
    calls = [call for call in trace.invocations if call.work is Work.PRECOMPUTE]
    computed = [call for call in calls if call.function == FunctionName.PREFILL]
    taken = [call for call in calls if call.function == FunctionName.GENERATION]
    assert {call.step for call in computed} == set(range(1, STEPS + 1))
    assert sum(call.sequences for call in computed) == sum(call.sequences for call in taken) == STEPS * 8
    # Of each prompt an actor that draws computes what is beyond its last whole block.
    for call in taken:
        assert call.input_tokens - call.cached_tokens <= call.sequences * CPU_BLOCK_TOKENS
    for call in (call for call in trace.invocations if call.work is Work.GENERATE):
        assert call.input_tokens - call.cached_tokens <= call.sequences * CPU_BLOCK_TOKENS
    # The prompts of a step share a prefix, which is computed once.
    longest = max(row.prompt_tokens for row in one.rollouts)
    for step in range(1, STEPS + 1):
        of_step = [call for call in computed if call.step == step]
        assert sum(call.input_tokens - call.cached_tokens for call in of_step) < 3 * longest


@pytest.mark.seldom
def test_a_killed_actor_of_either_pool_loses_nothing(
    assets: Path, tmp_path: Path, one: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = APART | {"generation": {"min_actors": 2, "max_actors": 2}}
    opened = session(assets, tmp_path / "killed", **scaling)
    killed: dict[FunctionName, str] = {}
    kill_actors(killed, monkeypatch)
    trace = drawn(opened)
    check_same_samples(trace, one)
    assert killed.keys() == set(KILLED.values())
    for pool, name in killed.items():
        held = {row.replica for row in trace.holdings if row.function == pool}
        assert name in held
        assert held - {name}, "it was not replaced"


def kill_actors(killed: dict[FunctionName, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills the processes of an actor when its step is drawn, as soon as it has been asked for something; its name goes
    to `killed`."""
    usual = RLRun.generate

    def generate(run: RLRun, request: Any, **options: Any) -> GenerationStage:
        pool = KILLED.get(request.call.step)
        if pool is not None and request.work is Work.GENERATE and pool not in killed:
            actor = run.pools[pool].serving()[0]
            killed[pool] = actor.name
            asyncio.get_running_loop().call_later(0.05, kill, actor)
        return usual(run, request, **options)

    def kill(actor: Any) -> None:
        for pid in actor.info.pids:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(RLRun, "generate", generate)
