"""The policy's code against tests, and the limits that it runs under."""

import os
import time

import pytest

from fakes.builders import code_value
from rlhfless.records import Prompt
from rlhfless.rewards.code import CodeReward, passes
from rlhfless.rewards.code_tests import CallTest, CodeTest, OutputTest
from rlhfless.rewards.confinement import CodeTask, protection, run_confined
from rlhfless.spec import CodeSpec

SPEC = CodeSpec(type="code", timeout_s=20, cpu_s=10)
DOUBLE = "print(2 * int(input()))"


def needs(name):
    return pytest.mark.skipif(not getattr(protection(), name), reason=f"no {name} protection here")


# -- what is run, against what


def test_a_response_without_a_python_program_gets_0():
    assert code_value("```cpp\nint main() {}\n```", {"tests": [{"input": "", "output": "1"}]}) == 0.0


def test_all_tests_or_the_share_of_them():
    tests = [{"input": "1\n", "output": "2\n"}, {"input": "2", "output": "4  "}, {"input": "3", "output": "7"}]
    response = f"```python\n{DOUBLE}\n```"
    assert code_value(response, {"tests": tests}) == 0.0
    assert code_value(response, {"tests": tests}, max_tests=2) == 1.0
    assert code_value(response, {"tests": tests}, score="fraction") == pytest.approx(2 / 3)


def test_packages_can_be_used_and_asserts_see_the_code():
    source = "import numpy as np\nimport threading\ndef f(x):\n    return np.add(x, 1)"
    assert passes([source], CodeTest("assert f(1) == 2"), SPEC)
    assert not passes([source], CodeTest("assert f(1) == 3"), SPEC)


def test_the_part_under_main_runs_for_programs_and_not_for_functions():
    source = "def f():\n    return 1\nif __name__ == '__main__':\n    print(f(), input())"
    assert passes([source], OutputTest("2", "1 2"), SPEC)
    assert passes([source], CodeTest("assert f() == 1"), SPEC)


def test_dataclasses_and_pickles_find_the_program_s_module():
    source = """
from __future__ import annotations
import pickle
from dataclasses import dataclass
@dataclass
class Point:
    x: int
def f(x):
    return pickle.loads(pickle.dumps(Point(x)))
"""
    assert passes([source], CodeTest("assert f(1) == Point(1)"), SPEC)
    assert passes([f"{source}\nprint(f(1))"], OutputTest("", "Point(x=1)"), SPEC)


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("print(1)\nexit()", True),
        ("print(1)\nimport sys\nsys.exit(0)", True),
        ("print(1, flush=True)\nimport os\nos._exit(0)", True),
        ("print(1)\n1 / 0", False),
        ("print(1)\nexit(3)", False),
        ("print(1, flush=True)\nimport os\nos.abort()", False),
    ],
)
def test_a_program_that_crashes_after_its_output_is_wrong(program, wanted):
    assert passes([program], OutputTest("", "1"), SPEC) is wanted


# -- what is no pass, and what is not allowed


