"""Compare answers as mathematics with math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are equal.

Its own limits are wall time, which would fail right answers on a busy machine. Ours are CPU time, by a signal in the
worker's main thread. An answer that defeats even those costs only its worker and its sample.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlhfless.records import Prompt
from rlhfless.rewards.answers import (
    Unit,
    answer_faults,
    answer_of,
    as_text,
    as_words,
    boxed_answer,
    choice,
    differ,
    final_part,
    stated_answers,
    units_of,
)
from rlhfless.rewards.math_text import UNICODE_MATHS, as_latex, unreadable
from rlhfless.rewards.protocol import RewardError, RewardSample, SampleReward, Unscorable, listed, quote
from rlhfless.spec import MathSpec

# The separator between solution and answer in GSM8K.
_GSM8K_MARK = "####"
# Ratio of wall time to CPU time above which a worker hangs, rather than runs on a busy machine.
_WALL_PER_CPU = 6
# Distinct expected answers that a worker caches: enough for some tens of steps.
_GOLD_CACHE = 4096
# Longest answer that is parsed, in characters: longer ones are no answer, and take a parser seconds.
_MOST_CHARS = 1000
# Distinct expected answers that are parsed before a run, at some 10 ms each. Of more, these are evenly spread, and the
# others are only looked through for what a parser drops.
_MOST_PARSED = 1000
# Decimal places to which math-verify compares decimals, and digits to which it compares expressions.
_PLACES, _DIGITS = 6, 15
# Longest expected answer, in characters, that a response may be expected to write in the same words.
_MOST_REPEATED = 200
_INTERVAL = re.compile(r"\\infty|\\cup|\\in(?![a-z])|^\[.*\)$|^\(.*\]$|^\[[^,]*,[^,]*\]$")
_TIME = re.compile(r"\d\d?:\d\d")
_PLAIN_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
# Words of prose in what is left of a text without commands and names of functions.
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}(?![A-Za-z({}])")


@dataclass(frozen=True)
class Expected:
    """A parsed expected answer: words, mathematics, or text that math-verify does not read."""

    text: str
    """The form of `as_text`: a response with the same text is right."""
    words: str = ""
    unread: str = ""
    """Why it is compared as text; empty otherwise."""
    letter: str = ""
    """The choice, A to J."""
    value: str = ""
    """The choice's value, if it is given."""
    percent: Expected | None = None
    """The number of a percentage, without the sign."""
    interval: bool = False
    """Whether it is an interval, which equals the matching inequality."""
    parsed: tuple[Any, ...] = ()
    several: bool = False
    """Whether it is a set or tuple."""
    units: frozenset[Unit] = frozenset()
    """Possible meanings of its unit."""
    places: int = _PLACES
    digits: int = _DIGITS


