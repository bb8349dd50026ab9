"""Right programs in the forms that models write them, by real confined processes."""

import json
import sys

import pytest

from fakes.builders import code_value
from rlhfless.rewards.code_tests import same_output


def fenced(program):
    return f"Here it is:\n\n```python\n{program}\n```\nIt works."


def of_output(given, expected):
    return {"tests": [{"input": given, "output": expected}]}


SUM = of_output("3\n1 2 3\n", "6\n")
READ = "input()\nprint(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    "program",
    [
        "total = defaultdict(int)\ninput()\nfor x in input().split(): total[0] += int(x)\nprint(total[0])",
        "print(sum(map(int, sys.stdin.read().split()[1:])))",
        "@cache\ndef f(a: Tuple[int, ...]): return sum(a)\ninput()\nprint(f(tuple(map(int, input().split()))))",
        "print(sum(map(int, open('/dev/stdin').read().split()[1:])))",
        "print(sum(map(int, open(0).read().split()[1:])))",
        f"import os\nfolder = os.path.dirname(os.path.abspath(__file__))\n{READ}",
        "import threading\nthreading.stack_size(2**29)\ndef main():\n    input()\n"
        "    print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()",
        f"import resource\nresource.setrlimit(resource.RLIMIT_STACK, (-1, -1))\n{READ}",
    ],
)
def test_programs_of_contests_run_as_their_judges_run_them(program):
    assert code_value(fenced(program), SUM) == 1.0


COUNT = "n = int(input())\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(n))"


@pytest.mark.parametrize(
    "program", [COUNT, "import sys, functools\nsys.setrecursionlimit(10**6)\n" + COUNT.replace("def", "@cache\ndef")]
)
def test_deep_recursion(program):
    assert code_value(fenced(program), of_output("30000\n", "30000\n")) == 1.0


def test_whole_numbers_of_any_length():
    digits = "9" * (sys.get_int_max_str_digits() + 1000)
    assert code_value(fenced("print(int(input()))"), of_output(digits, digits)) == 1.0


def test_an_output_may_be_as_long_as_the_expected_one():
    wanted = "\n".join(map(str, range(60_000)))  # longer than OUTPUT_BYTES
    row = of_output("60000", wanted)
    assert code_value(fenced("print('\\n'.join(map(str, range(int(input())))))"), row) == 1.0
    assert code_value(fenced("while True: print('x' * 100)"), row) == 0.0


def called(name, inputs, output):
    return {"tests": json.dumps({"fn_name": name, "inputs": [inputs], "outputs": [output]})}


@pytest.mark.parametrize("name", ["merge", "count", "product", "combinations", "add", "search"])
@pytest.mark.parametrize("first", ["", "from operator import *\nfrom itertools import *\nfrom heapq import *\n"])
def test_a_method_may_have_the_name_of_a_function_of_the_library(name, first):
    program = (
        f"{first}class Solution:\n    def {name}(self, a: List[int], b: int) -> List[int]:\n        return a + [b]"
    )
    assert code_value(fenced(program), called(name, [[1], 2], [1, 2])) == 1.0
    assert code_value(fenced(program.replace("[b]", "[0]")), called(name, [[1], 2], [1, 2])) == 0.0


@pytest.mark.parametrize(
    "program",
    ["async def f(x):\n    return x + 1", "import sys\ndef f(x):\n    return x + 1\nprint(f(1))\nsys.exit(0)"],
)
def test_functions_that_are_called(program):
    assert code_value(fenced(program), called("f", [1], 2)) == 1.0
    assert code_value(fenced(program.replace("x + 1", "x")), called("f", [1], 2)) == 0.0


PROGRAM = "def add(a, b):\n    return a + b"
AFTER = [
    "print(add(1, 2))",
    "from solution import add\ndef test_add():\n    assert add(1, 1) == 2",
    "import unittest\nclass TestAdd(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 1), 2)",
    "result = add(1, 2)",
]
TESTS = [
    {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
    {"test": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},
    {"test": "from solution import add\ndef test():\n    assert add(1, 2) == 3"},
    {"test": "import solution\ndef test():\n    assert solution.add(1, 2) == 3"},
    called("add", [1, 2], 3),
    {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "Solution().add"},
]


@pytest.mark.parametrize("row", TESTS)
@pytest.mark.parametrize("after", AFTER)
def test_a_block_that_shows_the_use_of_the_program_is_not_the_program(row, after):
    field = {"tests_field": "test" if "test" in row else "tests"}
    method = f"class Solution:\n    def add(self, a, b):\n        return a + b\n{PROGRAM}"
    program = method if row.get("entry_point", "").startswith("Sol") else PROGRAM
    assert code_value(f"{fenced(program)}\n\nUsage:\n\n{fenced(after)}", row, **field) == 1.0
    wrong = program.replace("a + b", "a - b")
    assert code_value(f"{fenced(wrong)}\n\n{fenced(after)}", row, **field) == 0.0
    assert code_value(f"{fenced(program)}\n\n{fenced(wrong)}", row, **field) == 0.0
    assert code_value(f"{fenced(wrong)}\n\n{fenced(program)}", row, **field) == 1.0


def test_the_last_block_is_the_program_where_its_output_is_tested():
    assert code_value(f"{fenced('print(1)')}\n{fenced(READ)}", SUM) == 1.0
    assert code_value(f"{fenced(READ)}\n{fenced('print(1)')}", SUM) == 0.0


@pytest.mark.parametrize("text", ["[BEGIN]\n{}\n[DONE]", "Sure.\n[PYTHON]\n{}\n[/PYTHON]\nDone.", "[BEGIN]\n{}\n"])
def test_marks_of_mbpp_and_code_llama(text):
    assert code_value(text.format(PROGRAM), TESTS[1], tests_field="test") == 1.0


def test_imports_from_the_future_stay_first():
    stub = "import math\n\ndef half(x):\n    return x / 2\n\ndef f(x: float) -> float:\n    '''Half.'''\n"
    row = {"test": "def check(candidate):\n    assert candidate(4) == 2", "entry_point": "f", "prompt": stub}
    program = "from __future__ import annotations\nimport math\n\ndef f(x: floating) -> float:\n    return half(x)"
    assert code_value(fenced(program), row, tests_field="test") == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "import pytest\ndef test_a():\n    if add(1, 2) != 3:\n        pytest.fail('wrong')",
        "import pytest\ndef test_a():\n    try:\n        assert_same = add(1, 2) == 3 or 1 / 0\n"
        "    except Exception:\n        pytest.fail('wrong')",
        "def test_a():\n    try:\n        x = {3: 1}[add(1, 2)]\n    except KeyError as error:\n"
        "        raise ValueError from error",
    ],
)
def test_tests_that_fail_by_a_call(code):
    assert code_value(fenced(PROGRAM), {"test": code}, tests_field="test") == 1.0
    assert code_value(fenced(PROGRAM.replace("+", "*")), {"test": code}, tests_field="test") == 0.0


