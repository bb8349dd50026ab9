"""A user's own callables: how they are called, and what is said when they are wrong. In this process; what happens to
workers is in test_rewards_workers.py."""

import pickle

import numpy as np
import pytest
import torch

from fakes.builders import samples_of
from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import Failed, RewardError, RewardSample
from rlhfless.rewards.protocol import Begin, Done
from rlhfless.rewards.python import PythonReward
from rlhfless.spec import PythonRewardSpec


@pytest.fixture
def reward(module):
    """A reward from the source of a function `score`."""

    def make(source, **options):
        return of(f"{module(source)}:score", **options)

    return make


def of(target, **options):
    return PythonReward(PythonRewardSpec(type="python", name="mine", target=target, **options))


def outcomes(reward, given):
    found = {event.index: event.outcome for event in reward.run(given) if isinstance(event, Done)}
    return [found[index] for index in range(len(given))]


def calls(reward, given):
    """Which samples each call had."""
    return [event.indices for event in reward.run(given) if isinstance(event, Begin)]


def fault(reward, given):
    """The cause of the first failure."""
    return next(outcome.cause for outcome in outcomes(reward, given) if isinstance(outcome, Failed))


# -- how it is called


@pytest.mark.parametrize("prefix", ["", "async "])
def test_it_is_called_with_what_its_signature_asks_for(reward, prefix):
    signature = "response, *, answer, scale, level=7"
    source = f"{prefix}def score({signature}): return len(response) * scale + answer + level"
    rewards = reward(source, kwargs={"scale": 10})
    assert outcomes(rewards, samples_of("a", "bb", answer=0.5)) == [17.5, 27.5]


def test_every_built_in_argument_and_all_columns_by_name(reward):
    source = """
def score(prompt, response, response_tokens, finish_reason, prompt_id, sample_index, columns, transcript, **rest):
    assert not transcript and (prompt, response, response_tokens, prompt_id) == ("the prompt", "abc", 3, "p-1")
    assert finish_reason == "length" and sample_index == 0
    assert columns == {"answer": "x", "extra": 1} and rest == {"answer": "x", "extra": 1, "k": 2}
    return 1
"""
    assert outcomes(reward(source, kwargs={"k": 2}), samples_of("abc", answer="x", extra=1)) == [1.0]


def test_a_column_called_like_a_built_in_argument_is_reached_through_columns(reward):
    source = "def score(response, columns): return float(response == 'a' and columns['response'] == 'column')"
    given = [RewardSample("p", "a", 1, FinishReason.STOP, {"response": "column"})]
    assert outcomes(reward(source), given) == [1.0]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_batch_gets_lists_under_the_same_names(reward, prefix):
    source = f"""
{prefix}def score(prompt, response, answer, scale):
    assert prompt == ["the prompt"] * 3 and answer == ["x"] * 3
    return [scale * len(each) for each in response]
"""
    rewards = reward(source, batch=True, kwargs={"scale": 2})
    assert outcomes(rewards, samples_of("a", "bb", "ccc", answer="x")) == [2.0, 4.0, 6.0]


def test_a_batch_fills_columns_that_some_rows_lack_with_none(reward):
    given = [*samples_of("a", level=1), *samples_of("b")]
    assert outcomes(reward("def score(level): return [x or -1 for x in level]", batch=True), given) == [
        1,
        -1,
    ]


def test_a_callable_object_and_a_dotted_target_work(module):
    source = """
class Judge:
    async def __call__(self, response): return len(response)
    @staticmethod
    def half(response): return len(response) / 2
judge = Judge()
"""
    name = module(source)
    for target, expected in ((f"{name}:judge", 3.0), (f"{name}:Judge.half", 1.5)):
        rewards = of(target)
        assert outcomes(rewards, samples_of("abc")) == [expected]


def test_a_file_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "in_the_current_folder.py").write_text("def score(): return 3")
    monkeypatch.chdir(tmp_path)
    rewards = of("in_the_current_folder:score")
    assert outcomes(rewards, samples_of("x")) == [3.0]


# -- numbers


@pytest.mark.parametrize(
    "given", [1, 1.0, True, np.float32(1), np.array(1.0), np.array([1]), torch.tensor(1.0), torch.ones(1)]
)
def test_whatever_is_one_number_is_taken(module, given):
    name = module("value = None\ndef score(): return value")
    rewards = of(f"{name}:score")
    __import__(name).value = given
    assert outcomes(rewards, samples_of("x")) == [1.0]


