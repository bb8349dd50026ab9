"""Steps with teachers: the real loop, with fake functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.fake_run import OLD_LOGPROB, Scene
from rlhfless.orchestrator.step import train
from rlhfless.records import Prompt

DISTILL: dict[str, Any] = {"algorithm": "distill", "rewards": []}
BIG = {"name": "big", "path": "y"}


async def learned(scene: Scene) -> tuple[Any, Any]:
    """Return the batch that the learner got, and the record of the step."""
    scene.learner.gate.set()
    context, experience = await scene.rolled_out(1)
    record = await train(scene.run, context, experience)
    (batch,) = scene.learner.learned
    return batch, record


async def test_a_run_without_rewards_learns_from_its_teacher(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **DISTILL, teachers=[BIG])
    batch, record = await learned(scene)
    assert [call[:2] for call in scene.calls] == [
        ("teacher_big", "compute"),
        ("learner", "evaluate"),
        ("learner", "learn"),
        ("learner", "publish"),
    ]
    # The fake teacher's first output is 1 for each token.
    np.testing.assert_allclose(batch.advantages[batch.response_mask], 1 - OLD_LOGPROB)
    assert record.metrics["reverse_kl/big"] == pytest.approx(OLD_LOGPROB - 1)
    assert not {"reward_mean", "reward_std", "groups_without_signal"} & record.metrics.keys()


async def test_the_term_is_added_to_another_algorithms_advantage(tmp_path: Path) -> None:
    plain, _ = await learned(Scene(tmp_path / "plain"))
    rewards = [{"type": "exact_match"}]
    term = {"algorithm": {"type": "grpo", "distill": {"coefficient": 0.5}}, "rewards": rewards, "teachers": [BIG]}
    both, record = await learned(Scene(tmp_path / "both", **term))
    mask = both.response_mask
    np.testing.assert_allclose(both.advantages[mask] - plain.advantages[mask], 0.5 * (1 - OLD_LOGPROB), rtol=1e-6)
    assert record.metrics["reward_mean"] == 0.5


async def test_a_set_without_a_teacher_has_no_term(tmp_path: Path) -> None:
    mixture = {"mixture": [{"name": "math", "path": "m", "weight": 1}, {"name": "code", "path": "c", "weight": 1}]}
    teachers = [BIG | {"sets": ["math"]}, {"name": "other", "path": "z", "weight": 2.0}]
    prompts = [Prompt("code/p", (1, 2), "", source="code"), Prompt("math/q", (1, 2), "", source="math")]
    scene = Scene(tmp_path, prompts, **DISTILL, prompts=mixture, teachers=teachers)
    batch, record = await learned(scene)
    big, other = scene.teachers
    assert (big.asked, other.asked) == ([], [("compute", 1)])
    np.testing.assert_allclose(batch.advantages[batch.response_mask], 2 * (1 - OLD_LOGPROB))
    assert "reverse_kl/big" not in record.metrics


async def test_a_teacher_with_a_prompt_of_its_own_reads_it_before_the_same_tokens(tmp_path: Path) -> None:
    prompts = [Prompt("p", (1, 2), "", read_by={"teacher_hinted": (1, 7, 8, 2)})]
    hinted = {"name": "hinted", "path": "self", "prompt_field": "hint"}
    scene = Scene(tmp_path, prompts, **DISTILL, teachers=[hinted])
    batch, _ = await learned(scene)
    (read,) = scene.teachers[0].computed_on
    assert read.tokens[:4].tolist() == [1, 7, 8, 2]
    assert batch.tokens[:2].tolist() == [1, 2]
    np.testing.assert_array_equal(read.tokens[read.response_mask], batch.tokens[batch.response_mask])
    np.testing.assert_allclose(batch.advantages[batch.response_mask], 1 - OLD_LOGPROB)


async def test_a_repeated_step_asks_the_teacher_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **DISTILL, teachers=[BIG])
    scene.learner.gate.set()
    context, experience = await scene.rolled_out(1)
    (teacher,) = scene.teachers
    compute = scene.run.per_token_outputs(context.call)["teacher_big"]
    again = await compute(experience.groups)
    assert teacher.asked == [("compute", 1)]
    for group, values in zip(experience.groups, again, strict=True):
        for sample, value in zip(group.samples, values, strict=True):
            np.testing.assert_array_equal(sample.outputs["teacher_big"], value)
