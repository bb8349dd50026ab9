"""The built-in rewards and the weighted sum, with numbers worked by hand."""

import datetime
import math
import pickle
from decimal import Decimal

import numpy as np
import pytest
from pydantic import ValidationError

from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import RewardError, Rewards, RewardSample, checker
from rlhfless.spec import ExactMatchSpec, FormatSpec, LengthPenaltySpec, MathSpec, RegexSpec, ScoringSpec
from rlhfless.util.text import parsed_json


def sample(response, answer="42", tokens=1, **columns):
    return RewardSample("what is 6 x 7?", response, tokens, FinishReason.STOP, {"answer": answer, **columns})


def prompt(text="what is 6 x 7?", **columns):
    return Prompt("p", (1, 2), text, columns)


async def scores(specs, *samples):
    return await Rewards(specs, ScoringSpec()).score(samples)


async def totals(spec, *samples):
    return [score.total for score in await scores([spec], *samples)]


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
    specs = [
        ExactMatchSpec(type="exact_match", weight=2),
        RegexSpec(type="regex", name="digits", pattern=r"\d", weight=-0.5),
        LengthPenaltySpec(type="length_penalty", free_tokens=0, max_tokens=10),
    ]
    right, wrong = await scores(specs, sample("42", tokens=5), sample("no", tokens=10))
    assert right.parts == {"exact_match": 1.0, "digits": 1.0, "length_penalty": -0.5}
    assert right.total == 2 * 1.0 - 0.5 * 1.0 - 0.5
    assert wrong.parts == {"exact_match": 0.0, "digits": 0.0, "length_penalty": -1.0}
    assert wrong.total == -1.0


async def test_no_samples_give_no_scores():
    assert await scores([ExactMatchSpec(type="exact_match")]) == []


def test_a_missing_answer_column_is_found_before_the_run():
    reward = checker(ExactMatchSpec(type="exact_match", answer_field="anwser"), None)
    (problem,) = reward.problems([prompt(answer="1"), prompt(answer="2", level=3)])
    assert "the column `anwser` is missing in 2 of 2 prompts" in problem
    assert "there is no field `anwser` (the fields are answer)" in problem
    assert "Did you mean `answer`?" in problem


def test_an_answer_that_is_null_in_one_row_is_found_before_the_run():
    reward = checker(RegexSpec(type="regex", pattern="(.*)", answer_field="answer"), None)
    (problem,) = reward.problems([prompt(answer="1"), prompt("the second", answer=None)])
    assert "the column `answer` cannot be used in 1 of 2 prompts: 'the second': it holds null" in problem


def test_answers_that_can_be_compared_are_no_problem():
    prompts = [prompt(answer="1"), prompt(answer=2), prompt(answer=2.5)]
    for spec in (ExactMatchSpec(type="exact_match"), RegexSpec(type="regex", pattern="x")):
        assert checker(spec, None).problems(prompts) == []


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (parsed_json("1.50", as_written=True), "1.50"),
        (parsed_json("0.00001", as_written=True), "0.00001"),
        (parsed_json("1e-5", as_written=True), "1e-5"),
        (parsed_json("12345678901234567890", as_written=True), "12345678901234567890"),
        (pickle.loads(pickle.dumps(parsed_json("[2.0]", as_written=True)))[0], "2.0"),
        (0.00001, "0.00001"),
        (1e22, "10000000000000000000000.0"),
        (2.0, "2.0"),
        (True, "true"),
        (False, "false"),
        ("007", "007"),
        (7, "7"),
        (Decimal("42.50"), "42.50"),
        (Decimal("1E-7"), "0.0000001"),
        (np.int64(3), "3"),
        (np.float32(0.1), "0.1"),
        (np.float64(1e-7), "0.0000001"),
        (np.bool_(True), "true"),
        (np.str_("x"), "x"),
        (datetime.date(2024, 1, 5), "2024-01-05"),
        (datetime.datetime(2024, 1, 5, 10, 30), "2024-01-05T10:30:00"),
    ],
    ids=repr,
)
async def test_an_answer_is_compared_as_the_data_has_it(value, written):
    assert await totals(ExactMatchSpec(type="exact_match"), sample(written, value)) == [1.0]
    assert await totals(RegexSpec(type="regex", pattern="(.+)", answer_field="answer"), sample(written, value)) == [1.0]
    assert checker(ExactMatchSpec(type="exact_match"), None).problems([prompt(answer=value)]) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "it holds null, and a text or a number is needed"),
        (
            ["7"],
            "it holds \"['7']\" (a list), and a text or a number is needed; name an item of it, such as `answer.0`",
        ),
        ({"a": 1}, "(a mapping)"),
        (b"7", "(bytes)"),
        (math.nan, "it holds 'nan' (a float)"),
        (Decimal("NaN"), "it holds 'NaN' (a Decimal)"),
        (math.inf, "(a float)"),
        (datetime.timedelta(1), "(a timedelta)"),
    ],
    ids=repr,
)
def test_a_value_that_is_no_answer_is_named_with_its_type_and_place(value, said):
    prompts = [prompt(answer="1"), Prompt("q", (), "the second", {"answer": value}, where="train.jsonl:2")]
    (problem,) = checker(ExactMatchSpec(type="exact_match"), None).problems(prompts)
    assert "the column `answer` cannot be used in 1 of 2 prompts: train.jsonl:2: it holds" in problem
    assert said in problem


