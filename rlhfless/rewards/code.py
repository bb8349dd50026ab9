"""The response's Python code against tests, each in a process of its own (rlhfless.rewards.confined).

A test is a pair of input and expected output, or code with asserts that runs after the response's code in the same
process. A process may use so much CPU, memory, files and wall time; its folder is new and removed afterwards.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from rlhfless.records import Prompt
from rlhfless.rewards.protocol import Begin, Done, Sample, Unscorable, attempt, column_problems, quote
from rlhfless.spec import CodeSpec

MIB, KIB = 2**20, 2**10

CLEAN_UP_S = 1.0
"""To end a test's process and remove its folder: milliseconds as a rule, more on a crowded machine."""

# Isolated, and without the start-up files of site-packages: a start takes 10 ms instead of 40.
_FLAGS = ("-I", "-S", "-B", "-X", "utf8")
_SCRIPT = Path(__file__).with_name("confined.py")
_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Test:
    """One test. With `output` None it is `code` that must run to its end, else input for the response's program."""

    __test__ = False  # no test of pytest's

    code: str = ""
    input: str = ""
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Protection:
    """Which protections this machine's kernel grants to `code` rewards."""

    network: bool
    """No network can be reached."""
    processes: bool
    """No other process can be started."""

    def warnings(self) -> list[str]:
        """What a user should know of what is missing."""
        missing = [] if self.network else ["can reach the network"]
        missing += [] if self.processes else ["can start processes"]
        if not missing:
            return []
        return [f"code that the policy writes {' and '.join(missing)} here: the kernel grants no such limits"]


class CodeReward:
    """Share of tests passed, or whether all are."""

    whole = False

    def __init__(self, spec: CodeSpec) -> None:
        self._spec = spec

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        return column_problems(self._spec.tests_field, prompts, _is_tests)

    def prepare(self) -> None:
        """Nothing is heavy here."""

    def run(self, samples: Sequence[Sample]) -> Iterator[Begin | Done]:
        for index, sample in enumerate(samples):
            yield Begin((index,), self._limit_s(sample))
            yield Done(index, attempt(self._value, sample))

    def _tests(self, sample: Sample) -> tuple[Test, ...]:
        return tests_of(sample.columns.get(self._spec.tests_field))[: self._spec.max_tests]

    def _limit_s(self, sample: Sample) -> float:
        """All tests at their limits, and as much again: the tests' own limits are to act first."""
        try:
            count = len(self._tests(sample))
        except Unscorable:
            count = 1
        return 2 * count * (self._spec.timeout_s + CLEAN_UP_S)

    def _value(self, sample: Sample) -> float:
        tests = self._tests(sample)
        results = (passes(code_of(sample.response), test, self._spec) for test in tests)
        return float(all(results)) if self._spec.score == "all" else sum(results) / len(tests)


def code_of(response: str) -> str:
    """The last fenced block; the whole response where there is none."""
    blocks = _FENCED.findall(response)
    return str(blocks[-1]) if blocks else response


def tests_of(value: Any) -> tuple[Test, ...]:
    """The tests in a column. Raises Unscorable.

    A text is test code, or JSON of what follows. A mapping has `input` and `output`, or `inputs` and `outputs` as
    lists of equal length. A list has any of these.
    """
    if isinstance(value, str):
        try:
            decoded = json.loads(value) if value.lstrip()[:1] in ("[", "{") else None
        except ValueError:
            decoded = None
        found = (Test(code=value),) if decoded is None else tests_of(decoded)
    elif isinstance(value, Mapping):
        found = _pairs(value)
    elif isinstance(value, list | tuple):
        found = tuple(test for item in value for test in tests_of(item))
    else:
        raise Unscorable(f"a test is a text, or has `input` and `output`; got {quote(repr(value))}")
    if not found:
        raise Unscorable("there are no tests")
    return found


def _pairs(value: Mapping[str, Any]) -> tuple[Test, ...]:
    inputs = value.get("inputs", [value.get("input", "")])
    outputs = value.get("outputs", [value.get("output")])
    texts = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs)
    if not texts or not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise Unscorable(f"a test has texts as `input` and `output`; got {quote(repr(value))}")
    return tuple(Test(input=given, output=wanted) for given, wanted in zip(inputs, outputs, strict=True))


def _is_tests(value: Any) -> bool:
    try:
        tests_of(value)
    except Unscorable:
        return False
    return True


def passes(code: str, test: Test, spec: CodeSpec) -> bool:
    """Run the code with one test, in a confined process."""
    token = secrets.token_hex()
    result, output = _confined({"code": code, "tests": test.code, "token": token}, test.input, spec)
    if output is None:
        return False
    # An early exit is a proper end of a program that is judged by its output.
    return result == token if test.output is None else _lines(output) == _lines(test.output)


@lru_cache(maxsize=1)
def protection() -> Protection:
    """What a confined process is kept from on this machine: found by starting one."""
    result, _ = _confined({"code": None}, "", CodeSpec(type="code", timeout_s=30))
    return Protection(**json.loads(result)) if result else Protection(network=False, processes=False)


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines and of the whole, as judges of programs compare."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _confined(config: Mapping[str, Any], given: str, spec: CodeSpec) -> tuple[str, str | None]:
    """What the process wrote to its result fd, and its output: None if that was too long or it was too slow."""
    limits = {
        "parent": os.getpid(),
        "packages": sysconfig.get_path("purelib"),
        "cpu_s": spec.cpu_s,
        "memory_bytes": spec.memory_mib * MIB,
        "file_bytes": spec.file_mib * MIB,
        "open_files": spec.open_files,
    }
    with (
        tempfile.TemporaryDirectory(prefix="rlhfless-code-", ignore_cleanup_errors=True) as folder,
        _file(given.encode()) as stdin,
        _file(json.dumps({**limits, **config}).encode()) as settings,
        _result_pipe() as (reading, writing),
    ):
        with writing:
            process = subprocess.Popen(
                [sys.executable, *_FLAGS, _SCRIPT, str(settings.fileno()), str(writing.fileno())],
                cwd=folder,
                env=_environment(folder),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(settings.fileno(), writing.fileno()),
                start_new_session=True,
            )
        output = _bounded_output(process, spec.output_kib * KIB, time.monotonic() + spec.timeout_s)
        return (reading.read() or b"").decode(), output


@contextmanager
def _result_pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Its reading end never waits: whoever else may hold the writing end, what counts was written by now."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        yield reader, writer


def _file(content: bytes) -> IO[bytes]:
    """A file without a name: an argument or a pipe holds too little for a long program."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(content)
    file.seek(0)
    return file


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours: a token in an environment variable is not for the policy's code."""
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _bounded_output(process: subprocess.Popen[bytes], most_bytes: int, deadline: float) -> str | None:
    """Read until the process ends, and end it: None if it wrote too much or took too long."""
    assert process.stdout is not None
    chunks: list[bytes] = []
    with process.stdout as stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        try:
            while (left_s := deadline - time.monotonic()) > 0 and sum(map(len, chunks)) <= most_bytes:
                if not selector.select(left_s):
                    return None
                chunk = os.read(stream.fileno(), 64 * KIB)
                if not chunk:
                    process.wait(max(0.0, deadline - time.monotonic()))
                    return b"".join(chunks).decode(errors="replace")
                chunks.append(chunk)
            return None
        except subprocess.TimeoutExpired:  # it closed its output and went on
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_S)