class MathReward(SampleReward):
    """1 if the response's answer equals the expected one, else 0. Raises RewardError without math-verify."""

    def __init__(self, spec: MathSpec) -> None:
        self._spec = spec
        self.limit_s = _WALL_PER_CPU * spec.cpu_s
        self._gold = lru_cache(maxsize=_GOLD_CACHE)(self._expected)
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError(spec.label, "needs the package math-verify; install rlhfless[math]")

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Report a wrong column: most expected answers are long texts that cannot be read."""
        if problems := answer_faults(self._spec, prompts):
            return problems
        faults = [
            (prompt, unread)
            for prompt, unread in self._unread(prompts)
            if len(_written(answer_of(prompt.columns, self._spec))) > _MOST_REPEATED
        ]
        if len(faults) <= len(prompts) / 2:
            return []
        what = f"the expected answers in `{self._spec.answer_field}` are long texts that cannot be read as mathematics"
        hint = "name the column that holds the final answer (`answer_field`), or take it out by `answer_pattern`"
        return [str(listed(what, faults, len(prompts), hint))]  # of the column, not of rows

    def warnings(self, prompts: Sequence[Prompt]) -> list[str]:
        """Report expected answers that math-verify does not read; they are compared as text."""
        if answer_faults(self._spec, prompts) or not (faults := self._unread(prompts)):
            return []
        what = f"the expected answers in `{self._spec.answer_field}` cannot be read as mathematics"
        return [listed(what, faults, len(prompts), "there, a response is right only if it writes the same text")]

    def _unread(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
        """Return prompts whose expected answers are not read as mathematics, with the cause."""
        self.prepare()
        places: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            places.setdefault(answer_of(prompt.columns, self._spec), []).append(prompt)
        slow = [text for text in places if not _is_quick(text)]
        skipped = {text for i, text in enumerate(slow) if i % math.ceil(len(slow) / _MOST_PARSED)}
        faults = []
        for text, those in places.items():
            try:
                unread = _readable(text)[1] if text in skipped else self._gold(text).unread
            except Unscorable as error:
                unread = str(error)
            faults += [(prompt, unread) for prompt in those if unread]
        return faults

    def prepare(self) -> None:
        importlib.import_module("math_verify")
        # It warns that its own time limits are off, and about answers that it cannot parse; those count as wrong here.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(self, text: str) -> str:
        """Describe how an expected answer is compared, for people to see."""
        from sympy import sstr

        expected = self._gold(text)
        if expected.unread:
            return f"the text {quote(_written(text))}, since {expected.unread}"
        if expected.letter:
            return f"the choice {expected.letter}" + (f", or {self.read(expected.value)}" if expected.value else "")
        return expected.words or str(sstr(expected.parsed[0], full_prec=False))

    def value(self, sample: RewardSample) -> float:
        gold = self._gold(answer_of(sample.columns, self._spec))
        try:
            with _cpu_limit(self._spec.cpu_s):
                said = final_part(sample.response)
                box = boxed_answer(said)
                if box is not None:
                    right = _equal(gold, box.text)
                    return float(right or (gold.several and bool(box.joined) and _equal(gold, box.joined)))
                return float(self._spec.extraction == "any" and _states(gold, said))
        except (_OutOfTime, RecursionError):
            return 0.0

    def _expected(self, text: str) -> Expected:
        """Parse an expected answer, or keep it as text. Raises Unscorable if it is empty."""
        candidates, unread = _readable(text)
        if unread:
            written = _written(text)
            if not written:
                raise Unscorable(f"the expected answer in `{self._spec.answer_field}` is empty")
            return Expected(as_text(written) if len(written) <= _MOST_CHARS else "", unread=unread)
        first = candidates[0]
        if chosen := choice(first):
            return Expected(as_text(first), letter=chosen[0], value=chosen[1])
        if words := _words(first):
            return Expected(as_text(first), words)
        try:
            with _cpu_limit(self._spec.cpu_s):
                for candidate in candidates:
                    if parsed := _parsed(candidate):
                        return _expected(candidate, parsed)
        except (_OutOfTime, RecursionError):
            unread = f"{quote(first)} takes longer than cpu_s ({self._spec.cpu_s:g} s) to parse"
            return Expected(as_text(first), unread=unread)
        return Expected(as_text(first), unread=f"math-verify does not read {quote(first)} as a whole")


def _written(text: str) -> str:
    """Return the answer in a row's text, which may be a solution that ends in one."""
    written = text.rpartition(_GSM8K_MARK)[2].strip()
    box = boxed_answer(written)
    return written if box is None else box.joined or box.text


def _words(text: str) -> str:
    return as_words(text) if len(text) <= _MOST_REPEATED else ""


def _is_quick(text: str) -> bool:
    """Whether an expected answer needs no parser: words or a plain number."""
    written = _written(text)
    return bool(
        choice(written)
        or _words(written)
        or (len(written) <= _MOST_CHARS and _PLAIN_NUMBER.fullmatch(as_latex(written)))
    )


def _readable(text: str) -> tuple[list[str], str]:
    """Return candidate answers of a text, most likely first, or why none can be read."""
    written = _written(text)
    each = dict.fromkeys((written, *stated_answers(written)))
    if readable := [one for one in each if choice(one) or _words(one) or not _fault(one)]:
        return readable, ""
    return [], f"math-verify does not read {quote(written)} as a whole, because of {_fault(written)}"


def _fault(text: str) -> str:
    """Name what of a text cannot be read as mathematics; empty if nothing."""
    if len(text) > _MOST_CHARS:
        return f"its length of {len(text)} characters"
    latex = as_latex(text)
    return unreadable(latex) if latex else "its lack of mathematics"