@pytest.mark.parametrize("value", ["", " \n"])
@pytest.mark.parametrize("kind", ["exact_match", "math"])
def test_an_empty_answer_is_refused(kind, value):
    prompts = [prompt(answer="1"), Prompt("q", (), "", {"answer": value}, where="train.jsonl:2")]
    spec = MathSpec(type="math") if kind == "math" else ExactMatchSpec(type="exact_match")
    (problem,) = checker(spec, None).problems(prompts)
    assert "the expected answer in `answer` is empty in 1 of 2 prompts: train.jsonl:2" in problem


GSM8K = "She has 3 + 15 = <<3+15=18>>18 left.\n#### 1,018"


async def test_a_pattern_takes_the_answer_out_of_a_solution():
    exact = ExactMatchSpec(type="exact_match", answer_pattern="#### (.*)")
    found = RegexSpec(type="regex", pattern=r"answer: (.*)", answer_field="answer", answer_pattern="#### (.*)")
    assert await totals(exact, sample("1,018", GSM8K), sample("18", GSM8K)) == [1.0, 0.0]
    assert await totals(found, sample("answer: 1,018", GSM8K)) == [1.0]
    (problem,) = checker(exact, None).problems(
        [prompt(answer=GSM8K), Prompt("q", (), "", {"answer": "1,018"}, where="a.jsonl:2")]
    )
    assert "answer_pattern '#### (.*)' is not found in the column `answer` in 1 of 2 prompts: a.jsonl:2" in problem


@pytest.mark.parametrize(("pattern", "said"), [("#### .*", "it needs a group"), ("(", "not a regular expression")])
def test_an_answer_pattern_has_a_group(pattern, said):
    with pytest.raises(ValidationError, match=said):
        ExactMatchSpec(type="exact_match", answer_pattern=pattern)


async def test_answers_may_be_nested():
    spec = ExactMatchSpec(type="exact_match", answer_field="reward_model.ground_truth")
    assert await totals(spec, sample("4", reward_model={"ground_truth": "4"})) == [1.0]
    (problem,) = checker(spec, None).problems([prompt(reward_model={"ground_thruth": "4"})])
    assert "`reward_model` has no field `ground_truth` (the fields are ground_thruth)" in problem
    assert "Did you mean `reward_model.ground_thruth`?" in problem


async def test_an_unusable_answer_at_run_time_marks_its_sample():
    bad, good = await scores([ExactMatchSpec(type="exact_match")], sample("42", answer=["42"]), sample("42"))
    assert bad.failures == {"exact_match": "the column `answer` must be a text or a number, got \"['42']\" (a list)"}
    assert (good.total, good.failures) == (1.0, {})


async def test_a_pattern_that_backtracks_for_ever_marks_its_sample():
    spec = RegexSpec(type="regex", pattern=r"(a|aa)+$", timeout_s=0.1)
    bad, good = await scores([spec], sample("a" * 60 + "b"), sample("aa"))
    assert bad.failures == {"regex": "the match took longer than timeout_s (0.1 s)"}
    assert good.total == 1.0


def test_a_pattern_that_the_matcher_reads_otherwise_is_refused():
    with pytest.raises(RewardError, match="reward 'regex': not a pattern of the package `regex`"):
        checker(RegexSpec(type="regex", pattern="[[:alpha:]"), None)


R1 = "<think>\n6 x 7 is 42\n</think>\n<answer>42</answer>"


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ({}, R1, 1.0),
        ({}, f"\n {R1}\n", 1.0),
        ({}, f"So: {R1}", 0.0),
        ({"only": False}, f"So: {R1}", 1.0),
        ({}, R1.replace("\n6 x 7 is 42\n", " "), 0.0),  # empty
        ({}, R1.replace("</think>", ""), 0.0),
        ({}, R1 + "<answer>43</answer>", 0.0),  # twice
        ({}, "<answer>42</answer><think>why</think>", 0.0),
        ({}, "<think><answer>42</answer></think>", 0.0),
        ({}, "42", 0.0),
        ({"opened": True}, R1.removeprefix("<think>"), 1.0),
        ({"opened": True}, R1, 0.0),
        ({"tags": ("plan", "think", "answer")}, "<plan>a</plan>" + R1, 1.0),
        ({"tags": ("answer",), "only": False}, R1, 1.0),
    ],
)
async def test_format(options, response, expected):
    assert await totals(FormatSpec(type="format", **options), sample(response)) == [expected]
