"""A user's own callables: how they are called, and what is said when they are wrong."""

import asyncio
import pickle
import threading

import numpy as np
import pytest
import torch

from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import RewardError, Sample, build
from rlhfless.spec import PythonRewardSpec


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Writes a module of the user's, under a name of its own, and gives that name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        name = f"user_module_{abs(hash(request.node.nodeid))}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def reward(module):
    """A reward from the source of a function `score`."""

    def make(source, **options):
        return build([PythonRewardSpec(type="python", name="mine", target=f"{module(source)}:score", **options)])

    return make


def samples(*responses, **columns):
    return [
        Sample("the prompt", text, len(text), FinishReason.LENGTH, columns, "p-1", index)
        for index, text in enumerate(responses)
    ]


async def values(rewards, given):
    return [score.parts["mine"] for score in await rewards.score(given)]


async def fault(rewards, given):
    with pytest.raises(RewardError) as caught:
        await rewards.score(given)
    return str(caught.value)


# -- how it is called


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_it_is_called_with_what_its_signature_asks_for(reward, prefix):
    signature = "response, *, answer, scale, level=7"
    source = f"{prefix}def score({signature}): return len(response) * scale + answer + level"
    rewards = reward(source, kwargs={"scale": 10})
    assert await values(rewards, samples("a", "bb", answer=0.5)) == [17.5, 27.5]


async def test_every_built_in_argument_and_all_columns_by_name(reward):
    source = """
def score(prompt, response, response_tokens, finish_reason, prompt_id, sample_index, columns, **rest):
    assert (prompt, response, response_tokens, prompt_id) == ("the prompt", "abc", 3, "p-1")
    assert finish_reason == "length" and sample_index == 0
    assert columns == {"answer": "x", "extra": 1} and rest == {"answer": "x", "extra": 1, "k": 2}
    return 1
"""
    assert await values(reward(source, kwargs={"k": 2}), samples("abc", answer="x", extra=1)) == [1.0]


async def test_a_column_called_like_a_built_in_argument_is_reached_through_columns(reward):
    source = "def score(response, columns): return float(response == 'a' and columns['response'] == 'column')"
    given = [Sample("p", "a", 1, FinishReason.STOP, {"response": "column"})]
    assert await values(reward(source), given) == [1.0]


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_batch_gets_lists_under_the_same_names(reward, prefix):
    source = f"""
{prefix}def score(prompt, response, answer, scale):
    assert prompt == ["the prompt"] * 3 and answer == ["x"] * 3
    return [scale * len(each) for each in response]
"""
    rewards = reward(source, batch=True, kwargs={"scale": 2})
    assert await values(rewards, samples("a", "bb", "ccc", answer="x")) == [2.0, 4.0, 6.0]


async def test_a_batch_fills_columns_that_some_rows_lack_with_none(reward):
    given = [*samples("a", level=1), *samples("b")]
    assert await values(reward("def score(level): return [x or -1 for x in level]", batch=True), given) == [
        1,
        -1,
    ]


@pytest.mark.parametrize("batch", [False, True])
async def test_no_samples_call_nothing(reward, batch):
    assert await reward("def score(): raise RuntimeError", batch=batch).score([]) == []


async def test_a_callable_object_and_a_dotted_target_work(module):
    source = """
class Judge:
    async def __call__(self, response): return len(response)
    @staticmethod
    def half(response): return len(response) / 2
judge = Judge()
"""
    name = module(source)
    for target, expected in ((f"{name}:judge", 3.0), (f"{name}:Judge.half", 1.5)):
        rewards = build([PythonRewardSpec(type="python", name="mine", target=target)])
        assert await values(rewards, samples("abc")) == [expected]


async def test_a_file_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "in_the_current_folder.py").write_text("def score(): return 3")
    monkeypatch.chdir(tmp_path)
    rewards = build([PythonRewardSpec(type="python", name="mine", target="in_the_current_folder:score")])
    assert await values(rewards, samples("x")) == [3.0]


async def test_sync_calls_run_one_at_a_time_outside_the_loop_and_async_ones_together(module):
    source = """
import asyncio, threading, time
running, most = 0, {"sync": 0, "async": 0}
def begin(kind):
    global running
    running += 1
    most[kind] = max(most[kind], running)
def end():
    global running
    running -= 1
def sync(response):
    assert threading.current_thread() is not threading.main_thread()
    begin("sync"); time.sleep(0.01); end()
    return 0
async def together(response):
    assert threading.current_thread() is threading.main_thread()
    begin("async"); await asyncio.sleep(0.05); end()
    return 0
"""
    name = module(source)
    for function in ("sync", "together"):
        rewards = build([PythonRewardSpec(type="python", name="mine", target=f"{name}:{function}")])
        await rewards.score(samples(*"abcde"))
    most = __import__(name).most
    assert most == {"sync": 1, "async": 5}


async def test_parts_are_evaluated_together(module):
    """Each waits for the other: one after the other, they would wait for ever."""
    name = module(
        "import threading\nmeet = threading.Barrier(2)\n"
        "def one(): meet.wait(10); return 1\ndef two(): meet.wait(10); return 2\n"
    )
    specs = [PythonRewardSpec(type="python", name=each, target=f"{name}:{each}") for each in ("one", "two")]
    (score,) = await build(specs).score(samples("x"))
    assert (score.total, score.parts) == (3.0, {"one": 1.0, "two": 2.0})


