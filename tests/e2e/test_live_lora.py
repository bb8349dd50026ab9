"""A run that trains an adapter, with real Ray, vLLM and torch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import saboteur
from fakes.live_runs import fault_opening
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session
from rlhfless.records import WeightVersion, Work
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 4


def opening(assets: Path, folder: Path) -> Session:
    folder.mkdir()
    model = {"path": str(assets / "model"), "lora": {"rank": 8, "alpha": 16}}
    algorithm = {"type": "grpo", "kl": {"coefficient": 0.01}}
    options = {"algorithm": algorithm, "optimizer": {"learning_rate": 1e-2}}
    return fault_opening(assets, folder, actors=1, model=model, steps=STEPS, **options)


async def kill_learner_at_work(run: RLRun) -> None:
    await saboteur.generating(run, 4)  # a checkpoint of step 2 exists
    await saboteur.kill_learner(run)


def test_an_adapter_is_trained_published_and_resumed_from_its_checkpoint(assets: Path, tmp_path: Path) -> None:
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    start = opening(assets, calm)
    asyncio.run(execute(start))
    newest = start.checkpoints.newest()
    assert newest is not None
    files = {file.name for file in Path(newest.location).iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files

    trace = read_trace(calm / "trace")
    digests = {
        row.step: {WeightVersion.parse(span.version).digest for span in row.version_spans} for row in trace.rollouts
    }
    assert [len(digests[step]) for step in range(1, STEPS + 1)] == [1] * STEPS
    assert len(set.union(*digests.values())) == STEPS, "each step generates with the weights of the one before"
    model_bytes = (assets / "model" / "model.safetensors").stat().st_size
    published = {call.size_bytes for call in trace.invocations if call.work is Work.PUBLISH}
    assert published
    assert max(published) < model_bytes / 4, "adapters alone"
    assert "reference" not in {holding.function for holding in trace.holdings}
    computed = [call for call in trace.invocations if call.work is Work.LOGPROBS]
    assert {call.function for call in computed} == {"learner"}
    assert trace.steps[-1].metrics["reference_kl"] > 1e-4
    # The engine computes with the adapter that the learner learns with.
    assert all(step.metrics["rollout_logprob_difference_max"] < 1e-3 for step in trace.steps)

    recovered, digest = asyncio.run(saboteur.drive(opening(assets, broken), kill_learner_at_work))
    assert recovered.replicas_lost == 1
    assert digest == newest.notes.digest