CALL = CallTest("f", (1,), (2,))
UNITTEST = "import unittest\nclass A(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), 2)"
KINDS = {
    "assert": CodeTest("assert f(1) == 2"),
    "call": CALL,
    "check": CodeTest("def check(candidate):\n    assert candidate(1) == 2", "f"),
    "pytest": CodeTest("def test_f():\n    assert f(1) == 2"),
    "isclose": CodeTest("import math\nassert math.isclose(f(1), 2)"),
    "numpy": CodeTest("import numpy as np\nnp.testing.assert_allclose(f(1), 2)"),
    "unittest": CodeTest(UNITTEST),
    "parametrize": CodeTest("""
import pytest
@pytest.mark.parametrize("x", [1])
class TestA:
    @pytest.mark.parametrize(argnames="y", argvalues=[2, pytest.param(2)])
    def test_a(self, x, y):
        assert f(x) == y
"""),
    "assert False": CodeTest("try:\n    assert f(1) == 2\n    f(1)[0]\n    assert False\nexcept TypeError:\n    pass"),
    "a runner of unittest": CodeTest(f"{UNITTEST}\nunittest.TextTestRunner().run(unittest.makeSuite(A))"),
    "an assert that is caught": CodeTest("try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('wrong')"),
    "tests that are caught": CodeTest(
        "def test_f():\n    assert f(1) == 2\ntry:\n    test_f()\nexcept BaseException:\n    pass"
    ),
}
CHEATS = {
    "wrong": "def f(x):\n    return 3",
    "exit": "exit(0)",
    "os._exit": "import os; os._exit(0)",
    "SystemExit": "raise SystemExit",
    "exit in the function": "def f(x):\n    exit(0)",
    "os._exit in the function": "import os\ndef f(x):\n    os._exit(0)",
    "own tests": "def f(x):\n    return 3\ndef check(candidate): pass\ndef test_f(): pass\nclass A: pass",
    "replaced functions": """
import builtins, math, sys, unittest
import numpy.testing
for name in ("exec", "compile", "callable", "issubclass", "isinstance", "all", "any", "type"):
    setattr(builtins, name, lambda *a, **k: True)
math.isclose = numpy.testing.assert_allclose = unittest.TestCase.assertEqual = lambda *a, **k: True
unittest.TestResult.wasSuccessful = unittest.TestCase.run = lambda *a: True
sys.modules["unittest"] = sys.modules["math"] = sys.modules["numpy"] = sys
def f(x):
    return 3
""",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_passes_by_being_right_only(kind, cheat):
    assert not passes([CHEATS[cheat]], KINDS[kind], SPEC)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_program_passes_each_kind_of_test(kind):
    assert passes(["def f(x):\n    return 2"], KINDS[kind], SPEC)


@pytest.mark.parametrize("test", [CALL, KINDS["assert"], CodeTest("assert [f(1)] == [2] and len([f(1)]) == 1")])
@pytest.mark.parametrize("base", ["int", "object"])
def test_an_object_that_equals_everything_is_no_result(test, base):
    source = f"class A({base}):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()"
    assert not passes([source], test, SPEC)


def test_objects_of_the_program_can_be_compared():
    source = (
        "class A(int):\n    def __eq__(self, other):\n        return self + 0 == other + 0\ndef f(x):\n    return A(x)"
    )
    assert passes([source], CodeTest("assert f(2) == 2\nassert [f(2)] == [f(2)]\nassert f(2) != f(3)"), SPEC)


@pytest.mark.parametrize(
    ("solution", "fault"),
    [
        ("def f(x):\n    return 2 * x", ""),
        (["def f(x):\n    return 2 * x", "no Python"], ""),
        ('["def f(x):\\n    return 2 * x"]', ""),
        (
            "def f(x):\n    return x",
            "b.jsonl:4: the program in the column `code` fails test 2, \"CodeTest(source='assert f(1)",
        ),
        (None, "the column `code` holds null, which is not a program"),
    ],
)
def test_a_row_s_own_solution_is_tried_before_the_run(solution, fault):
    row = {"tests": ["assert f(0) == 0", "assert f(1) == 2"], "code": solution}
    prompt = Prompt("p", (1,), "text", row, where="b.jsonl:4")
    problems = CodeReward(CodeSpec(type="code", solution_field="code")).problems([prompt])
    assert bool(problems) == bool(fault)
    assert fault in "".join(problems)


def test_a_test_whose_checks_do_not_run_is_no_pass():
    test = CodeTest("for x in f(1):\n    assert x == 1")
    assert passes(["def f(x):\n    return [x]"], test, SPEC)
    assert not passes(["def f(x):\n    return []"], test, SPEC)


@pytest.mark.parametrize(
    ("result", "expected", "wanted"),
    [
        ("(1, (2, 3))", [1, [2, 3]], True),
        ("[1, 2]", [1, 2, 3], False),
        ("{1: (2,), None: 1.5}", {"1": [2], "null": 1.5}, True),
        ("__import__('collections').Counter('aab')", {"a": 2, "b": 1}, True),
        ("{1: 2}", {"1": 3}, False),
        ("'1'", 1, False),
        ("1", "1", False),
        ("0.1 + 0.2", 0.3, True),
        ("0.31", 0.3, False),
        ("2.0", 2, True),
        ("10**9 + 1.0", 10**9, False),
        ("__import__('numpy').int64(2)", 2, True),
        ("__import__('numpy').array([1, 2])", [1, 2], True),
        ("None", None, True),
        ("None", 0, False),
        ("{1, 2}", [1, 2], False),
        ("True", True, True),
    ],
)
def test_results_of_a_call(result, expected, wanted):
    assert passes([f"def f(x):\n    return {result}"], CallTest("f", (1,), (expected,)), SPEC) is wanted


@pytest.mark.parametrize(
    "source",
    [
        "def f(:",
        "bytearray(2**30)",
        "open('big', 'wb').write(bytes(17 * 2**20))",
        "files = [open('x', 'w') for _ in range(80)]",
        "print('x' * 300_000)",
    ],
)
def test_faults_and_memory_files_and_output_beyond_the_limits_are_no_pass(source):
    assert not passes([source], OutputTest("", ""), SPEC)


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(600)"])
def test_time_is_limited(source):
    began = time.monotonic()
    assert not passes([source], OutputTest("", ""), CodeSpec(type="code", timeout_s=2, cpu_s=1))
    assert time.monotonic() - began < 60


@needs("network")
def test_there_is_no_network():
    connect = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    refused = f"try:\n    {connect}\nexcept ConnectionRefusedError:\n    pass\nexcept OSError:\n    print('none')"
    assert passes([refused], OutputTest("", "none"), SPEC)


@needs("processes")
@pytest.mark.parametrize("source", ["import os; os.fork()", "import subprocess; subprocess.run(['true'])"])
def test_no_process_can_be_started(source):
    assert not passes([source], OutputTest("", ""), SPEC)


@needs("processes")
def test_no_other_process_can_be_killed():
    refused = "import os\ntry:\n    os.kill(os.getppid(), 9)\nexcept PermissionError:\n    print('refused')"
    assert passes([refused], OutputTest("", "refused"), SPEC)


def test_the_environment_and_the_folder_are_its_own(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    show = "import os; print('SECRET_TOKEN' in os.environ, os.listdir()); open('left', 'w'); print(os.getcwd())"
    first, folder = run_confined(CodeTask(show), SPEC).output.splitlines()
    assert first == "False []"
    assert not os.path.exists(folder)