# -- numbers


@pytest.mark.parametrize(
    "given", [1, 1.0, True, np.float32(1), np.array(1.0), np.array([1]), torch.tensor(1.0), torch.ones(1)]
)
async def test_whatever_is_one_number_is_taken(module, given):
    name = module("value = None\ndef score(): return value")
    rewards = build([PythonRewardSpec(type="python", name="mine", target=f"{name}:score")])
    __import__(name).value = given
    assert await values(rewards, samples("x")) == [1.0]


@pytest.mark.parametrize("made", ["np.array([1.0, 2.0])", "(1, 2)", "torch.tensor([1.0, 2.0])", "[True, 2]"])
async def test_whatever_is_a_list_of_numbers_is_taken(reward, made):
    rewards = reward(f"import numpy as np, torch\ndef score(): return {made}", batch=True)
    assert await values(rewards, samples("x", "y")) == [1.0, 2.0]


@pytest.mark.parametrize(
    "value", ["None", "'1'", "float('nan')", "float('inf')", "10 ** 400", "{}", "1j", "np.ones(2)"]
)
async def test_anything_else_is_refused_with_the_sample(reward, value):
    message = await fault(reward(f"import numpy as np\ndef score(): return {value}"), samples("abc"))
    assert "reward 'mine': returned" in message
    assert "not a finite number, for sample 0 of prompt 'p-1' (response 'abc')" in message


async def test_a_list_from_a_function_called_per_sample_suggests_batch(reward):
    message = await fault(reward("def score(response): return [1.0]"), samples("a"))
    assert "returned '[1.0]'" in message
    assert "set `batch: true`" in message


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("1.0", "with `batch: true` it must return a list"),
        ("None", "returned 'None' for a batch of 2 samples"),
        ("[1.0]", "returned 1 numbers for a batch of 2 samples, the first of prompt 'p-1': one per sample"),
        ("[1.0, None]", "returned 'None', not a finite number, for sample 1 of prompt 'p-1'"),
        ("[1.0, float('nan')]", "returned 'nan', not a finite number, for sample 1"),
    ],
)
async def test_a_wrong_batch_result_is_refused(reward, value, part):
    assert part in await fault(reward(f"def score(response): return {value}", batch=True), samples("a", "b"))


# -- exceptions and time limits


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_an_exception_names_reward_target_sample_and_line(reward, prefix):
    source = f"import json\n{prefix}def score(response):\n    return json.loads(response)['score']\n"
    message = await fault(reward(source), samples("not json"))
    assert "reward 'mine': 'user_module_" in message
    assert ":score' raised json.decoder.JSONDecodeError: Expecting value" in message
    assert ".py:3) for sample 0 of prompt 'p-1' (response 'not json')" in message


@pytest.mark.parametrize("error", ["SystemExit(3)", "StopIteration()", "TimeoutError('server')"])
@pytest.mark.parametrize("prefix", ["", "async "])
async def test_odd_exceptions_are_reported_like_any_other(reward, prefix, error):
    message = await fault(reward(f"{prefix}def score(): raise {error}"), samples("x"))
    assert " raised " in message
    assert "longer than" not in message


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef score(): time.sleep(60)",
        "import asyncio\nasync def score(): await asyncio.sleep(60)",
    ],
)
async def test_a_call_that_takes_too_long_is_given_up(reward, source):
    message = await fault(reward(source, timeout_s=0.05), samples("abc"))
    assert "took longer than timeout_s (0.05 s) for sample 0 of prompt 'p-1'" in message


async def test_a_blocking_call_does_not_block_the_loop(module):
    """The call waits for something that only the loop does."""
    name = module("import threading\ngo = threading.Event()\ndef score(): return float(go.wait(10))")
    rewards = build([PythonRewardSpec(type="python", name="mine", target=f"{name}:score")])
    asyncio.get_running_loop().call_later(0.01, __import__(name).go.set)
    assert await values(rewards, samples("x")) == [1.0]


async def test_one_failure_cancels_the_other_calls(module):
    source = """
import asyncio
cancelled = []
async def score(response):
    if response == "bad": raise ValueError("bad")
    try: await asyncio.sleep(60)
    except asyncio.CancelledError: cancelled.append(response); raise
"""
    name = module(source)
    rewards = build([PythonRewardSpec(type="python", name="mine", target=f"{name}:score")])
    assert "raised ValueError: bad" in await fault(rewards, samples("a", "bad", "c"))
    assert __import__(name).cancelled == ["a", "c"]


def test_a_stuck_thread_does_not_keep_the_process(reward):
    async def give_up():
        await fault(reward("import time\ndef score(): time.sleep(60)", timeout_s=0.01), samples("x"))

    asyncio.run(give_up())
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward")


async def test_a_reward_error_survives_pickling(reward):
    with pytest.raises(RewardError) as caught:
        await reward("def score(): return None").score(samples("x"))
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
        build([PythonRewardSpec(type="python", name="mine", target=target)])
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