@pytest.mark.parametrize("made", ["np.array([1.0, 2.0])", "(1, 2)", "torch.tensor([1.0, 2.0])", "[True, 2]"])
def test_whatever_is_a_list_of_numbers_is_taken(reward, made):
    rewards = reward(f"import numpy as np, torch\ndef score(): return {made}", batch=True)
    assert outcomes(rewards, samples_of("x", "y")) == [1.0, 2.0]


@pytest.mark.parametrize(
    "value", ["None", "'1'", "float('nan')", "float('inf')", "10 ** 400", "{}", "1j", "np.ones(2)"]
)
def test_anything_else_is_refused(reward, value):
    message = fault(reward(f"import numpy as np\ndef score(): return {value}"), samples_of("abc"))
    assert message.startswith("returned ")
    assert ", not a finite number" in message


def test_a_list_from_a_function_called_per_sample_suggests_batch(reward):
    message = fault(reward("def score(response): return [1.0]"), samples_of("a"))
    assert "returned '[1.0]'" in message
    assert "set `batch: true`" in message


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("1.0", "with `batch: true` it must return a list"),
        ("None", "returned 'None'; with `batch: true` it must return a list"),
        ("[1.0] * 3", "returned 3 numbers for 1 samples: one per sample is needed"),
    ],
)
def test_a_wrong_batch_result_is_refused(reward, value, part):
    assert part in fault(reward(f"def score(response): return {value}", batch=True), samples_of("a", "b"))


# -- exceptions and time limits


@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_exception_names_reward_target_sample_and_line(reward, prefix):
    source = f"import json\n{prefix}def score(response):\n    return json.loads(response)['score']\n"
    message = fault(reward(source), samples_of("not json"))
    assert message.startswith("'user_module_")
    assert ":score' raised json.decoder.JSONDecodeError: Expecting value" in message
    assert message.endswith(".py:3)")


@pytest.mark.parametrize("error", ["SystemExit(3)", "StopIteration()", "TimeoutError('server')"])
@pytest.mark.parametrize("prefix", ["", "async "])
def test_odd_exceptions_are_reported_like_any_other(reward, prefix, error):
    message = fault(reward(f"{prefix}def score(): raise {error}"), samples_of("x"))
    assert " raised " in message
    assert "longer than" not in message


def test_an_async_call_that_takes_too_long_is_given_up(reward):
    source = "import asyncio\nasync def score(response): await asyncio.sleep(60 if response == 'slow' else 0); return 1"
    quick, slow = outcomes(reward(source, timeout_s=0.05), samples_of("quick", "slow"))
    assert quick == 1.0
    assert "took longer than timeout_s (0.05 s)" in slow.cause


def test_async_calls_are_made_together(module):
    source = """
import asyncio
running = most = 0
async def score():
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.05)
    running -= 1
    return 0
"""
    name = module(source)
    assert calls(of(f"{name}:score"), samples_of(*"abcde")) == [(0, 1, 2, 3, 4)]
    assert __import__(name).most == 5


def test_sync_calls_are_announced_one_by_one(reward):
    assert calls(reward("def score(): return 1"), samples_of(*"abc")) == [(0,), (1,), (2,)]


def test_a_batch_that_fails_is_tried_by_prompt_and_then_by_sample(reward):
    source = "def score(response):\n    assert 'bad' not in response\n    return [len(response)] * len(response)"
    given = [*samples_of("a", "b", prompt_id="p"), *samples_of("c", "bad", prompt_id="q")]
    rewards = reward(source, batch=True)
    assert calls(rewards, given) == [(0, 1, 2, 3), (0, 1), (2, 3), (2,), (3,)]
    first, second, third, bad = outcomes(rewards, given)
    assert (first, second, third) == (2.0, 2.0, 1.0)
    assert "raised AssertionError" in bad.cause


def test_one_value_of_a_batch_that_is_no_number_marks_its_sample_alone(reward):
    rewards = reward("def score(response): return [None if r == 'bad' else 1 for r in response]", batch=True)
    assert calls(rewards, samples_of("a", "bad")) == [(0, 1)]
    assert outcomes(rewards, samples_of("a", "bad")) == [1.0, Failed("returned 'None', not a finite number")]


