"""Tests in a row's columns: what is read, and what is refused before a run, without any program."""

import base64
import json
import pickle
import zlib

import pytest

from rlhfless.records import Prompt
from rlhfless.rewards import code_tests
from rlhfless.rewards.code import CodeReward
from rlhfless.rewards.code_tests import CallTest, CodeTest, OutputTest, same_output
from rlhfless.rewards.protocol import Unscorable
from rlhfless.spec import CodeSpec


def spec(**options):
    return CodeSpec(type="code", **options)


def read(tests, **columns):
    return list(code_tests.tests_of({"tests": tests, **columns}, spec()))


def fault(tests, **columns):
    (problem,) = CodeReward(spec()).problems(
        [Prompt("p", (1,), "text", {"tests": tests, **columns}, where="a.jsonl:3")]
    )
    assert problem.startswith("the tests cannot be used in 1 of 1 prompts: a.jsonl:3: ")
    return problem


@pytest.mark.parametrize(
    ("column", "tests"),
    [
        ("assert f(1) == 2", [CodeTest("assert f(1) == 2")]),
        (["assert f(1)", "assert f(2)"], [CodeTest("assert f(1)"), CodeTest("assert f(2)")]),
        ({"input": "1", "output": "2"}, [OutputTest("1", "2")]),
        ({"input": None, "output": "2"}, [OutputTest("", "2")]),
        ('[{"input": "1", "output": "2"}, "assert f(1)"]', [OutputTest("1", "2"), CodeTest("assert f(1)")]),
        ({"inputs": ["1", "2"], "outputs": ["2", "4"]}, [OutputTest("1", "2"), OutputTest("2", "4")]),
        ({"inputs": [["1", "2"]], "outputs": [["2"]], "fn_name": None}, [OutputTest("1\n2", "2")]),
        ({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[2]]}, [CallTest("f", (1, "a"), ([2], 2))]),
        ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [[1, 2]]}, [CallTest("f", ({1: 2},), ([1, 2],))]),
        (
            [{"input": '1\n"a"', "output": "[2]", "testtype": "functional", "fn_name": "f"}],
            [CallTest("f", (1, "a"), ([2],))],
        ),
        (
            [{"input": "(1, 2)", "output": "True", "type": "functional", "fn_name": "f"}],
            [CallTest("f", ([1, 2],), (True,))],
        ),
        ({"type": "stdin_stdout", "fn_name": "f", "input": "1", "output": "2"}, [OutputTest("1", "2")]),
        ("[assert_(x) for x in f(1)]\nassert f(1)", [CodeTest("[assert_(x) for x in f(1)]\nassert f(1)")]),
    ],
)
def test_columns_of_tests(column, tests):
    assert read(column) == tests


def test_the_function_s_name_comes_from_the_test_then_from_the_row():
    functional = {"input": "1", "output": "2", "testtype": "functional"}
    assert read([{**functional, "metadata": {"func_name": "g"}}], metadata='{"func_name": "f"}')[0].function == "g"
    assert read([functional], metadata='{"func_name": "f"}')[0].function == "f"
    assert read([functional], entry_point="h", metadata='{"func_name": "f"}')[0].function == "h"
    assert "no `fn_name`, and no column `entry_point` or `metadata`" in fault([functional], metadata="{}")
    assert "which is not a function name" in fault([functional], entry_point="two words")


