"""The samples that a driver reports, and which of them the service keeps."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy.orm import Session

from fakes import filled_database as filled
from fakes.builders import drawn
from rlhfless.control.database.tables import RolloutRow
from rlhfless.control.delivery import Item
from rlhfless.control.driver.samples import MOST_OF_COLUMN, SampleReader
from rlhfless.control.ingest import HANDLERS, KEPT_EVALUATIONS, KEPT_ROLLOUT_STEPS
from rlhfless.control.lifecycle import Status
from rlhfless.control.service import open_database
from rlhfless.control.settings import ServiceSettings
from rlhfless.records import Experience, Group, Prompt, Score
from rlhfless.spec import RunSpec

SPEC = RunSpec.model_validate(
    {
        "model": {"path": "m"},
        "prompts": {"path": "p.jsonl"},
        "evaluation": {"sets": [{"name": "other", "path": "o.jsonl"}]},
        "rewards": [
            {"type": "exact_match", "name": "match", "ignore_case": True, "answer_field": "gold.text"},
            {"type": "format"},
            {"type": "regex", "name": "named", "pattern": "(.*)", "answer_field": "answer", "sets": ["other"]},
        ],
    }
)
READER = SampleReader(SPEC.rewards, ["<|im_end|>", "<think>", "<unused>"])


def group(name: str, rewards: list[float | None], source: str = "", **columns: Any) -> Group:
    """A prompt and its samples; None is a sample whose reward failed."""
    prompt = Prompt(name, (1, 2), f"<|im_start|>{name}?", {"gold": {"text": " Yes "}, **columns}, source)
    rollouts = [drawn(name, at, [3, 4], text=f"<think>{at}<|im_end|>") for at in range(len(rewards))]
    scores = [Score(0.0, {}, {"match": "no text"}) if one is None else Score(one, {"match": one}) for one in rewards]
    return Group.of(prompt, rollouts).adding(score=scores)


def test_a_sample_has_what_rewards_saw() -> None:
    (best, worst) = READER.of_step(Experience((group("p", [0.0, 1.0, 0.5]),)))
    assert (best["sample_index"], best["reward"], worst["sample_index"]) == (1, 1.0, 0)
    assert (best["prompt"], best["response"]) == ("<|im_start|>p?", "<think>1<|im_end|>")
    assert best["special_tokens"] == ["<|im_end|>", "<think>"]
    assert best["expected"] == {"match": "yes"}, "as it is compared: stripped, and in any case"
    assert best["columns"] == {"gold": {"text": " Yes "}}
    assert (best["split"], best["greedy"]) == ("train", False)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.50, 1.5),
        (None, None),
        (["a", 2], ["a", 2]),
        (Decimal("1.50"), "1.50"),
        (datetime.date(2026, 11, 28), "2026-11-28"),
        (float("nan"), "NaN"),
        ("\udcff\0", "\\udcff\\x00"),
        ("x" * 5000, "x" * MOST_OF_COLUMN + "… (5,000 characters)"),
    ],
)
def test_any_column_can_be_told(value: object, shown: object) -> None:
    (sample,) = READER.of_step(Experience((group("p", [1.0], value=value),)))
    assert sample["columns"]["value"] == shown
    json.dumps(sample, allow_nan=False).encode()


def test_a_row_without_an_answer_is_told_all_the_same() -> None:
    prompt = Prompt("p", (1,), "?", {})
    lone = Group.of(prompt, [drawn("p", 0, [1])]).adding(score=[Score(0.0, {}, {"match": "no column"})])
    (sample,) = READER.of_step(Experience((lone,)))
    assert (sample["expected"], sample["failures"]) == ({}, {"match": "no column"})


def test_failed_samples_are_among_those_of_a_step() -> None:
    groups = tuple(group(f"p{at}", [1.0, 0.0, 0.5]) for at in range(20))
    failing = group("fails", [1.0, None, None, None, 0.0])
    shown = [READER.of_step(Experience((*groups[:place], failing, *groups[place:]))) for place in (0, 7, 20)]
    assert all(2 <= sum(bool(one["failures"]) for one in samples) <= 3 for samples in shown)


def test_a_failed_sample_is_not_one_of_lowest_reward() -> None:
    """It has no reward: it comes last, whatever its total is, in steps and evaluations."""
    failing = group("p", [None, 0.25, 1.0, None, -0.5])
    for shown in (
        READER.of_step(Experience((failing,))),
        READER.of_evaluation(Experience((failing,)), Experience(())),
    ):
        assert [one["sample_index"] for one in shown][:3] == [2, 4, 0]
    assert [one["sample_index"] for one in READER.of_step(Experience((group("p", [None, None]),)))] == [0, 1]


def test_a_prompt_that_comes_again_is_told_again() -> None:
    """Whatever its place in the step is."""
    groups = [group(f"p{at}", [1.0, 0.0]) for at in range(16)]
    first, again = (READER.of_step(Experience(tuple(each))) for each in (groups, groups[::-1]))
    assert [one["prompt_id"] for one in first] == [one["prompt_id"] for one in again]
    assert len(first) == 8


def test_an_evaluation_tells_the_same_prompts_each_time_with_their_greedy_response() -> None:
    sets = [group(f"{name}{at}", [1.0, 0.0], name, answer="x") for name in ("", "other") for at in range(6)]
    greedy = Experience(tuple(group(each.prompt.prompt_id, [1.0], each.prompt.source) for each in sets))
    samples = READER.of_evaluation(Experience(tuple(sets)), greedy)
    assert [len([one for one in samples if one["data_set"] == name]) for name in ("", "other")] == [12, 12]
    assert {one["split"] for one in samples} == {"held_out"}
    assert [one["greedy"] for one in samples[:3]] == [False, False, True]
    assert samples[-1]["expected"] == {"match": "yes", "named": "x"}
    again = READER.of_evaluation(Experience(tuple(sets[::-1])), greedy)
    assert sorted(map(str, again)) == sorted(map(str, samples))


def test_many_sets_are_told_of_all() -> None:
    sets = [group(f"{name}-{at}", [1.0], f"set{name}") for name in range(30) for at in range(3)]
    samples = READER.of_evaluation(Experience(tuple(sets)), Experience(()))
    assert len(samples) == len({one["data_set"] for one in samples}) == 30


@pytest.fixture
def session(tmp_path):  # type: ignore[no-untyped-def]
    database = open_database(ServiceSettings(data=str(tmp_path)))
    with Session(database.engine) as session, session.begin():
        session.add(filled.run_row(tmp_path, "r-20261128-000000-00000000", Status.RUNNING, ""))
        session.flush()
        yield session
    database.close()


def kept(session: Session, kind: str) -> list[tuple[int, str]]:
    rows = session.query(RolloutRow).order_by(RolloutRow.step, RolloutRow.place).all()
    return [(row.step, row.data["text"]) for row in rows if row.data["kind"] == kind]


def report(session: Session, kind: str, step: int, *texts: str) -> None:
    run = session.query(filled.RunRow).one()
    samples = [{"text": text, "kind": kind} for text in texts]
    HANDLERS[kind](session, run, Item(seq=1, attempt=1, at=0.0, kind=kind, data={"step": step, "samples": samples}))
    session.flush()


def test_the_newest_steps_and_evaluations_are_kept_apart(session: Session) -> None:
    for step in range(0, 2 * KEPT_EVALUATIONS * 5 + 1, 5):
        report(session, "held_out_rollouts", step, "a", "b")
        report(session, "rollouts", step + 1, "c")
    steps = [step for step, text in kept(session, "held_out_rollouts") if text == "a"]
    assert steps == [0, *range(255, 501, 5)], "the one before the first step, and the newest"
    assert kept(session, "rollouts")[0][0] == 501 - KEPT_ROLLOUT_STEPS


def test_a_step_that_is_reported_again_replaces_its_samples(session: Session) -> None:
    report(session, "rollouts", 3, "a", "b", "c")
    report(session, "held_out_rollouts", 3, "d")
    report(session, "rollouts", 3, "e")
    assert kept(session, "rollouts") == [(3, "e")]
    assert kept(session, "held_out_rollouts") == [(3, "d")]