@pytest.mark.parametrize(
    "row",
    [
        {"tests": {"functional": "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(Solution().add)"}},
        {"tests": {"inputs": [[]], "outputs": [["3"]]}},
    ],
    ids=["code-r1", "no input"],
)
def test_further_shapes(row):
    program = "class Solution:\n    def add(self, a, b):\n        return a + b\nprint(Solution().add(1, 2))"
    assert code_value(fenced(program), row) == 1.0
    assert code_value(fenced(program.replace("a + b", "a - b")), row) == 0.0


@pytest.mark.parametrize(
    ("given", "expected", "wanted"),
    [
        ("(0.30000000000000004, 1)", "(0.3, 1)", True),
        ("[0.1,0.30000000000000004]", "[0.1,0.3]", True),
        ("x=0.30000000000000004", "x=0.3", True),
        ("$0.30000000000000004", "$0.3", True),
        ("12.500000001%", "12.5%", True),
        ("It is 0.30000000000000004.", "It is 0.3.", True),
        ("-0.0", "0.0", True),
        ("(0.3, 2)", "(0.3, 1)", False),
        ("(0.4, 1)", "(0.3, 1)", False),
        ("(0.3,1)", "(0.3, 1)", False),
        ("x=3.0000001", "x=3", False),
        ("v0.30000001", "v0.3", False),
        ("y=0.3", "x=0.3", False),
        ("-0.3", "0.3", False),
        ("0.3 0.3", "0.3", False),
        ("1.2.30000001", "1.2.3", False),
        ("0,3", "0.3", False),
    ],
)
def test_decimal_numbers_within_words(given, expected, wanted):
    assert same_output(given, expected, 1e-6) is wanted


FIXTURE = "import pytest\nfrom solution import add\n\n@pytest.fixture{}\n"


@pytest.mark.parametrize(
    "code",
    [
        FIXTURE.format("") + "def pair():\n    return 1, 2\ndef test_a(pair):\n    assert add(*pair) == 3",
        FIXTURE.format("(scope='module')")
        + "def pair():\n    yield 1, 2\ndef test_a(pair):\n    assert add(*pair) == 3",
        FIXTURE.format("(name='two')") + "def pair():\n    return 1, 2\ndef test_a(two):\n    assert add(*two) == 3",
        FIXTURE.format("") + "def one():\n    return 1\n@pytest.fixture\ndef pair(one):\n    return one, 2\n"
        "class TestA:\n    def test_a(self, pair):\n        assert add(*pair) == 3",
        FIXTURE.format("(autouse=True)")
        + "def prepare():\n    global x\n    x = 1\ndef test_a():\n    assert add(x, 2) == 3",
        FIXTURE.format("") + "def test_data():\n    return [1, 2]\n@pytest.mark.parametrize('want', [3])\n"
        "def test_a(test_data, want):\n    assert add(*test_data) == want",
        "def test_a(capsys):\n    print(add(1, 2))\n    assert capsys.readouterr().out == '3\\n'",
        "def test_a(tmp_path):\n    (tmp_path / 'x').write_text(str(add(1, 2)))\n"
        "    assert (tmp_path / 'x').read_text() == '3'",
        "def test_a(monkeypatch):\n    monkeypatch.setattr('builtins.input', lambda: '1')\n"
        "    assert add(int(input()), 2) == 3",
    ],
)
def test_fixtures_of_pytest(code):
    assert code_value(fenced(PROGRAM), {"test": code}, tests_field="test") == 1.0
    assert code_value(fenced(PROGRAM.replace("+", "*")), {"test": code}, tests_field="test") == 0.0


def test_fixtures_end_after_each_test_and_are_not_the_programs():
    code = (
        "import pytest\nended = []\n@pytest.fixture\ndef pair():\n    yield [1, 2]\n    ended.append(1)\n"
        "def test_a(pair):\n    pair.append(3)\n    assert add(1, 2) == 3\n"
        "def test_b(pair):\n    assert pair == [1, 2] and ended == [1] and add(*pair) == 3"
    )
    assert code_value(fenced(PROGRAM), {"test": code}, tests_field="test") == 1.0
    printed = "def test_a(capsys):\n    add(1, 2)\n    assert capsys.readouterr().out == '3\\n'"
    cheat = "import pytest\n@pytest.fixture\ndef capsys():\n"
    cheat += "    yield type('C', (), {'readouterr': lambda s: s, 'out': '3\\n'})()\n"
    assert code_value(fenced(cheat + PROGRAM), {"test": printed}, tests_field="test") == 0.0