FUNCTION = "def check(candidate):\n    assert candidate(1) == 2"
SKIPPED = (
    "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('no')\n    def test_a(self):\n        assert f(1)"
)


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (None, "it is null"),
        (3, "it is '3' (an int)"),
        ("", "the text is empty: there is nothing to run"),
        (" \n\t", "the text is empty"),
        ("# assert f(1) == 2", "no statement: there is nothing to run"),
        ('"""assert f(1)"""', "no statement"),
        ("pass", "no statement"),
        ([], "the list is empty"),
        ("[]", "the list is empty"),
        (["assert f(1)", ""], "test 2 of 2: the text is empty"),
        ({}, "a test has no `output`"),
        ({"input": "1"}, "a test has no `output`"),
        ({"inputs": ["1"], "outputs": []}, "must have equal length; they have 1 and 0"),
        ({"inputs": [], "outputs": []}, "are empty: there is nothing to run"),
        ('{"inputs": ["1", "2"], "outputs": ["2"], "fn_name": "f"}', "they have 2 and 1"),
        ({"inputs": "1", "outputs": "2"}, "must be lists of equal length"),
        ({"input": 1, "output": "2"}, "`input` must be a text"),
        ([{"input": "1", "output": ""}, {"input": "2", "output": " \n"}], "all expected outputs in `tests` are empty"),
        ({"input": "1", "outptu": "2"}, "the unknown field `outptu`"),
        ({"input": "1", "output": "2", "timeout": 3}, "the unknown field `timeout`"),
        ({"input": "1", "output": "2", "testtype": "interactive"}, "the test type 'interactive' is unknown"),
        ({"language": "cpp", "test_cases": [{"input": "1", "output": "2"}]}, "only Python is run"),
        ({"fn_name": "f", "inputs": [3], "outputs": [6]}, "must be the list of arguments of `f`"),
        ({"fn_name": "f", "input": "3", "output": "six"}, "the output 'six' of a functional test is not JSON"),
        ({"fn_name": "f", "input": "a b", "output": "6"}, "the argument 'a b' of a functional test is not JSON"),
        ({"fn_name": "f", "inputs": [["a"]], "outputs": [{1, 2}]}, "which JSON cannot hold"),
        ('[{"input": "1", "output": "2"}', "it is neither JSON"),
        ("assert f(1) ==", "the test code is not Python: line 1"),
        ("return f(1)", "the test code is not Python: line 1: 'return' outside function"),
        ("def test_a():\n    nonlocal x\n    assert f(x)", "the test code is not Python: line 2"),
        ("```python\nassert f(1)\n```", "the test code is not Python: line 1"),
        ("f(1)", "it has no assert, so every program would pass"),
        ("print(f(1) == 2)", "it has no assert"),
        ("assert True", "what it asserts is constant"),
        ("assert 1 + 1 == 2", "what it asserts is constant"),
        ("assert (f(1) == 2, 'message')", "line 1 of the test code asserts a tuple"),
        ("x = 1\nassert x == 1", "uses nothing of the response's program"),
        ("def f(x):\n    return x\nassert f(1) == 1", "uses nothing of the response's program"),
        ("def helper():\n    assert f(1) == 2", "its check in line 2 is in a function or class that nothing calls"),
        ("class Checks:\n    def a(self):\n        assert f(1) == 2", "that nothing calls"),
        ("def outer():\n    def test_a():\n        assert f(1) == 2", "that nothing calls"),
        (SKIPPED, "that nothing calls"),
        ("def test_a(mocker):\n    assert f(mocker)", "the test `test_a` needs `mocker`, a fixture of pytest"),
        (
            "import pytest\n@pytest.fixture(params=[1])\ndef x():\n    return 1\ndef test_a(x):\n    assert f(x)",
            "the test `test_a` needs `x`",
        ),
        (
            "import pytest\n@pytest.fixture\ndef x(y):\n    return y\ndef test_a(x):\n    assert f(x)",
            "the test `test_a` needs `x`",
        ),
        ("class TestA:\n    def a(self):\n        assert f(1) == 2", "that nothing calls"),
        ("import pytest\n@pytest.mark.parametrize('x', [])\ndef test_a(x):\n    assert f(x)", "has no parameters"),
        (FUNCTION, "no column `entry_point` or `metadata` has it; name the column"),
        ("assert candidate(1) == 2", "needs the function under test"),
        ("from no_such_package import f\nassert f(1)", "imports `no_such_package`, which is not installed"),
        ("from .solution import f\nassert f(1)", "a relative import"),
        ("[{'input': '1', 'output': '2'}]", "it is a value of Python as text; write it as JSON"),
    ],
)
def test_what_is_no_test_is_refused_before_the_run(column, what):
    message = fault(column)
    assert what in message
    assert "the column `tests` holds" in message or "all expected outputs" in message


@pytest.mark.parametrize(
    "code",
    [
        "if f(1) != 2:\n    raise ValueError",
        "try:\n    f(None)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError",
        "import pytest\nwith pytest.raises(TypeError):\n    f(None)",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        "def helper():\n    assert f(1) == 2\nhelper()",
        "def same(a, b):\n    assert a == b\ndef test_a():\n    same(f(1), 2)",
        "class Checks:\n    def a(self):\n        assert f(1) == 2\nChecks().a()",
        "from solution import *\nassert f(1) == 2",
        "import solution\ndef test_a():\n    assert solution.f(1) == 2",
        "if __name__ == '__main__':\n    assert f(1) == 2",
        "def test(f):\n    assert f(1) == 2\ntest(f)",
        "import unittest as u\nclass A(u.IsolatedAsyncioTestCase):\n    async def test_a(self):\n        assert f(1)",
        "try:\n    f(None)\n    assert False, 'no error'\nexcept TypeError:\n    pass",
        "import pytest\n@pytest.mark.parametrize(argnames='x', argvalues=[1])\ndef test_a(x):\n    assert f(x) == 2",
        "import pytest\n@pytest.mark.parametrize('x', [1])\nclass TestA:\n    def test(self, x):\n        assert f(x)",
        "from unittest.mock import patch\n@patch('solution.g')\ndef test_a(g):\n    assert f(1) == 2",
        "try:\n    import no_such_package\nexcept ImportError:\n    pass\nassert f(1)",
    ],
)
def test_what_checks_something_is_taken(code):
    assert read(code) == [CodeTest(code)]


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_packed_tests_of_livecodebench_are_read_without_running_the_pickle(capsys):
    tests = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    assert read(packed(tests)) == [OutputTest("1", "2")]
    assert read(base64.b64encode(zlib.compress(tests.encode())).decode()) == [OutputTest("1", "2")]
    for value in (Evil(), [tests], (tests, tests), 3):
        assert "are a pickle of more than a text" in fault(packed(value))
    assert capsys.readouterr().out == ""