def test_a_reward_error_survives_pickling(reward):
    with pytest.raises(RewardError) as caught:
        of("no_such_module:score")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# -- what is found before the run


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("no_such_module:score", ["no module 'no_such_module'", "PYTHONPATH"]),
        ("json.no_such:score", ["no module 'json.no_such'"]),
        ("json:lods", ["no `lods` in", "json", "did you mean `loads`?"]),
        ("json:JSONDecoder", ["is a class, not a function"]),
        ("json:__name__", ["is a str, not a function"]),
        ("json:decoder", ["is a module, not a function"]),
    ],
)
def test_a_target_that_cannot_be_had_is_explained(target, parts):
    with pytest.raises(RewardError) as caught:
        of(target)
    assert all(part in str(caught.value) for part in ["reward 'mine'", repr(target), *parts]), caught.value


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import no_such_package\n", ["needs the module 'no_such_package', which is not installed"]),
        ("x = 1 / 0\n", ["failed: ZeroDivisionError: division by zero", ".py:1)"]),
        ("def score(:\n", ["failed: SyntaxError", ".py:1)"]),
        ("raise SystemExit('bye')\n", ["failed: SystemExit: bye"]),
        ("def score(response, /): return 1", ["`response` by position only"]),
    ],
)
def test_a_module_that_fails_is_explained(reward, source, parts):
    with pytest.raises(RewardError) as caught:
        reward(source)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_required_parameter_that_nothing_fills_is_found(reward):
    rewards = reward("def score(completion, response, answr): return 1")
    prompts = [Prompt(str(i), (1,), f"prompt {i}", {"answer": i}) for i in range(3)]
    problems = rewards.problems(prompts)
    assert len(problems) == 2
    assert "requires `answr`" in problems[0]
    assert "did you mean `answer`?" in problems[0]
    assert "requires `completion`" in problems[1]
    assert "in 3 of 3 prompts (first: 'prompt 0')" in problems[1]
    assert "Available: prompt, response, response_tokens" in problems[1]


def test_a_column_that_only_some_prompts_have_is_found(reward):
    rewards = reward("def score(answer, level=0, **rest): return 1")
    prompts = [Prompt("0", (1,), "has it", {"answer": 1}), Prompt("1", (1,), "lacks it", {"level": 1})]
    (problem,) = rewards.problems(prompts)
    assert "requires `answer`" in problem
    assert "in 1 of 2 prompts (first: 'lacks it')" in problem


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"scael": 1}, "`scael`, which 'user_module"),
        ({"response": "x"}, "`response`, which every sample fills"),
    ],
)
def test_kwargs_that_would_do_nothing_are_refused(reward, kwargs, part):
    with pytest.raises(RewardError) as caught:
        reward("def score(response, scale): return 1", kwargs=kwargs)
    assert part in str(caught.value)


# -- fields of other names


VERL_ROW = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": 7}}
VERL_SCORE = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth and data_source == "gsm8k" and extra_info["index"] == 7)
"""
VERL_FIELDS = {"solution_str": "response", "ground_truth": "reward_model.ground_truth"}


def test_parameters_are_filled_from_fields_of_other_names(reward):
    made = reward(VERL_SCORE, fields=VERL_FIELDS)
    assert made.problems([Prompt("p", (), "", VERL_ROW)]) == []
    assert outcomes(made, samples_of("4", "5", **VERL_ROW)) == [1.0, 0.0]


def test_fields_are_lists_in_a_batch(reward):
    made = reward("def score(truth): return [float(each) for each in truth]", batch=True, fields={"truth": "a.b"})
    assert outcomes(made, samples_of("x", "y", a={"b": 3})) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"truth": "a.answr"}, ["the column `a.answr` is missing in 1 of 1 prompts: train.jsonl:1", "`a.answer`?"]),
        ({}, ["requires `truth`", "(first: train.jsonl:1)", "Write `fields: {truth: x.truth}`"]),
    ],
)
def test_a_field_that_no_row_has_is_found_before_the_run(reward, fields, said):
    made = reward("def score(truth): return 1", fields=fields)
    columns = {"a": {"answer": 1}, "x": {"truth": 2}}
    (problem,) = made.problems([Prompt("p", (), "", columns, where="train.jsonl:1")])
    for part in said:
        assert part in problem


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": {"response": "a"}}, "`fields` has `response`, which every sample fills itself"),
        ({"fields": {"other": "a"}}, "`fields` has `other`, which"),
        ({"fields": {"truth": "a"}, "kwargs": {"truth": 1}}, "`kwargs` and `fields` both have `truth`"),
    ],
)
def test_fields_that_fit_no_parameter_are_refused(reward, options, said):
    with pytest.raises(RewardError, match=said):
        reward("def score(response, truth): return 1", **options)
