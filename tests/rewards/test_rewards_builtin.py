"""The built-in rewards and the weighted sum, with numbers worked by hand."""

import pytest

from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import RewardError, Sample, build
from rlhfless.spec import ExactMatchSpec, LengthPenaltySpec, RegexSpec


def sample(response, answer="42", tokens=1, **columns):
    return Sample("what is 6 x 7?", response, tokens, FinishReason.STOP, {"answer": answer, **columns})


def prompt(text="what is 6 x 7?", **columns):
    return Prompt("p", (1, 2), text, columns)


async def totals(spec, *samples):
    return [score.total for score in await build([spec]).score(samples)]


@pytest.mark.parametrize(
    ("options", "response", "answer", "expected"),
    [
        ({}, "42", "42", 1.0),
        ({}, " 42\n", "42", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "42.", "42", 0.0),
        ({"strip": False}, " 42", "42", 0.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "Yes", "yes", 1.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
    ],
)
async def test_exact_match(options, response, answer, expected):
    spec = ExactMatchSpec(type="exact_match", **options)
    assert await totals(spec, sample(response, answer)) == [expected]


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ({"pattern": r"\d+"}, "it is 42", 1.0),
        ({"pattern": r"\d+"}, "no idea", 0.0),
        ({"pattern": r"\d+", "full_match": True}, "it is 42", 0.0),
        ({"pattern": r"\d+", "full_match": True}, "42", 1.0),
        ({"pattern": r"answer: (.*)", "answer_field": "answer"}, "answer: 42 ", 1.0),
        ({"pattern": r"answer: (.*)", "answer_field": "answer"}, "answer: 43", 0.0),
        ({"pattern": r"a(42)?", "answer_field": "answer"}, "a", 0.0),
    ],
)
async def test_regex(options, response, expected):
    assert await totals(RegexSpec(type="regex", **options), sample(response)) == [expected]


async def test_length_penalty_falls_linearly_between_its_two_lengths():
    spec = LengthPenaltySpec(type="length_penalty", free_tokens=100, max_tokens=200)
    samples = [sample("", tokens=tokens) for tokens in (1, 100, 125, 200, 500)]
    assert await totals(spec, *samples) == [0.0, 0.0, -0.25, -1.0, -1.0]


async def test_the_total_is_the_weighted_sum_and_the_parts_are_not_weighted():
    rewards = build(
        [
            ExactMatchSpec(type="exact_match", weight=2),
            RegexSpec(type="regex", name="digits", pattern=r"\d", weight=-0.5),
            LengthPenaltySpec(type="length_penalty", free_tokens=0, max_tokens=10),
        ]
    )
    right, wrong = await rewards.score([sample("42", tokens=5), sample("no", tokens=10)])
    assert right.parts == {"exact_match": 1.0, "digits": 1.0, "length_penalty": -0.5}
    assert right.total == 2 * 1.0 - 0.5 * 1.0 - 0.5
    assert wrong.parts == {"exact_match": 0.0, "digits": 0.0, "length_penalty": -1.0}
    assert wrong.total == -1.0


async def test_no_samples_give_no_scores():
    assert await build([ExactMatchSpec(type="exact_match")]).score([]) == []


def test_a_missing_answer_column_is_found_before_the_run():
    rewards = build([ExactMatchSpec(type="exact_match", answer_field="anwser")])
    (problem,) = rewards.problems([prompt(answer="1"), prompt(answer="2", level=3)])
    assert "reward 'exact_match'" in problem
    assert "the column `anwser` is missing (columns there: answer)" in problem
    assert "in 2 of 2 prompts" in problem


def test_an_answer_that_is_null_in_one_row_is_found_before_the_run():
    rewards = build([RegexSpec(type="regex", pattern="(.*)", answer_field="answer")])
    (problem,) = rewards.problems([prompt(answer="1"), prompt("the second", answer=None)])
    assert "holds 'None', which cannot be used in 1 of 2 prompts; the first is 'the second'" in problem


def test_answers_that_can_be_compared_are_no_problem():
    rewards = build([ExactMatchSpec(type="exact_match"), RegexSpec(type="regex", pattern="x")])
    assert rewards.problems([prompt(answer="1"), prompt(answer=2), prompt(answer=2.5)]) == []


async def test_an_unusable_answer_at_run_time_names_reward_column_and_sample():
    with pytest.raises(RewardError, match=r"reward 'exact_match': the column `answer` .* got .*of prompt ''"):
        await totals(ExactMatchSpec(type="exact_match"), sample("42", answer=["42"]))
