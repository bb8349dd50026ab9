"""What is found in rewards and their columns before a run, and data of the field's shapes that is right."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from rlhfless.prepare.prompts import load_prompts
from rlhfless.prepare.rewards import reward_problems, reward_warnings
from rlhfless.prepare.shown_rows import gets_of
from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import RewardSample, checker
from rlhfless.spec import RunSpec, SizesSpec


def spec_of(*rewards, **prompts):
    given = {"path": "/data/train.jsonl"} | prompts
    return RunSpec.model_validate({"model": {"path": "/model"}, "prompts": given, "rewards": list(rewards)})


def prompts_of(*texts, **columns):
    return [Prompt(f"p{i}", (), text, columns, where=f"train.jsonl:{i}") for i, text in enumerate(texts, start=1)]


@pytest.mark.parametrize(
    ("options", "texts", "said"),
    [
        ({}, ("user: 2 + 2?\nassistant: <think>\n", "b<think>"), ["2 of 2 prompts, first train.jsonl:1, end with"]),
        ({}, ("a", "b<think>"), ["1 of 2 prompts, first train.jsonl:2, end with `<think>`", "set `opened: true`"]),
        (
            {"opened": True},
            ("a<think>", "b"),
            ["`opened` is true, but 1 of 2 prompts, first train.jsonl:2, do not end"],
        ),
        ({"tags": ["plan", "answer"]}, ("a<plan>",), ["end with `<plan>`"]),
        ({}, ("a", "<think> why </think>"), []),
        ({"opened": True}, ("a<think>", "b<think>\n\n"), []),
        ({"tags": ["plan", "answer"]}, ("a<think>",), []),
    ],
)
def test_a_format_whose_first_tag_the_prompt_writes_is_warned_of(options, texts, said):
    warnings = reward_warnings(spec_of({"type": "format", **options}), prompts_of(*texts))
    assert len(warnings) == bool(said)
    for part in said:
        assert part in warnings[0]


@pytest.mark.parametrize(
    ("options", "columns", "said"),
    [
        (
            {"prompt_field": "prompt"},
            {"question": "a"},
            "the column `prompt` is missing in 1 of 1 prompts: train.jsonl:1",
        ),
        ({"prompt_field": "prompt"}, {"prompt": [{"role": "user", "content": "a"}]}, "(a list), and a text is needed"),
        ({"prompt_field": "prompt", "chat_template": True}, {"prompt": 7}, "a text or a list of messages is needed"),
        ({"prompt_field": "data.promt"}, {"data": {"prompt": "a"}}, "Did you mean `data.prompt`?"),
    ],
)
def test_the_prompt_of_a_reward_model_is_looked_for_before_the_run(options, columns, said):
    reward = {"type": "reward_model", "path": "/no/model", **options}
    problems = [problem.what for problem in reward_problems(spec_of(reward), prompts_of("a", **columns))]
    assert any(said in problem for problem in problems)
    assert any("Without `prompt_field` the prompt is scored as the policy saw it" in problem for problem in problems)


def test_a_prompt_of_a_reward_model_that_is_there_is_no_problem():
    reward = {"type": "reward_model", "path": "/no/model", "prompt_field": "prompt", "chat_template": True}
    for value in ("a", [{"role": "user", "content": "a"}]):
        problems = reward_problems(spec_of(reward), prompts_of("a", prompt=value))
        assert not any("column" in problem.what for problem in problems)


# Made rows in the shapes of the data sets of those names.
GSM8K = {
    "question": "Ann has 3 boxes of 400 pens and 34 more. How many pens has she?",
    "answer": "Ann has 3*400=<<3*400=1200>>1200 pens in boxes.\nShe has 1200+34=<<1200+34=1234>>1234.\n#### 1,234",
}
MATH = {
    "problem": "What is the sum of the roots of $2x^2 - 3x + 1$?",
    "level": "Level 2",
    "type": "Algebra",
    "solution": "By Vieta the sum is $-\\frac{-3}{2}$, so it is $\\boxed{\\frac{3}{2}}$.",
}
MATH_500 = {**MATH, "answer": "\\frac{3}{2}", "unique_id": "test/algebra/1.json"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "w1 w2"}],
    "ability": "math",
    "reward_model": {"ground_truth": "1234", "style": "rule"},
    "extra_info": {"split": "train", "index": 7},
}
GSM8K_EXACT = {"type": "exact_match", "answer_pattern": "#### (.*)"}
VERL_ANSWER = {"answer_field": "reward_model.ground_truth"}


@pytest.mark.parametrize(
    ("row", "prompts", "reward", "right", "wrong"),
    [
        (GSM8K, {"prompt_field": "question"}, {"type": "math"}, "So it is \\boxed{1234}.", "\\boxed{1200}"),
        (GSM8K, {"prompt_field": "question"}, {"type": "math"}, "The answer is 1234 pens.", "The answer is 34."),
        (GSM8K, {"prompt_field": "question"}, GSM8K_EXACT, "1,234", "1234"),
        (
            MATH,
            {"prompt_field": "problem"},
            {"type": "math", "answer_field": "solution"},
            "\\boxed{1.5}",
            "\\boxed{-\\frac{3}{2}}",
        ),
        (MATH_500, {"prompt_field": "problem", "id_field": "unique_id"}, {"type": "math"}, "$\\frac{6}{4}$", "$3$"),
        (
            VERL,
            {"chat_template": True, "id_field": "extra_info.index"},
            {"type": "math", **VERL_ANSWER},
            "#### 1234",
            "#### 1233",
        ),
        (VERL, {"chat_template": True}, {"type": "exact_match", **VERL_ANSWER}, "1234", "1,234"),
        (
            VERL,
            {"chat_template": True},
            {"type": "regex", "pattern": "#### (.*)", **VERL_ANSWER},
            "so\n#### 1234",
            "so\n#### 234",
        ),
    ],
    ids=["gsm8k", "gsm8k said", "gsm8k exact", "math", "math-500", "verl", "verl exact", "verl regex"],
)
async def test_data_of_the_field_is_scored_from_its_own_columns(
    chat_tokenizer, write_rows, tmp_path, row, prompts, reward, right, wrong
):
    parquet = tmp_path / "train.parquet"
    pa.parquet.write_table(pa.Table.from_pylist([row]), parquet)
    for path in (write_rows([row]), parquet):
        spec = spec_of(reward, path=str(path), **prompts)
        given = {"max_context_tokens": None, "seed": 0, "sizes": spec.sizes}
        (prompt,) = load_prompts(spec.data, chat_tokenizer, **given).train
        assert reward_problems(spec, [prompt]) == []
        samples = [RewardSample(prompt.text, text, 1, FinishReason.STOP, prompt.columns) for text in (right, wrong)]
        outcomes = {}
        await checker(spec.rewards[0], None)(samples, outcomes.__setitem__)  # in this process
        assert outcomes == {0: 1.0, 1: 0.0}


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        (GSM8K, "answers", "Did you mean `answer`?"),
        (MATH, "answer", "the fields are problem, level, type, solution"),
        (VERL, "reward_model.groundtruth", "Did you mean `reward_model.ground_truth`?"),
        (VERL, "ground_truth", "Did you mean `reward_model.ground_truth`?"),
        (VERL, "reward_model", "(a mapping), and a text or a number is needed"),
    ],
)
def test_a_wrong_answer_field_is_refused_with_the_nearest(row, field, said):
    (problem,) = reward_problems(spec_of({"type": "math", "answer_field": field}), prompts_of("a", **row))
    assert problem.where == "rewards.0"
    assert "train.jsonl:1" in problem.what
    assert said in problem.what


@pytest.mark.parametrize(
    ("reward", "rows"),
    [
        (
            {"type": "code", "tests_field": "tests"},
            [
                {"tests": [{"input": "1", "output": "2"}]},
                {"tests": [{"input": "3", "output": "4", "testtype": "stdin"}, {"inputs": ["5"], "outputs": ["6"]}]},
            ],
        ),
        (
            {"type": "json_schema", "schema_field": "schema"},
            [
                {"schema": {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}},
                {"schema": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}},
            ],
        ),
        (
            {"type": "exact_match", "answer_field": "reward_model.ground_truth"},
            [{"reward_model": {"ground_truth": "4"}}, {"reward_model": {"ground_truth": "5", "style": "rule"}}],
        ),
        ({"type": "python", "target": "math:floor"}, [{"extra": {"split": "a"}}, {"extra": {"index": 1}}]),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
def test_rewards_get_of_parquet_what_they_get_of_jsonl(tmp_path, tokenizer, reward, rows):
    rows = [{"prompt": f"w{number}", **row} for number, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    spec = spec_of(reward)
    gets = []
    for name in ("rows.jsonl", "rows.parquet"):
        data = spec.data.model_copy(update={"path": str(tmp_path / name)})
        prompts = load_prompts(data, tokenizer, max_context_tokens=None, seed=0, sizes=SizesSpec()).train
        if reward["type"] != "python":
            assert reward_problems(spec, prompts) == []
        gets.append([gets_of(spec.rewards[0], prompt) for prompt in prompts])
    assert gets[0] == gets[1]
