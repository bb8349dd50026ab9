"""The counting task: hand-worked answers, the split, and the shape of the lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhfless.bundled.task import (
    TaskProblem,
    TaskRecipe,
    draw_demonstrations,
    draw_problems,
    write_jsonl,
)

RECIPE = TaskRecipe()


def test_prompt_and_answer_upwards() -> None:
    problem = TaskProblem(7, 12)
    assert problem.prompt == "count from 7 up to 12:"
    assert problem.answer == "7 8 9 10 11 12"
    assert problem.distance == 5


def test_prompt_and_answer_downwards_to_zero() -> None:
    problem = TaskProblem(4, 0)
    assert problem.prompt == "count from 4 down to 0:"
    assert problem.answer == "4 3 2 1 0"


def test_problems_are_different_in_range_and_end_on_round_numbers() -> None:
    problems = draw_problems(RECIPE, np.random.default_rng(0), 300, held_out=False)
    assert len(set(problems)) == 300
    for problem in problems:
        assert RECIPE.shortest_distance <= problem.distance <= RECIPE.longest_distance
        assert min(problem.first, problem.last) >= 0
        assert max(problem.first, problem.last) <= RECIPE.largest_number
        assert problem.last % RECIPE.last_is_multiple_of == 0


def test_held_out_problems_are_never_trained_on_nor_demonstrated() -> None:
    rng = np.random.default_rng(0)
    held_out = {problem.prompt for problem in draw_problems(RECIPE, rng, 256, held_out=True)}
    train = {problem.prompt for problem in draw_problems(RECIPE, rng, 640, held_out=False)}
    shown = {demonstration.prompt for demonstration in draw_demonstrations(RECIPE, rng, 4000)}
    assert held_out.isdisjoint(train)
    assert held_out.isdisjoint(shown)


def test_split_takes_its_share() -> None:
    problems = [TaskProblem(first, last) for first in range(151) for last in range(0, 151, 5)]
    share = np.mean([problem.held_out(RECIPE) for problem in problems])
    assert share == pytest.approx(RECIPE.held_out_share, abs=0.03)


def test_lengths_have_a_long_tail() -> None:
    problems = draw_problems(RECIPE, np.random.default_rng(1), RECIPE.train_prompts, held_out=False)
    lengths = [len(problem.answer.split()) for problem in problems]
    median, p99 = np.percentile(lengths, [50, 99])
    assert 10 <= median <= 18
    assert p99 / median > 4


def test_demonstrations_are_answers_with_or_without_an_opening() -> None:
    with_opening = 0
    for demonstration in draw_demonstrations(RECIPE, np.random.default_rng(2), 4000):
        words = demonstration.prompt.rstrip(":").split()
        answer = TaskProblem(int(words[2]), int(words[5])).answer
        opening = demonstration.response.removesuffix(answer)
        assert opening in ("", "sure ", "okay ", "well ")
        with_opening += opening != ""
    # Binomial: three standard deviations of 4000 draws are 0.024.
    assert with_opening / 4000 == pytest.approx(RECIPE.opening_share, abs=0.025)


def test_draws_depend_on_the_seed_alone() -> None:
    first, again, other = (draw_problems(RECIPE, np.random.default_rng(seed), 20, held_out=True) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_jsonl(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [TaskProblem(9, 5)])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"id": "9-5", "prompt": "count from 9 down to 5:", "answer": "9 8 7 6 5", "distance": 4}]
