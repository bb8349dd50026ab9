"""From demonstrations and preferences to PPO: runs of the other types with the real parts, resumed, broken, used."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from safetensors.numpy import load_file

from fakes import saboteur
from fakes.live_runs import PausesAfter, fault_opening
from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.orchestrator import supervised
from rlhfless.orchestrator.driver import Outcome, execute
from rlhfless.orchestrator.host import Host, RunPaused
from rlhfless.orchestrator.recovery import Recovered
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.session import Session, open_session
from rlhfless.planning.preflight import preflight
from rlhfless.records import Experience, FinishReason, FunctionName, Work
from rlhfless.records.traces import read_trace
from rlhfless.rewards import RewardSample
from rlhfless.scaling.accounting import check_holdings
from rlhfless.spec import RewardModelSpec, RunSpec
from rlhfless.spec.data import DATA
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS, TRAIN, HELD_OUT = 12, 192, 64


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of written responses: counts as they should be, and the same with a word before."""
    folder = tmp_path_factory.mktemp("written")
    for name, count in (("train", TRAIN), ("held-out", HELD_OUT)):
        problems = draw_problems(TaskRecipe(), np.random.default_rng(count), count, held_out=name != "train")
        rows = (
            {"prompt": p.prompt, "response": p.answer, "chosen": p.answer, "rejected": f"sure {p.answer}"}
            for p in problems
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opening(run_type: str, assets: Path, written: Path, folder: Path, **changes: Any) -> Session:
    values = {
        "type": run_type,
        "name": "written",
        "model": {"path": str(assets / "model")},
        DATA[run_type]: {  # type: ignore[index]
            "path": str(written / "train.jsonl"),
            "held_out": {"path": str(written / "held-out.jsonl")},
        },
        "steps": STEPS,
        "prompts_per_step": 16,
        "mini_batches": 2,
        "optimizer": {"learning_rate": 3e-3},
        "learner": {"threads": 1},
        "checkpoint": {"every_steps": 4},
        "timeouts": {"drain_s": 3},
        "output": str(folder),
    }
    spec = RunSpec.model_validate(values | changes)
    folder.mkdir()
    console = Console("lines", run_type, spec.steps, stream=io.StringIO())
    return Session(preflight(spec), f"w-{uuid4().hex[:6]}", folder, console, MetricSinks([]))


def weights_of(start: Session) -> dict[str, np.ndarray]:
    return load_file(Path(start.checkpoints.location(start.spec.steps)) / "model.safetensors")


def assert_same(start: Session, other: Session) -> None:
    expected, ours = weights_of(start), weights_of(other)
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(expected[name], value) for name, value in ours.items())


@pytest.mark.seldom
def test_sft_learns_demonstrations_and_a_killed_learner_changes_nothing(
    assets: Path, written: Path, tmp_path: Path
) -> None:
    start = opening("sft", assets, written, tmp_path / "whole", evaluation={"every_steps": 6})
    outcome = asyncio.run(execute(start))
    assert outcome.after["loss"] < outcome.before["loss"] - 1.0, "of held-out responses, per token"
    trace = read_trace(start.folder / "trace")
    check_holdings(trace.holdings)
    assert {holding.function for holding in trace.holdings} == {FunctionName.LEARNER}
    assert {call.work for call in trace.invocations} == {Work.LEARN, Work.EVALUATE, Work.CHECKPOINT}
    assert sum(call.work is Work.EVALUATE for call in trace.invocations) == 3
    assert [record.step for record in trace.steps] == list(range(1, STEPS + 1))

    broken = opening("sft", assets, written, tmp_path / "broken")

    async def drive() -> Recovered:
        async with open_session(broken) as (run, first):

            async def kill() -> None:
                await saboteur.until(
                    lambda: run.latest.get("loss") is not None and run.checkpoints.newest() is not None
                )
                await saboteur.kill_learner(run)

            killing = asyncio.create_task(kill())
            recovered = await drive_steps(broken, run, first, supervised)
            await killing
            return recovered

    assert asyncio.run(drive()).replicas_lost == 1
    assert_same(start, broken)


@pytest.mark.seldom
def test_dpo_prefers_what_was_chosen_and_goes_on_bit_for_bit(assets: Path, written: Path, tmp_path: Path) -> None:
    start = opening("dpo", assets, written, tmp_path / "whole", dpo={"beta": 0.5})
    outcome = asyncio.run(execute(start))
    assert outcome.before["loss"] == pytest.approx(np.log(2), abs=1e-5), "policy and reference are the same"
    assert outcome.after["preference_accuracy"] >= 0.9
    assert outcome.after["preference_margin"] > 0
    trace = read_trace(start.folder / "trace")
    check_holdings(trace.holdings)
    assert {holding.function for holding in trace.holdings} == {FunctionName.LEARNER, FunctionName.REFERENCE}
    asked = [call for call in trace.invocations if call.function == FunctionName.REFERENCE]
    assert sum(call.sequences for call in asked) == 2 * (TRAIN + HELD_OUT), "each pair once: 12 steps of 16 of 192"

    paused = opening("dpo", assets, written, tmp_path / "paused", dpo={"beta": 0.5})
    with pytest.raises(RunPaused):
        asyncio.run(execute(dataclasses.replace(paused, host=PausesAfter(7))))
    resumed = asyncio.run(execute(paused))
    assert resumed.after == outcome.after
    assert_same(start, paused)


class Reads(Host):
    """Keeps the samples of the run."""

    def __init__(self) -> None:
        self.drawn_: list[Experience] = []

    def generated(self, run: RLRun, step: int, experience: Experience) -> None:
        self.drawn_.append(experience)


def test_preferences_become_a_reward_model_that_scores_a_ppo_run(assets: Path, written: Path, tmp_path: Path) -> None:
    judge = opening("reward_model", assets, written, tmp_path / "judge")
    outcome: Outcome = asyncio.run(execute(judge))
    assert outcome.before["preference_accuracy"] == 0.5, "a new head gives every response 0: all pairs tie"
    assert outcome.after["preference_accuracy"] >= 0.9
    reward = {"type": "reward_model", "path": outcome.checkpoint, "dtype": "float32"}

    (tmp_path / "ppo").mkdir()
    ppo = fault_opening(
        assets, tmp_path / "ppo", actors=1, steps=2, rewards=[reward], algorithm={"type": "ppo"},
        critic={"model": "reward_model"}, generation={"max_tokens": 24},
    )  # fmt: skip
    host = Reads()
    asyncio.run(execute(dataclasses.replace(ppo, host=host)))
    model = RewardModel(RewardModelSpec.model_validate(reward), threads=1)
    for experience in host.drawn_:
        for group in experience.groups:
            samples = [
                RewardSample(
                    group.prompt.text, s.text, s.model_tokens, FinishReason.STOP, {}, group.prompt.prompt_id, 0
                )
                for s in group.samples
            ]
            given = [sample.scored.total for sample in group.samples]
            assert given == pytest.approx(model.score(samples), abs=1e-4)
    assert len(host.drawn_) == 2
    rows = [json.loads(line) for line in (written / "held-out.jsonl").read_text().splitlines()]
    pairs = [
        model.score([RewardSample(row["prompt"], row[kind], 1, FinishReason.STOP, {}, "p", 0) for row in rows])
        for kind in ("chosen", "rejected")
    ]
    accuracy = float(np.mean(np.array(pairs[0]) > np.array(pairs[1])))
    assert accuracy == pytest.approx(outcome.after["preference_accuracy"]), "as it scores, so it was evaluated"
