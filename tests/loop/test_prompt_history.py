"""Prompts that teach nothing are drawn less, come back, and are the same ones in a run that is resumed."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.loop.prompt_history import PromptHistory
from rlhfless.prepare.prompts import PromptOrder
from rlhfless.records import Experience, FinishReason, Group, Prompt, Rollout, Score
from rlhfless.spec import DrawLessSpec

PROMPTS = [Prompt(f"p{i:03d}", (1,), "") for i in range(60)]


def drawn(prompts: list[Prompt], settled: set[str]) -> Experience:
    """Two samples of each; those of a settled prompt have the same reward."""

    def group(prompt: Prompt) -> Group:
        rollouts = [
            Rollout(prompt.prompt_id, i, 0, np.arange(1), np.zeros(1, np.float32), "", FinishReason.STOP, (), "a", 0, 1)
            for i in range(2)
        ]
        scores = [Score(float(i and prompt.prompt_id not in settled), {}) for i in range(2)]
        return Group.of(prompt, rollouts).adding(score=scores)

    return Experience(tuple(map(group, prompts)))


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def run(
    spec: DrawLessSpec | None, steps: range, history: PromptHistory, settled: set[str], n: int = 12
) -> dict[int, list[str]]:
    order, batches = PromptOrder(PROMPTS, 0, shuffle=True), {}
    for step in steps:
        prompts = history.prompts(order, step, n)
        batches[step] = ids(prompts)
        history.add(step, drawn(prompts, settled))
    return batches


def test_without_the_setting_nothing_changes() -> None:
    order = PromptOrder(PROMPTS, 0, shuffle=True)
    batches = run(None, range(1, 30), PromptHistory(None, 0, 0), set(ids(PROMPTS)))
    assert all(batch == ids(order.batch(step - 1, 12)) for step, batch in batches.items())


def test_settled_prompts_are_drawn_less_but_come_back() -> None:
    """A prompt comes once in 5 steps. Half of them are settled: after some turns each has a tenth of its chance."""
    settled = set(ids(PROMPTS[:30]))
    spec = DrawLessSpec(factor=0.5, floor=0.1)
    batches = run(spec, range(1, 401), PromptHistory(spec, 0, 0), settled)
    assert all(len(set(batch)) == 12 for batch in batches.values())
    late = [name for step, batch in batches.items() if step > 100 for name in batch]
    share = sum(name in settled for name in late) / len(late)
    assert 0.03 < share < 0.15, "a tenth as often as the others would be a share of 1 / 11"
    assert {name for name in late if name in settled} == settled, "all of them come back"


def test_a_prompt_that_has_a_signal_again_is_drawn_as_before() -> None:
    spec = DrawLessSpec(factor=1e-9, floor=1e-12)
    history, order = PromptHistory(spec, 0, 0), PromptOrder(PROMPTS, 0, shuffle=True)
    history.add(1, drawn(PROMPTS, set(ids(PROMPTS))))
    few = [prompt for prompt in order.batch(1, 12) if prompt in history.prompts(order, 2, 12)]
    history.add(2, drawn(PROMPTS, set()))
    assert history.prompts(order, 3, 12) == order.batch(2, 12)
    assert len(few) == 12, "where no other prompt is left, those of the order stay"


STEPS = 12
"""More than twice those in which each prompt comes once."""


@settings(max_examples=30)
@given(st.integers(0, 3), st.integers(1, STEPS - 1), st.integers(0, 5))
def test_a_resumed_run_draws_the_same_prompts(staleness: int, pause: int, seed: int) -> None:
    """Steps are begun `staleness` steps ahead of what was learned from; the notes go through JSON."""
    settled, spec, order = set(ids(PROMPTS[::2])), DrawLessSpec(), PromptOrder(PROMPTS, 0, shuffle=True)

    def go(history: PromptHistory, first: int, until: int, ahead: dict[int, list[Prompt]]) -> dict[int, list[str]]:
        for step in range(first, until + 1):
            for begun in range(step, step + staleness + 1):
                ahead.setdefault(begun, history.prompts(order, begun, 12))
            history.add(step, drawn(ahead[step], settled))
        return {step: ids(ahead[step]) for step in range(first, until + 1)}

    whole = go(PromptHistory(spec, seed, staleness), 1, STEPS, {})
    first, second = PromptHistory(spec, seed, staleness), PromptHistory(spec, seed, staleness)
    begun = go(first, 1, pause, {})
    notes = json.loads(json.dumps(first.saved(pause)))
    second.restore(notes)
    assert begun | go(second, pause + 1, STEPS, {}) == whole
    went_on = go(first, pause + 1, STEPS, {})
    assert went_on == {step: whole[step] for step in range(pause + 1, STEPS + 1)}, "the run that goes on"
