"""PPO with the real parts: a critic that warms up, learns before the policy, is saved with it, and is resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fakes import saboteur
from fakes.live_runs import PausesAfter, check_one_awake, fault_opening, tokens_of
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.host import RunPaused
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import Session
from rlhfless.records import FunctionName, Work
from rlhfless.records.traces import read_trace
from rlhfless.scaling.accounting import check_holdings

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS, WARM_UP = 4, 1
PPO: dict[str, Any] = {
    "algorithm": {
        "type": "ppo",
        "lambda_actor": 0.95,
        "lambda_critic": 1.0,
        "kl": {"coefficient": 0.01, "where": "reward"},
    },
    "critic": {"warm_up_steps": WARM_UP, "epochs": 3, "optimizer": {"learning_rate": 1e-3}},
    "epochs": 2,
    "optimizer": {"learning_rate": 1e-4, "rate_schedule": "cosine"},
    "steps": STEPS,
    "checkpoint": {"every_steps": 2, "best": {"metric": "eval/test/has_seven_pass@2"}},
    "evaluation": {"every_steps": 2, "samples_per_prompt": 3, "pass_at": [1, 2]},
    "rewards": [
        {"type": "regex", "name": "has_seven", "pattern": "7"},
        {"type": "regex", "name": "has_eight", "pattern": "8", "sets": ["few"]},
    ],
}


def ppo(assets: Path) -> dict[str, Any]:
    """With two sets to train on, three prompts to one, and one to evaluate on."""
    train, held_out = str(assets / "train.jsonl"), str(assets / "heldout.jsonl")
    mixture = [{"name": "many", "path": train, "weight": 3}, {"name": "few", "path": train}]
    sets = [{"name": "test", "path": held_out, "max_prompts": 4}]
    return PPO | {"prompts": {"mixture": mixture, "draw_less": {}}, "evaluation": PPO["evaluation"] | {"sets": sets}}


def weights_of(start: Session) -> dict[str, np.ndarray]:
    """The policy's and the critic's, as they were saved last."""
    weights = {}
    for part in ("", FunctionName.CRITIC):
        file = Path(start.checkpoints.location(STEPS, part)) / "model.safetensors"
        weights |= {f"{part}:{name}": value for name, value in load_file(file).items()}
    return weights


@pytest.fixture(scope="module")
def uninterrupted(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    start = fault_opening(assets, tmp_path_factory.mktemp("ppo"), actors=1, **ppo(assets))
    outcome = asyncio.run(execute(start))
    figures = ("", "_greedy", "_pass@1", "_pass@2")
    expected = {"reward_mean", *(f"test/has_seven{figure}" for figure in figures)}
    assert outcome.after.keys() == outcome.before.keys() == expected
    assert outcome.after["test/has_seven_pass@1"] == pytest.approx(outcome.after["test/has_seven"])
    assert outcome.best_checkpoint in {start.checkpoints.location(2), start.checkpoints.location(STEPS)}
    return start


def test_what_a_step_of_ppo_does(uninterrupted: Session) -> None:
    trace = read_trace(uninterrupted.folder / "trace")
    check_holdings(trace.holdings)
    assert any(holding.function == FunctionName.CRITIC for holding in trace.holdings), "it is billed"
    for record in trace.steps:
        calls = [call for call in trace.invocations if call.step == record.step]
        learned = {call.function: call for call in calls if call.work is Work.LEARN}
        assert (FunctionName.LEARNER in learned) == (record.step > WARM_UP)
        assert any(call.work is Work.PUBLISH for call in calls) == (record.step > WARM_UP)
        values = [call for call in calls if call.function == FunctionName.CRITIC and call.work is Work.LOGPROBS]
        assert sum(call.sequences for call in values) == 8
        assert min(call.start_s for call in values) < max(c.end_s for c in calls if c.work is Work.GENERATE)
        critic = learned[FunctionName.CRITIC]
        assert all(call.end_s <= critic.start_s for call in values)
        if FunctionName.LEARNER in learned:
            assert critic.end_s <= learned[FunctionName.LEARNER].start_s
            assert learned[FunctionName.LEARNER].sequences == 2 * 8, "two passes"
        assert critic.sequences == 3 * 8
        assert np.isfinite([record.metrics["value_loss"], record.metrics["critic_gradient_norm"]]).all()
        drawn = {row.prompt_id for row in trace.rollouts if row.step == record.step}
        assert sorted(name.partition("/")[0] for name in drawn) == ["few", "many", "many", "many"]
    drawn_with = {row.version_spans[0].version for row in trace.rollouts if row.step <= WARM_UP + 1}
    assert len(drawn_with) == 1, "nothing is published while the critic warms up"


def kill_the_critic_at_random(step: int) -> saboteur.Sabotage:
    """Somewhere between the begin of a step's generation and its end."""
    random = np.random.default_rng(int(os.environ.get("RLHFLESS_CHAOS_SEED", "0")) + step)

    async def kill(run: RLRun) -> None:
        await saboteur.generating(run, step)
        await asyncio.sleep(float(random.uniform(0.0, 2.0)))
        await saboteur.kill_critic(run)

    return kill


@pytest.mark.seldom
def test_a_run_that_loses_its_critic_and_is_resumed_ends_with_the_same_bits(
    assets: Path, uninterrupted: Session, tmp_path: Path
) -> None:
    start = fault_opening(assets, tmp_path, actors=1, recovery={"lease_s": 12, "heartbeat_s": 6}, **ppo(assets))
    with pytest.raises(RunPaused):
        asyncio.run(saboteur.drive(dataclasses.replace(start, host=PausesAfter(3)), kill_the_critic_at_random(2)))
    recovered, _ = asyncio.run(saboteur.drive(start, kill_the_critic_at_random(4)))
    assert recovered.replicas_lost >= 1
    broken, whole = read_trace(tmp_path / "trace"), read_trace(uninterrupted.folder / "trace")
    assert {decision.step for decision in broken.decisions if decision.kind == "recover"} & {2, 3}, "the first loss"
    assert len(broken.rollouts) == len(whole.rollouts), "no sample is lost, and none counts twice"
    assert tokens_of(broken) == tokens_of(whole)
    expected, ours = weights_of(uninterrupted), weights_of(start)
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(expected[name], value) for name, value in ours.items())


@pytest.mark.seldom
def test_functions_that_take_turns_learn_what_they_learned_side_by_side(
    assets: Path, uninterrupted: Session, tmp_path: Path
) -> None:
    """Policy, critic, reference and engine on one device: never two of them are awake."""
    start = fault_opening(assets, tmp_path, actors=1, placement={"turns": True, "devices": 1}, **ppo(assets))
    asyncio.run(execute(start))
    trace = read_trace(tmp_path / "trace")
    assert tokens_of(trace) == tokens_of(read_trace(uninterrupted.folder / "trace"))
    expected, ours = weights_of(uninterrupted), weights_of(start)
    assert all(np.array_equal(expected[name], value) for name, value in ours.items())
    assert {holding.function for holding in trace.holdings} > {FunctionName.CRITIC, FunctionName.REFERENCE}
    check_one_awake(trace)
