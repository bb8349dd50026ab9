"""Dynamic sampling: the prompts that a step redraws, the groups it learns from, and the repetition of a step."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import fake_run as scenes
from fakes.fake_cluster import group, prompt, runner
from fakes.fake_run import until
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.experience import LOGPROBS, has_signal, usable_of, with_redraws, with_signal
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.orchestrator.step import rollout, train
from rlhfless.orchestrator.token_batches import TokenBatches
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Experience, Group, Score, Work
from rlhfless.spec import AlgorithmSpec, DAPOSpec, RLOOSpec, ScoringSpec

EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


def scored(name: str, rewards: tuple[float, ...]) -> Group:
    return group(name, len(rewards)).adding(score=[Score(reward, {"r": reward}) for reward in rewards])


def request_for(*names: str) -> RolloutRequest:
    prompts = tuple(prompt(name) for name in names)
    return RolloutRequest(Call("run", 1, 1), prompts, 2, None, Work.GENERATE, 0, 1)  # type: ignore[arg-type]


def run_redraws(easy: set[str], names: list[str], prompts: int, redraws: int) -> tuple[Experience, list[list[str]]]:
    """Return the experience of a step of the first `prompts` names, and the prompts of each redraw. Groups of `easy`
    prompts have equal rewards."""
    rounds: list[list[str]] = []

    def drawn(request: RolloutRequest) -> Experience:
        ids = [each.prompt_id for each in request.prompts]
        return Experience(tuple(scored(each, EQUAL if each in easy else DIFFERENT) for each in sorted(ids)))

    async def draw(request: RolloutRequest) -> Experience:
        rounds.append([each.prompt_id for each in request.prompts])
        return drawn(request)

    request = request_for(*names[:prompts])
    order = PromptOrder([prompt(name) for name in names], 7, shuffle=True)
    return asyncio.run(with_redraws(drawn(request), request, order, redraws, draw, ScoringSpec())), rounds


def test_a_step_draws_as_many_others_as_give_what_it_lacks() -> None:
    names = list("abcdefgh")
    found, rounds = run_redraws({"a", "c"}, names, 4, redraws=5)
    # Half of the four had a signal, so four more are needed to get the two missing ones.
    (others,) = rounds
    assert sorted(others) == list("efgh")
    assert [each.prompt.prompt_id for each in found.groups] == names
    assert [each.prompt.prompt_id for each in with_signal(found).groups] == list("bdefgh")


def test_without_any_signal_it_draws_no_more_than_a_step_at_a_time() -> None:
    names = list("abcdefgh")
    found, rounds = run_redraws(set("abc") | set("defgh"), names, 3, redraws=2)
    assert [len(each) for each in rounds] == [3, 2]
    assert len(found.groups) == 8


@given(
    st.sets(st.sampled_from(list("abcdefghij"))),
    st.integers(1, 6),
    st.integers(0, 4),
)
def test_redraws_are_bounded_and_never_of_the_same_prompt(easy: set[str], prompts: int, redraws: int) -> None:
    names = list("abcdefghij")
    found, rounds = run_redraws(easy, names, prompts, redraws)
    drawn = [*names[:prompts], *(name for each in rounds for name in each)]
    assert len(rounds) <= redraws
    assert len(drawn) == len(set(drawn)) == len(found.groups)
    signals = sum(map(has_signal, found.groups))
    assert signals < 2 * prompts
    # It ends early only with a full batch or without any prompt left.
    assert len(rounds) == redraws or signals >= prompts or len(drawn) == len(names)
    assert run_redraws(easy, names, prompts, redraws)[1] == rounds


def test_a_step_without_any_signal_keeps_its_groups(caplog: pytest.LogCaptureFixture) -> None:
    found, rounds = run_redraws({"a", "b", "c"}, ["a", "b", "c"], 1, redraws=2)
    assert len(rounds) == 2
    assert with_signal(found) is found
    assert "learns from 0 of 1 prompts: 2 redraws" in caplog.text


def with_failures(name: str, rewards: tuple[float | None, ...], reward: str = "r") -> Group:
    """Return a group with these rewards. None: a sample whose only reward failed."""
    scores = [Score(0.0, {}, {reward: "down"}) if one is None else Score(one, {"r": one}) for one in rewards]
    return group(name, len(rewards)).adding(score=scores)


def redrawn_of(
    rewards: dict[str, tuple[float | None, ...]], wanted: int, redraws: int = 9, reward: str = "r", **scoring: Any
) -> tuple[Experience, Experience]:
    """Return what a step of the first `wanted` names generates, and what it learns from."""
    settings = ScoringSpec(**{"max_failed": 1.0, **scoring})

    def drawn(request: RolloutRequest) -> Experience:
        names = sorted(each.prompt_id for each in request.prompts)
        return Experience(tuple(with_failures(name, rewards[name], reward) for name in names))

    async def draw(request: RolloutRequest) -> Experience:
        return drawn(request)

    names = list(rewards)
    order = PromptOrder([prompt(name) for name in names], 7, shuffle=False)
    request = request_for(*names[:wanted])
    found = asyncio.run(with_redraws(drawn(request), request, order, redraws, draw, settings))
    return found, with_signal(usable_of(found, settings))


SIGNAL = (0.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ((1.0, 1.0, 1.0, None), False),
        ((0.0, 0.0, None, 0.0), False),
        ((None, 1.0, None, None), False),
        ((None, None, None, None), False),
        ((1.0, 0.0, None, None), True),
        ((-1.0, -1.0, None, -1.0), False),
        ((0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, None, None), False),
        ((0.5, 0.5, 0.5 + 2**-8, None), True),
        ((1e6, 1e6 + 1e-3, None, None), True),
        ((-0.0, 0.0, 0.0, None), False),
    ],
    ids=lambda value: str(value),
)
def test_a_failed_reward_is_no_signal(rewards: tuple[float | None, ...], signal: bool) -> None:
    """Without another signal the group is redrawn and excluded from learning."""
    found, learned = redrawn_of({"a": rewards, "b": SIGNAL, "c": SIGNAL}, wanted=2)
    assert len(found.groups) == (2 if signal else 3)
    assert [each.prompt.prompt_id for each in learned.groups] == (["a", "b"] if signal else ["b", "c"])
    assert all(not sample.scored.failures for sample in learned.samples)


def test_with_a_fifth_of_rewards_failed_all_wanted_prompts_are_learned_from() -> None:
    """With 32 prompts of four samples, half of which would differ without failures."""
    numbers = random.Random(0)
    rewards = {}
    for number in range(400):
        solved = numbers.choice((0.0, 0.5, 1.0))
        of_samples = [float(numbers.random() < solved) for _ in range(4)]
        rewards[f"p{number:03d}"] = tuple(None if numbers.random() < 0.2 else one for one in of_samples)
    _, learned = redrawn_of(rewards, wanted=32)
    assert len(learned.groups) >= 32
    assert all(has_signal(each) for each in learned.groups)


def test_a_failure_that_counts_0_by_the_spec_is_a_signal_and_a_broken_logprob_is_none() -> None:
    """With `on_failure: zero` the sample is used for learning; without its logprobs it cannot be."""
    rewards = {"a": (1.0, 1.0, None, 1.0), "b": SIGNAL, "c": SIGNAL}
    assert len(redrawn_of(rewards, 2, on_failure="zero")[0].groups) == 2
    assert len(redrawn_of(rewards, 2, on_failure="zero", reward=LOGPROBS)[0].groups) == 3


def test_a_step_that_its_failures_end_draws_no_more() -> None:
    found, _ = redrawn_of({"a": (None, None), "b": (None, None), "c": (0.0, 1.0)}, wanted=2, max_failed=0.5)
    assert len(found.groups) == 2


class Scene(scenes.Scene):
    """A run with an algorithm."""

    def __init__(self, folder: Path, algorithm: AlgorithmSpec) -> None:
        super().__init__(folder)
        self.run.spec = self.run.spec.model_copy(update={"algorithm": algorithm})
        self.run.batches = TokenBatches(self.run.spec, self.run.history)
        self.learner.gate.set()

    def scaler(self) -> Any:
        return SimpleNamespace(**vars(super().scaler()), even_split=lambda: runner(self.actors))


async def test_the_loop_learns_from_the_redrawn_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scenes.scored

    def equal_for_p(groups: list[Group]) -> list[list[Score]]:
        return [[Score(1.0, {"r": 1.0})] * 2 if each.prompt.prompt_id == "p" else whole([each])[0] for each in groups]

    monkeypatch.setattr(scenes, "scored", equal_for_p)
    scene = Scene(tmp_path, DAPOSpec(max_redraws=2))
    context = scene.run.begin(1)
    drawing = asyncio.create_task(rollout(scene.run, context))
    actor = scene.actors["a"]
    await until(lambda: bool(actor.running))
    actor.finish("p", tokens=4)
    await until(lambda: bool(actor.running))
    (other,) = {key[0] for key in actor.running}
    assert other in ("q", "r")
    actor.finish(other, tokens=6)
    experience = await drawing
    record = await train(scene.run, context, experience)
    assert {sample.key[0] for sample in experience.samples} == {"p", other}
    (batch,) = scene.learner.learned
    assert batch.denominators.groups == 1
    assert batch.response_lengths.tolist() == [6, 6]
    assert record.metrics["redrawn_groups"] == 1.0
    assert record.metrics["groups_without_signal"] == 0.5
    assert record.metrics["reward_mean"] == 0.75  # of all generated samples: 1, 1, 0, 1
    assert {rollout.prompt_id for rollout in scene.journal.rollouts(1)} == {"p", other}
    # When repeated, all of it comes from the journal: nothing runs on the actor.
    again = await rollout(scene.run, scene.run.begin(1))
    assert [sample.key for sample in again.samples] == [sample.key for sample in experience.samples]


async def test_prompts_without_signal_are_left_out_of_any_group_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scenes.scored

    def equal_for_p(groups: list[Group]) -> list[list[Score]]:
        return [[Score(1.0, {"r": 1.0})] * 2 if each.prompt.prompt_id == "p" else whole([each])[0] for each in groups]

    monkeypatch.setattr(scenes, "scored", equal_for_p)
    learned = {}
    for leave_out in (True, False):
        scene = Scene(tmp_path / str(leave_out), RLOOSpec(leave_out_without_signal=leave_out))
        scene.run.spec = scene.run.spec.model_copy(update={"prompts_per_step": 2})
        context = scene.run.begin(1)
        drawing = asyncio.create_task(rollout(scene.run, context))
        actor = scene.actors["a"]
        for name in ("p", "q"):
            await until(lambda actor=actor: bool(actor.running))
            actor.finish(name, tokens=4)
        record = await train(scene.run, context, await drawing)
        assert record.metrics["groups_without_signal"] == 0.5
        (learned[leave_out],) = scene.learner.learned
    assert learned[True].denominators.groups == 1
    assert learned[False].denominators.groups == 2
    assert learned[True].denominators.tokens == learned[False].denominators.tokens / 2
