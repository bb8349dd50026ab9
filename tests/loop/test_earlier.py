"""Responses that the run has drawn, as drafts for the next ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.fleet import FakePool, rollout, runner
from fakes.rollouts import drawn
from fakes.stage import SPEC, Reader, draw, until
from rlhfless.loop import earlier
from rlhfless.loop.earlier import EarlierResponses
from rlhfless.loop.generation import GenerationStage
from rlhfless.records import FinishReason, Score
from rlhfless.records.journal import Journal
from rlhfless.records.traces import TraceMeta, TraceWriter


def known(responses: EarlierResponses, *prompt_ids: str) -> dict[str, list[list[int]]]:
    return {name: [tokens.tolist() for tokens in each] for name, each in responses.of(prompt_ids).items()}


def test_of_each_prompt_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "MOST_RESPONSES", 2)
    responses = EarlierResponses()
    responses.add(drawn("p", i, [i]) for i in range(3))
    responses.add([drawn("q", 0, [])])
    assert known(responses, "p", "q", "r") == {"p": [[1], [2]]}


def test_of_all_prompts_those_that_were_drawn_last() -> None:
    responses = EarlierResponses(most_tokens=6)
    responses.add([drawn("p", 0, [1, 2]), drawn("q", 0, [3, 4]), drawn("p", 1, [5, 6])])
    assert known(responses, "p", "q") == {"p": [[1, 2], [5, 6]], "q": [[3, 4]]}
    responses.add([drawn("r", 0, [7])])
    assert known(responses, "p", "q", "r") == {"p": [[1, 2], [5, 6]], "r": [[7]]}
    responses.add([drawn("s", 0, range(7))])  # more than there is room for
    assert known(responses, "p", "q", "r", "s") == {}
    responses.add([drawn("r", 0, [8])])
    assert known(responses, "r") == {"r": [[8]]}


def test_a_restart_begins_with_the_newest_of_the_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, TraceMeta("r", 1, {}, {}, {}), record_tokens=True) as writer:
        for index in range(3):
            writer.add_rollout(1, drawn("p", index, [index, index]), Score(0.0, {}), 4)
    responses = EarlierResponses(most_tokens=4)
    responses.read(tmp_path)
    assert known(responses, "p") == {"p": [[1, 1], [2, 2]]}


async def test_actors_get_what_other_actors_drew_of_the_same_prompts(tmp_path: Path) -> None:
    """An earlier step's responses, and those that the journal has of this one; no aborted ones."""
    responses = EarlierResponses()
    responses.add([drawn("q", 0, [1, 2, 3]), drawn("other", 0, [4])])
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    items = [item for prompt in draw("pq").prompts for item in draw("pq").items(prompt)]
    journal.add(3, [rollout(items[0], "before", 4)])
    pool = FakePool("a", "b")
    stage = GenerationStage(pool, draw("pq"), SPEC, runner(pool), journal, earlier=responses)
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].running and pool["b"].running))
    sent = {name: tuple(map(len, each)) for actor in "ab" for name, each in pool[actor].requests[0].earlier.items()}
    assert sent == {"p": (4,), "q": (3,)}
    before = known(responses, "p", "q")
    await stage.drain(pool["a"])
    assert known(responses, "p", "q") == before
    await until(lambda: len(pool["b"].running) == 3)
    pool["b"].finish()
    await reader.task
    assert [rollout.finish_reason for group in reader.groups for rollout in group.rollouts] == [FinishReason.STOP] * 4
    assert {name: len(each) for name, each in known(responses, "p", "q").items()} == {"p": 2, "q": 3}


async def test_engines_that_do_not_draft_get_none() -> None:
    pool = FakePool("a")
    reader = Reader(GenerationStage(pool, draw("p"), SPEC, runner(pool)))
    await until(lambda: bool(pool["a"].running))
    assert pool["a"].requests[0].earlier == {}
    pool["a"].finish()
    await reader.task