def test_a_column_may_be_empty_where_another_has_tests():
    both = spec(tests_field=("test_list", "challenge_test_list"))
    row = {"test_list": ["assert f(1)"], "challenge_test_list": []}
    assert code_tests.tests_of(row, both) == (CodeTest("assert f(1)"),)
    with pytest.raises(Unscorable, match="there is no test in `test_list` and `challenge_test_list`"):
        code_tests.tests_of({**row, "test_list": []}, both)


def test_the_empty_sets_of_code_contests_are_passed_over():
    sets = {name: {"input": [], "output": []} for name in ("public_tests", "private_tests")}
    both = spec(tests_field=tuple(sets))
    one = {**sets, "private_tests": {"input": ["1"], "output": ["2"]}}
    assert code_tests.tests_of(one, both) == (OutputTest("1", "2"),)
    with pytest.raises(Unscorable, match="there is no test in"):
        code_tests.tests_of(sets, both)


def test_a_column_that_the_spec_names_must_be_there():
    row = {"tests": FUNCTION, "entry": "f"}
    assert code_tests.tests_of(row, spec(entry_point_field="entry")) == (CodeTest(FUNCTION, "f"),)
    row["entry_point"] = "f"
    for key, name in (("entry_point_field", "entri"), ("setup_field", "setup"), ("prompt_field", "stub")):
        options = {key: name}
        with pytest.raises(Unscorable, match=rf"there is no column `{name}` \({key}\)"):
            code_tests.tests_of({**row, "metadata": '{"func_name": "f"}'}, spec(**options))
    with pytest.raises(Unscorable, match=r"there is no column `test`.*`tests`"):
        code_tests.tests_of(row, spec(tests_field="test"))


def test_faults_are_named_by_row_and_equal_ones_together():
    rows = [{"tests": "assert f(1)"}, {"tests": ""}, {}, {}, {"tests": ""}]
    prompts = [Prompt(str(i), (1,), "text", row, where=f"a.jsonl:{i + 1}") for i, row in enumerate(rows)]
    (problem,) = CodeReward(spec()).problems(prompts)
    assert problem.startswith(
        "the tests cannot be used in 4 of 5 prompts: a.jsonl:2: the column `tests` holds '': the text"
    )
    assert "; a.jsonl:3: there is no column `tests`" in problem
    assert problem.endswith("; and 2 more")


@pytest.mark.parametrize(
    ("given", "expected", "tolerance", "wanted"),
    [
        ("1 2\n3\n", "1 2 \n3", 1e-6, True),
        ("1\r\n2\r\n", "1\n2", 1e-6, True),
        ("1\n\n2", "1\n2", 1e-6, False),
        ("0.30000000000000004", "0.3", 1e-6, True),
        ("0.30000000000000004", "0.3", 0, False),
        ("x = 2", "x = 2.0", 1e-6, True),
        ("3.141593 yes", "3.1415926 yes", 1e-6, True),
        ("3.15 yes", "3.14 yes", 1e-6, False),
        ("1e-3", "0.001", 1e-6, True),
        ("1000000000.0001", "1e9", 1e-6, True),
        ("1000000008", "1000000007", 1e-6, False),
        ("2.0", "2", 1e-6, True),
        ("2.0", "2", 0, False),
        ("2.0000001", "2", 1e-6, False),
        ("7", "007", 1e-6, False),
        ("-0.0", "0", 1e-6, True),
        ("1e999999", "1", 1e-6, False),
        ("nan", "0.5", 1e-6, False),
        ("0.5 ", "0.5 0.5", 1e-6, False),
        ("1_0.0", "10.0", 1e-6, False),
        ("1.2.3", "1.2.4", 1e-6, False),
        ("a\x0bb", "a\nb", 1e-6, False),
    ],
)
def test_outputs_are_compared_as_texts_and_decimal_numbers_with_a_tolerance(given, expected, tolerance, wanted):
    assert same_output(given, expected, tolerance) is wanted
