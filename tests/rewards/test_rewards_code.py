"""The policy's code against tests, and the limits that it runs under."""

import os
import time

import pytest

from fakes.reward_samples import samples_of
from rlhfless.records import Prompt
from rlhfless.rewards import code
from rlhfless.rewards.code import CodeReward, Test, passes
from rlhfless.rewards.confinement import CodeTask, protection, run_confined
from rlhfless.rewards.protocol import Done, Unscorable
from rlhfless.spec import CodeSpec

SPEC = CodeSpec(type="code", timeout_s=20, cpu_s=10)
DOUBLE = "print(2 * int(input()))"


def value(response, tests, **options):
    reward = CodeReward(CodeSpec(type="code", timeout_s=20, **options))
    (event,) = [event for event in reward.run(samples_of(response, tests=tests)) if isinstance(event, Done)]
    return event.outcome


def needs(name):
    return pytest.mark.skipif(not getattr(protection(), name), reason=f"no {name} protection here")


# -- what is run, against what


def test_a_response_without_a_python_program_gets_0():
    assert value("```cpp\nint main() {}\n```", [{"input": "", "output": ""}]) == 0.0


@pytest.mark.parametrize(
    ("column", "tests"),
    [
        ("assert f(1) == 2", [Test(code="assert f(1) == 2")]),
        (["assert f(1)", "assert f(2)"], [Test(code="assert f(1)"), Test(code="assert f(2)")]),
        ({"input": "1", "output": "2"}, [Test(input="1", output="2")]),
        ('[{"input": "1", "output": "2"}, "assert f(1)"]', [Test(input="1", output="2"), Test(code="assert f(1)")]),
        ({"inputs": ["1", "2"], "outputs": ["2", "4"]}, [Test(input="1", output="2"), Test(input="2", output="4")]),
        ("[f(1) for _ in 'x']", [Test(code="[f(1) for _ in 'x']")]),
    ],
)
def test_columns_of_tests(column, tests):
    assert list(code.tests_of(column)) == tests


@pytest.mark.parametrize("column", [None, 3, [], "[]", {"inputs": ["1"], "outputs": []}, {"input": "1"}, [None]])
def test_what_is_no_test_is_refused_before_the_run(column):
    with pytest.raises(Unscorable):
        code.tests_of(column)
    (problem,) = CodeReward(SPEC).problems([Prompt("p", (1,), "the prompt", {"tests": column})])
    assert "the column `tests` holds" in problem


def test_all_tests_or_the_share_of_them():
    tests = [{"input": "1\n", "output": "2\n"}, {"input": "2", "output": "4  "}, {"input": "3", "output": "7"}]
    response = f"```python\n{DOUBLE}\n```"
    assert value(response, tests) == 0.0
    assert value(response, tests, max_tests=2) == 1.0
    assert value(response, tests, score="fraction") == pytest.approx(2 / 3)


def test_packages_can_be_used_and_asserts_see_the_code():
    source = "import numpy as np\nimport threading\ndef f(x):\n    return np.add(x, 1)"
    assert passes(source, Test(code="assert f(1) == 2"), SPEC)
    assert not passes(source, Test(code="assert f(1) == 3"), SPEC)


# -- what is no pass, and what is not allowed


@pytest.mark.parametrize("early", ["exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_an_early_exit_passes_no_asserts(early):
    assert not passes(early, Test(code="assert False"), SPEC)


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
    assert not passes(source, Test(), SPEC)


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(600)"])
def test_time_is_limited(source):
    began = time.monotonic()
    assert not passes(source, Test(), CodeSpec(type="code", timeout_s=2, cpu_s=1))
    assert time.monotonic() - began < 60


@needs("network")
def test_there_is_no_network():
    connect = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    refused = f"try:\n    {connect}\nexcept ConnectionRefusedError:\n    pass\nexcept OSError:\n    print('none')"
    assert passes(refused, Test(output="none"), SPEC)


@needs("processes")
@pytest.mark.parametrize("source", ["import os; os.fork()", "import subprocess; subprocess.run(['true'])"])
def test_no_process_can_be_started(source):
    assert not passes(source, Test(), SPEC)


@needs("processes")
def test_no_other_process_can_be_killed():
    refused = "import os\ntry:\n    os.kill(os.getppid(), 9)\nexcept PermissionError:\n    print('refused')"
    assert passes(refused, Test(output="refused"), SPEC)


def test_the_environment_and_the_folder_are_its_own(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    show = "import os; print('SECRET_TOKEN' in os.environ, os.listdir()); open('left', 'w'); print(os.getcwd())"
    first, folder = run_confined(CodeTask(show), SPEC).output.splitlines()
    assert first == "False []"
    assert not os.path.exists(folder)