def _parsed(text: str) -> tuple[Any, ...]:
    """Parse the whole text; empty if it cannot be parsed, or if some name is missing in the result."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Integer, Number

    latex = as_latex(text)
    if _PLAIN_NUMBER.fullmatch(latex):
        return (Integer(int(latex)) if "." not in latex else Number(latex.lstrip("+")),)
    # Units are taken away before: it takes the `t` of `2t` for one.
    config = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    whole = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=config)
    text = f"${latex[:-1]}$%" if latex.endswith("%") else f"${latex}$"
    found = parse(text, [whole], parsing_timeout=0)
    if not found or isinstance(found[0], str) or not _has_all_names(latex, found[0]):
        return ()
    return (_with_imaginary_unit(found[0]),)


def _with_imaginary_unit(value: Any) -> Any:
    from sympy import Expr, I

    names = list(value.free_symbols) if isinstance(value, Expr) else []
    return value.subs(names[0], I) if [str(name) for name in names] == ["i"] else value


def _has_all_names(latex: str, parsed: Any) -> bool:
    """Whether each letter that stands for a value is in the result."""
    if re.search(r"\\(?:int|sum|prod|lim|mathbb|operatorname)|\|", latex):
        return True  # with bound variables and names of sets
    bare = re.sub(r"\\(?:text|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|_\{[^{}]*\}|_.", " ", latex)
    return set(re.findall("[a-z]", bare.lower())) <= set(str(parsed).lower())


def _expected(text: str, parsed: tuple[Any, ...]) -> Expected:
    from sympy import Basic, Number, Set, Tuple
    from sympy.matrices import MatrixBase

    value = parsed[0]
    atoms = value.atoms(Number) if isinstance(value, Basic | MatrixBase) else set()
    small = [abs(float(atom)) for atom in atoms if atom.is_finite and 0 < abs(atom) < 1]
    least = max(min(small, default=1.0), sys.float_info.min)
    # Small numbers keep three digits or more: to six places, 0.0000001 is 0.
    further = max(math.ceil(-math.log10(least)) - 3, 0)
    if value == 0:
        further = 9
    latex = as_latex(text)
    bare = latex[:-1].strip() if latex.endswith("%") else ""
    return Expected(
        as_text(text),
        percent=_expected(bare, _parsed(bare)) if bare and _parsed(bare) else None,
        interval=_INTERVAL.search(latex) is not None,
        parsed=parsed,
        several=isinstance(value, Set | Tuple),
        units=units_of(text),
        places=_PLACES + further,
        digits=_DIGITS + further,
    )


def _equal(gold: Expected, text: str) -> bool:
    """Whether a whole text equals the expected answer."""
    if len(text) > _MOST_CHARS:
        return False
    if gold.letter:
        return _chosen(gold, text)
    if gold.words:
        said = as_words(text)
        if said and _TIME.fullmatch(gold.words):
            return said.removesuffix("am").removesuffix("pm") in (gold.words, gold.words.removesuffix(":00"))
        return said == gold.words
    if differ(gold.units, units_of(text)):
        return False
    if gold.text and as_text(text) == gold.text:
        return True
    # What is not read as a whole is wrong: parsers would take the part that they know.
    if gold.unread or _fault(text):
        return False
    latex = as_latex(text)
    if latex.endswith("%") and gold.percent is None and _verified(gold, _parsed(latex[:-1])):
        return True
    parsed = _parsed(text)
    return _verified(gold, parsed) or (
        gold.percent is not None and "%" not in latex and _verified(gold.percent, parsed)
    )


def _chosen(gold: Expected, text: str) -> bool:
    """Whether a text names the expected choice, by letter, value or both."""
    said = choice(text)
    if said is None:
        return bool(gold.value) and _same(gold.value, text)
    letter, value = said
    return letter == gold.letter and (not value or not gold.value or _same(gold.value, value))


def _same(value: str, text: str) -> bool:
    if as_text(value) == as_text(text) or ((words := _words(value)) and words == _words(text)):
        return True
    return not _fault(value) and bool(parsed := _parsed(value)) and _equal(_expected(value, parsed), text)


def _verified(gold: Expected, parsed: Sequence[Any]) -> bool:
    from math_verify import verify

    expected_first = (list(gold.parsed), list(parsed), gold.places, gold.digits)
    return bool(verify(*expected_first, timeout_seconds=0, allow_set_relation_comp=gold.interval))


def _states(gold: Expected, said: str) -> bool:
    """Whether the answer that a text without a box states last is the expected one."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    candidates = [text for text in stated_answers(said) if text and len(text) <= _MOST_CHARS]
    if gold.words or gold.letter or gold.unread:
        return any(_equal(gold, text) for text in candidates)
    for text in candidates:
        prose = as_words(text) or _fault(text) or _PROSE.search(re.sub(r"\\[A-Za-z]+", " ", as_latex(text)))
        if not prose and (parsed := _parsed(text)):
            return not differ(gold.units, units_of(text)) and _verified(gold, parsed)
    if differ(gold.units, units_of(said.strip().rpartition("\n")[2][-_MOST_REPEATED:])):
        return False
    targets = [LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig()]
    return _verified(gold, parse(_in_dollars(said), targets, parsing_timeout=0))


def _in_dollars(text: str) -> str:
    """Wrap Unicode mathematics in dollars: math-verify would read only the 2 of `2√3`."""
    text = re.sub(r"\\\$(?=\s*\d)", "", text)
    if "$" in text or "\\(" in text or "\\[" in text:
        return text

    def written(found: re.Match[str]) -> str:
        word = found[0].rstrip(".,;:!?")
        if re.fullmatch(r"[^\d√]{0,4}[²³]", word):  # a unit
            return found[0]
        return f"${as_latex(word)}${found[0][len(word) :]}"

    return re.sub(rf"\S*{UNICODE_MATHS.pattern}\S*", written, text)


class _OutOfTime(BaseException):
    """Not an Exception: math-verify catches those."""


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """Raise _OutOfTime after `limit_s` of CPU time. Outside the main thread, which gets no signals, there is no
    limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
