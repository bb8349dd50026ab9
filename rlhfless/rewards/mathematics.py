"""Answers compared as mathematics, by math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same.

Its own time limits are of wall time, so that a busy machine would make right answers wrong. Ours are of CPU time, by
a signal, which needs the main thread: that of a worker is where verifiers run. An answer that stops even those (one
huge power holds the interpreter) costs the worker, and so only its own sample.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from rlhfless.records import Prompt
from rlhfless.rewards.protocol import (
    Begin,
    Done,
    RewardError,
    RewardSample,
    Unscorable,
    answer_of,
    attempt,
    column_problems,
    is_answer,
    quote,
)
from rlhfless.spec import MathSpec

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
# The separator between solution and answer in GSM8K.
_GSM8K_MARK = "####"
# The answer in the form of DeepSeek-R1; math-verify does not find a number that is followed by a tag.
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Ratio of wall time to CPU time above which a worker hangs, rather than runs on a busy machine.
_WALL_PER_CPU = 6
# Distinct expected answers that a worker caches: enough for some tens of steps.
_GOLD_CACHE = 4096


class MathReward:
    """1 if the response's answer equals the expected one, else 0. Raises RewardError without math-verify."""

    whole = False

    def __init__(self, spec: MathSpec) -> None:
        self._spec = spec
        self._gold = lru_cache(maxsize=_GOLD_CACHE)(self._parse_gold)
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError(spec.label, "needs the package math-verify; install rlhfless[math]")

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        return column_problems(self._spec.answer_field, prompts, is_answer)

    def prepare(self) -> None:
        importlib.import_module("math_verify")
        # It warns that its own time limits are off, and about answers that it cannot parse; those count as wrong here.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def run(self, samples: Sequence[RewardSample]) -> Iterator[Begin | Done]:
        limit_s = _WALL_PER_CPU * self._spec.cpu_s
        for index, sample in enumerate(samples):
            yield Begin((index,), limit_s)
            yield Done(index, attempt(self._value, sample))

    def _value(self, sample: RewardSample) -> float:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        gold = self._gold(answer_of(sample, self._spec.answer_field))
        boxed_only = self._spec.extraction == "boxed"
        tagged = _TAGGED.findall(sample.response)
        response = tagged[-1] if tagged else sample.response
        if boxed_only and "\\boxed" not in response:
            return 0.0
        boxed_first: Any = LatexExtractionConfig(boxed_match_priority=0)
        targets = [boxed_first] if boxed_only else [boxed_first, ExprExtractionConfig()]
        try:
            with _cpu_limit(self._spec.cpu_s):
                answer = parse(response, targets, parsing_timeout=0)
                return float(verify(gold, answer, timeout_seconds=0))
        except _OutOfTime:
            return 0.0

    def _parse_gold(self, text: str) -> list[Any]:
        from math_verify import parse

        written = text.rpartition(_GSM8K_MARK)[2].strip()
        bare = not any(mark in written for mark in _DELIMITERS)
        # LaTeX is only found between delimiters; a bare `\frac{1}{2}` gets some.
        candidates = (f"${written}$", written) if bare else (written,)
        with suppress(_OutOfTime), _cpu_limit(self._spec.cpu_s):
            for candidate in candidates:
                if gold := parse(candidate, parsing_timeout=0):
                    return list(gold)
        raise Unscorable(f"math-verify finds no mathematics in the expected answer {quote(text)}")


class _OutOfTime(BaseException):
    """Not an Exception, because math-verify catches those and goes on."""


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """Raise _OutOfTime within the block once this process has used `limit_s` of CPU time."""

    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
