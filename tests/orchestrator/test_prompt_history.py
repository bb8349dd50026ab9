"""A run's knowledge of its prompts: prompts without signal are sampled less but return, responses are drafts for later
ones, and a resumed run knows the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.builders import drawn, traced
from fakes.fake_cluster import FakePool, rollout
from fakes.fake_run import SPEC, Reader, draw, stage_of, until
from rlhfless.orchestrator import prompt_selection
from rlhfless.orchestrator.prompt_selection import PromptHistory
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import FinishReason, Prompt, Score
from rlhfless.records.journal import Journal
from rlhfless.records.traces import Trace, TracedRollout, TraceMeta, TraceWriter
from rlhfless.scaling.lengths import StepSamples
from rlhfless.spec import DrawLessSpec, RunSpec

PROMPTS = [Prompt(f"p{i:03d}", (1,), "") for i in range(60)]

META = TraceMeta("r", 1, {}, {}, {})


def history_of(
    draw_less: DrawLessSpec | None = None, seed: int = 0, staleness: int = 0, most_tokens: int = 1000
) -> PromptHistory:
    """Return the history of a run with two samples per prompt, whose engines draft suffixes."""
    spec = SPEC.model_dump() | {
        "seed": seed,
        "samples_per_prompt": 2,
        "prompts": {"path": "p", "draw_less": draw_less},
        "schedule": {"type": "async", "max_staleness": staleness} if staleness else "sync",
        "generation": {"max_tokens": 64, "speculation": {"method": "suffix"}},
    }
    return PromptHistory(RunSpec.model_validate(spec), most_tokens)


def rows(step: int, prompts: Iterable[Prompt], settled: set[str]) -> list[TracedRollout]:
    """Return two samples of each prompt and one with a failed reward. Samples of a settled prompt have equal
    rewards."""
    each = [(prompt.prompt_id, index) for prompt in prompts for index in range(3)]
    rewards = [2.0 if index == 2 else float(index and name not in settled) for name, index in each]
    return [
        replace(
            traced(step, name, index, tokens=step + index),
            reward=reward,
            reward_failures={"r": "down"} if index == 2 else {},
        )
        for (name, index), reward in zip(each, rewards, strict=True)
    ]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def run(history: PromptHistory, steps: range, settled: set[str], n: int = 12) -> dict[int, list[str]]:
    order, batches = PromptOrder(PROMPTS, 0, shuffle=True), {}
    for step in steps:
        prompts = history.prompts(order, step, n)
        batches[step] = ids(prompts)
        history.learned(rows(step, prompts, settled))
    return batches


def test_without_the_setting_nothing_changes() -> None:
    order = PromptOrder(PROMPTS, 0, shuffle=True)
    batches = run(history_of(), range(1, 30), set(ids(PROMPTS)))
    assert all(batch == ids(order.batch(step - 1, 12)) for step, batch in batches.items())


def test_settled_prompts_are_drawn_less_but_come_back() -> None:
    """Each prompt is sampled once in 5 steps. Half are settled: after a few rounds each has a tenth of its chance."""
    settled = set(ids(PROMPTS[:30]))
    batches = run(history_of(DrawLessSpec(factor=0.5, floor=0.1)), range(1, 401), settled)
    assert all(len(set(batch)) == 12 for batch in batches.values())
    late = [name for step, batch in batches.items() if step > 100 for name in batch]
    share = sum(name in settled for name in late) / len(late)
    assert 0.03 < share < 0.15, "a tenth as often as the others would be a share of 1 / 11"
    assert {name for name in late if name in settled} == settled, "all of them come back"


def test_a_prompt_that_has_a_signal_again_is_drawn_as_before() -> None:
    history = history_of(DrawLessSpec(factor=1e-9, floor=1e-12))
    order = PromptOrder(PROMPTS, 0, shuffle=True)
    history.learned(rows(1, PROMPTS, set(ids(PROMPTS))))
    few = [prompt for prompt in order.batch(1, 12) if prompt in history.prompts(order, 2, 12)]
    history.learned(rows(2, PROMPTS, set()))
    assert history.prompts(order, 3, 12) == order.batch(2, 12)
    assert len(few) == 12, "where no other prompt is left, those of the order stay"


def test_a_step_in_which_rewards_failed_says_nothing_about_a_prompt() -> None:
    """With fewer than two rewards there is nothing to compare, so the prompt counts neither as without signal nor as
    with signal."""
    history = history_of(DrawLessSpec(factor=1e-9, floor=1e-12))
    order = PromptOrder(PROMPTS, 0, shuffle=True)
    failed = [
        replace(row, reward_failures={"r": "down"} if row.sample_index else {}) for row in rows(1, PROMPTS, set())
    ]
    history.learned(failed)
    assert history.prompts(order, 2, 12) == order.batch(1, 12)


STEPS = 12
"""More than twice the number of steps in which each prompt is sampled once."""


@settings(max_examples=30)
@given(st.integers(0, 3), st.integers(1, STEPS - 1), st.integers(0, 3), st.integers(0, 5))
def test_a_resumed_run_draws_the_same_prompts(staleness: int, pause: int, lost: int, seed: int) -> None:
    """Steps start `staleness` steps ahead of learning. Steps after the newest checkpoint are in the trace, and are
    repeated."""
    settled, order = set(ids(PROMPTS[::2])), PromptOrder(PROMPTS, 0, shuffle=True)
    trace: list[TracedRollout] = []

    def go(history: PromptHistory, first: int, until: int) -> dict[int, list[str]]:
        known, ahead = {row.step for row in trace}, dict[int, list[Prompt]]()
        for step in range(first, until + 1):
            for begun in range(step, step + staleness + 1):
                ahead.setdefault(begun, history.prompts(order, begun, 12))
            if step not in known:
                trace.extend(new := rows(step, ahead[step], settled))
                history.learned(new)
        return {step: ids(ahead[step]) for step in range(first, until + 1)}

    whole = go(history_of(DrawLessSpec(), seed, staleness), 1, STEPS)
    trace.clear()
    begun = go(history_of(DrawLessSpec(), seed, staleness), 1, min(pause + lost, STEPS))
    resumed = history_of(DrawLessSpec(), seed, staleness)
    resumed.read(Trace(META, rollouts=tuple(trace)), Path("/nowhere"))
    assert begun | go(resumed, pause + 1, STEPS) == whole


def test_a_resumed_run_forecasts_as_one_that_has_seen_the_steps() -> None:
    history, seen, begun = history_of(), history_of(), np.zeros(2, np.bool_)
    history.read(Trace(META, rollouts=tuple(rows(30, PROMPTS[:1], set()))), Path("/nowhere"))
    samples = StepSamples(("p000", "new"), np.arange(2), np.zeros(2), begun, begun)
    ended = np.ones(3, np.bool_)
    seen.lengths.learn(StepSamples(("p000",), np.zeros(3, np.int64), np.array([30, 31, 32]), ended, ~ended))
    forecast = history.lengths.forecast(samples)
    assert (forecast.table == seen.lengths.forecast(samples).table).all()
    assert forecast.mean_tokens[0] != forecast.mean_tokens[1]


def known(history: PromptHistory, *prompt_ids: str) -> dict[str, list[list[int]]]:
    return {name: [tokens.tolist() for tokens in each] for name, each in history.responses(prompt_ids).items()}


def test_of_each_prompt_the_newest_responses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_selection, "MOST_RESPONSES", 2)
    history = history_of()
    history.ended(drawn("p", i, [i]) for i in range(3))
    history.ended([drawn("q", 0, [])])
    assert known(history, "p", "q", "r") == {"p": [[1], [2]]}


def test_of_all_prompts_those_that_were_drawn_last() -> None:
    history = history_of(most_tokens=6)
    history.ended([drawn("p", 0, [1, 2]), drawn("q", 0, [3, 4]), drawn("p", 1, [5, 6])])
    assert known(history, "p", "q") == {"p": [[1, 2], [5, 6]], "q": [[3, 4]]}
    history.ended([drawn("r", 0, [7])])
    assert known(history, "p", "q", "r") == {"p": [[1, 2], [5, 6]], "r": [[7]]}
    history.ended([drawn("s", 0, range(7))])  # more than fits
    assert known(history, "p", "q", "r", "s") == {}
    history.ended([drawn("r", 0, [8])])
    assert known(history, "r") == {"r": [[8]]}


def test_a_restart_begins_with_the_newest_responses_of_the_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, META, record_tokens=True) as writer:
        for index in range(3):
            writer.add_rollout(1, drawn("p", index, [index, index]), Score(0.0, {}), 4)
    history = history_of(most_tokens=4)
    history.read(Trace(META), tmp_path)
    assert known(history, "p") == {"p": [[1, 1], [2, 2]]}


async def test_actors_get_what_other_actors_drew_of_the_same_prompts(tmp_path: Path) -> None:
    """They are an earlier step's responses and this step's responses in the journal, without aborted ones."""
    history = history_of()
    history.ended([drawn("q", 0, [1, 2, 3]), drawn("other", 0, [4])])
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    items = [item for prompt in draw("pq").prompts for item in draw("pq").items(prompt)]
    journal.add(3, [rollout(items[0], "before", 4)])
    pool = FakePool("a", "b")
    stage = stage_of(pool, draw("pq"), journal, history=history)
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].running and pool["b"].running))
    sent = {name: tuple(map(len, each)) for actor in "ab" for name, each in pool[actor].requests[0].earlier.items()}
    assert sent == {"p": (4,), "q": (3,)}
    before = known(history, "p", "q")
    await stage.drain(pool["a"])
    assert known(history, "p", "q") == before
    await until(lambda: len(pool["b"].running) == 3)
    pool["b"].finish()
    await reader.task
    assert [rollout.finish_reason for group in reader.groups for rollout in group.rollouts] == [FinishReason.STOP] * 4
    assert {name: len(each) for name, each in known(history, "p", "q").items()} == {"p": 2, "q": 3}


async def test_engines_that_do_not_draft_get_none() -> None:
    pool, history = FakePool("a"), PromptHistory(SPEC)
    history.ended([drawn("p", 0, [1])])
    reader = Reader(stage_of(pool, draw("p"), history=history))
    await until(lambda: bool(pool["a"].running))
    assert pool["a"].requests[0].earlier == {}
    pool["a"].finish()
    await reader.task
