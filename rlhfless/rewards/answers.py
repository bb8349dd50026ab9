"""Read answers of mathematics: expected ones from the data, final ones from a response.

A final answer is the last `\\boxed{}`, else the last `<answer>`, else what the response states last. Answers that are
words, dates or choices are normalised here; `units_of` compares units, which parsers of mathematics drop.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np

from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.rewards.math_text import CACHED, FUNCTIONS, GREEK, as_latex, from_unicode, with_units, without_delimiters
from rlhfless.rewards.protocol import Unscorable, column_problems, described, listed, quote, unscorable
from rlhfless.spec import ExactMatchSpec, MathSpec, RegexSpec
from rlhfless.util.text import WrittenFloat

AnswerSpec = ExactMatchSpec | RegexSpec | MathSpec


def answer_text(value: Any) -> str | None:
    """Return a value as written in the data; None unless it is text, a number, a bool or a date.

    `1.50` of JSON stays `1.50`. Formats without a written form (Parquet) give the shortest decimal without an exponent:
    0.00001, not 1e-05.
    """
    if isinstance(value, np.generic):
        narrow = isinstance(value, np.floating) and value.dtype.itemsize < np.dtype(float).itemsize
        value = float(str(value)) if narrow else value.item()  # 0.1 of float32 is 0.10000000149 as a float
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, float):
        return np.format_float_positional(value, trim="0") if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return None


def answer_of(columns: Mapping[str, Any], spec: AnswerSpec) -> str:
    """Return the expected answer as text. Raises Unscorable."""
    assert spec.answer_field is not None
    value = find_field(columns, spec.answer_field)
    text = answer_text(value)
    if text is None:
        raise Unscorable(f"the column `{spec.answer_field}` must be a text or a number, got {described(value)}")
    if spec.answer_pattern is None:
        return text
    found = list(re.finditer(spec.answer_pattern, text))
    if not found or found[-1][1] is None:
        where = f"the column `{spec.answer_field}`"
        raise Unscorable(f"answer_pattern {spec.answer_pattern!r} is not found in {where}: {quote(text)}")
    return str(found[-1][1]).strip()


def answer_faults(spec: AnswerSpec, prompts: Sequence[Prompt]) -> list[str]:
    """Report expected answers that cannot be used."""
    assert spec.answer_field is not None
    if problems := column_problems(spec.answer_field, prompts, lambda value: answer_text(value) is not None):
        return [*problems]
    if faults := unscorable(prompts, lambda prompt: answer_of(prompt.columns, spec)):
        values = [find_field(prompt.columns, spec.answer_field) for prompt, _ in faults]
        rows = [(prompt, quote(answer_text(value) or "")) for (prompt, _), value in zip(faults, values, strict=True)]
        what = f"answer_pattern {spec.answer_pattern!r} is not found in the column `{spec.answer_field}`"
        return [listed(what, rows, len(prompts))]
    empty = [prompt for prompt in prompts if not answer_of(prompt.columns, spec).strip()]
    rows = [(prompt, "it would be right to say nothing") for prompt in empty]
    what = f"the expected answer in `{spec.answer_field}` is empty"
    return [listed(what, rows, len(prompts), "fill it in, or remove these rows")] if empty else []


# -- final answers


_TAG, _TAG_ENDS = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s${}\\]+")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
# What may stand between the boxes of one answer, besides the words and signs that `_JOINS` finds.
_BETWEEN = re.compile(
    r"(?:[\s$,;&.()\[\]{}]|\\(?:text|mbox|quad|qquad|[\\,;:! ()\[\]])|\b(?:and|or)\b|=|[A-Za-z]\s*=)*"
)
_JOINS = re.compile(r"[,;&]|\b(?:and|or)\b")
_THOUGHT_ENDS = "</think>"
# What stands before an answer: `the answer is`, `Answer:`, the mark of GSM8K.
_STATED = re.compile(r"(?i:answer)(?:\s+(?:is|are|equals|would be|=)|\*{0,2}\s*[:=])\*{0,2}:?[ \t]*\n?|####[ \t]*")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The text of a final answer."""

    text: str
    joined: str = ""
    """Boxes that only line breaks separate, joined into one answer; else empty."""


def final_part(response: str) -> str:
    """Return the text after the thoughts, and within the last `<answer>` if there is one."""
    said = response.rpartition(_THOUGHT_ENDS)[2]
    before, ended, _ = said.rpartition(_TAG_ENDS)
    _, opened, tagged = before.rpartition(_TAG)
    return tagged if ended and opened else said


def boxed_answer(text: str) -> FinalAnswer | None:
    """Return the last box that is not empty, joined with those before it that belong to the same answer; None without a
    box.

    A box that never closes was cut off: its answer is empty.
    """
    boxes = [box for box in _boxes(text) if box[2].strip()]
    if not boxes:
        return None
    if boxes[-1][1] < 0:
        return FinalAnswer("")
    group = [boxes[-1]]
    explicit = False
    for box in reversed(boxes[:-1]):
        between = text[box[1] : group[0][0]]
        if not _BETWEEN.fullmatch(between):
            break
        joins = bool(_JOINS.search(between))
        if len(group) > 1 and joins != explicit:
            break
        explicit = joins
        group.insert(0, box)
    parts = list(dict.fromkeys(box[2].strip() for box in group))
    together = ", ".join(parts) if len(parts) > 1 else ""
    return FinalAnswer(together) if together and explicit else FinalAnswer(group[-1][2].strip(), together)


def stated_answers(text: str) -> Iterator[str]:
    """Yield texts that may be the answer of a response without a box, most likely first."""
    if stated := list(_STATED.finditer(text)):
        line = text[stated[-1].end() :].partition("\n")[0].strip()
        if line.count("**") % 2:  # opened before the answer
            line = line.removesuffix("**")
        yield line
        if end := _SENTENCE_END.search(line):
            yield line[: end.start()]
    if "\n" not in text.strip():
        yield text.strip()


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, content) of each innermost box; end is -1 if it does not close."""
    closings = _closings(text)
    for opening, following in pairwise([*_BOX.finditer(text), None]):
        assert opening is not None
        first = opening.end()
        if text[first : first + 1] == "{":
            end = closings.get(first, -1)
            if end < 0:
                yield opening.start(), -1, text[first:]
                return
            if following is None or following.start() > end:
                yield opening.start(), end + 1, text[first + 1 : end]
        elif bare := _BARE.match(text, first):
            yield opening.start(), bare.end(), bare[0].rstrip(".,;")


def _closings(text: str) -> dict[int, int]:
    """Map the position of each opening brace to its closing brace."""
    opened, closings = [], {}
    for found in _BRACES.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closings[opened.pop()] = found.start()
    return closings


# -- words and choices


_WORDS = re.compile(r"[^\W\d_]+(?:['.-][^\W\d_]+)*\.?")
# A choice with brackets, braces, a point or a colon around its letter, and its value; or the letter alone.
_CHOICE = re.compile(
    r"(?:\{?\s*\(\{?(?P<bracketed>[A-J])\}?\)\s*\}?|\{\s*(?P<braced>[A-J])\s*[.):]?\s*\}|"
    r"(?P<marked>[A-J])\s*(?:[):]|\.(?![A-Za-z]))|(?P<alone>[A-J])(?=$))"
    r"(?:[\s,:~]|\\[ ,;:!]|\\q?quad)*(?P<value>.*)",
    re.DOTALL,
)
# A second choice in the value of one: several are right.
_OTHER_CHOICE = re.compile(
    r"^(?:and|or|&)?\s*\(?[A-J]\)?(?![A-Za-z(])|\([A-J]\)|(?<![A-Za-z])[A-Z]\s*(?:[:=]|[.)]\s)|(?:and|or|[,&])\s+[A-J]$"
)


@lru_cache(maxsize=CACHED)
def as_text(text: str) -> str:
    """Normalise an answer that no parser reads: lower-case words, no bracket sizes, no redundant braces or spaces."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", with_units(text))
    text = re.sub(r"\\[lc]?dots(?![A-Za-z])", "...", text)
    text = re.sub(r"[A-Za-z]{3,}", lambda found: found[0] if found[0].isupper() else found[0].lower(), text)
    text = re.sub(r"\{(\w)\}", r"\1", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)|(?<=[A-Za-z])\s+(?=[A-Za-z])", "\0", text)
    text = re.sub(r"\s", "", text).replace("\0", " ")
    return re.sub(r"(?<=[a-z]{3}),(?=\d)", "", text).rstrip(".;,")  # 2 hours and 30 minutes


@lru_cache(maxsize=CACHED)
def choice(text: str) -> tuple[str, str] | None:
    """Return letter and value of a multiple-choice answer (`(B) 7`, `\\textbf{(C)}\\ 9`, `D`); else None."""
    text = without_delimiters(re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf|bf|mbox)\b", "", text))
    if whole := re.fullmatch(r"\{([^{}]*)\}", text):
        text = whole[1].strip()
    found = _CHOICE.fullmatch(text)
    if found is None or _OTHER_CHOICE.search(found["value"]):
        return None
    return found["bracketed"] or found["braced"] or found["marked"] or found["alone"], found["value"].strip()


@lru_cache(maxsize=CACHED)
def as_words(text: str) -> str:
    """Normalise an answer made of words, a date or a time (`\\text{east}`, `No solution.`); else empty."""
    text = without_delimiters(from_unicode(text))
    text = re.sub(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[ ,;:!]|[~$\"*_]|\\(?:q?quad)", " ", text).strip(" .!")
    date_or_time = r"\d{4}-\d\d?-\d\d?([T ]\d\d:\d\d.*)?|\d{1,2}(:\d\d){,2}\s*[ap]\.?\s?m\.?|[01]?\d:[0-5]\d:\d\d"
    if re.fullmatch(date_or_time, text, re.IGNORECASE):
        return re.sub(r"[\s.]|:00(?=\s*[ap])", "", text.casefold())
    if re.fullmatch(r"[A-Z][a-z]{2,}(?:[ ,]+(?:[A-Z][a-z]+|of))*[ ,]+\d+(?:st|nd|rd|th)?(?:, *\d{4})?", text):
        return re.sub(r"[ ,]+", " ", text).casefold()
    time = re.fullmatch(r"(\d\d?):([0-5]\d)", text)
    if time and math.gcd(int(time[1]), int(time[2])) > 1:  # no ratio, which would be written in lowest terms
        return text
    if text.casefold() in ("no", "ok", "up"):  # and no product of variables
        return text.casefold()
    words = [word for word in re.split(r"[\s,&]+", text) if word and word.casefold() != "and"]
    if not words or not all(map(_WORDS.fullmatch, words)):
        return ""
    maths = {*FUNCTIONS, *GREEK.values(), "infinity", "inf", "sqrt", "and", "or"}
    said = {word.casefold() for word in re.findall(r"[^\W\d_]+", text)} - maths
    if max(map(len, said), default=0) < 3:
        return ""
    return " ".join(words).casefold().strip(".")


# -- units


Unit = tuple[Fraction, frozenset[tuple[str, int]]]
"""A factor, and the exponents of base units."""

_BASES = {
    "m": "1 m meter metre; .001 mm millimeter millimetre; .01 cm centimeter centimetre; .1 dm decimeter decimetre; "
    "1000 km kilometer kilometre; 1e-6 um micrometer micrometre micron; 1e-9 nm nanometer nanometre; "
    ".0254 in inch inches; .3048 ft foot feet; .9144 yd yds yard; 1609.344 mi mile",
    "s": "1 s sec secs second; .001 ms msec millisecond; 60 m min mins minute; 3600 h hr hrs hour; 86400 d day; "
    "604800 wk wks week",
    "month": "1 month; 12 yr yrs year; 120 decade; 1200 century centuries",
    "kg": "1 kg kgs kilogram; .001 g gram gm; .000001 mg milligram; .45359237 lb lbs pound; .028349523125 oz ounce",
    "USD": "1 usd dollar buck; .01 cent",
    "EUR": "1 eur euro",
    "GBP": "1 gbp pound; .01 pence penny",
    "INR": "1 inr rupee",
    "JPY": "1 jpy yen",
    "degree": "1 deg degree",
    "degree of Celsius": "1 C celsius degree deg centigrade",
    "degree of Fahrenheit": "1 F fahrenheit degree deg",
    "K": "1 K kelvin",
    "radian": "1 rad radian",
    "A": "1 A amp ampere",
    "mol": "1 mol mole",
    "gallon": "1 gal gallon; .25 quart qt; .125 pint; .0625 cup",
}
_DERIVED = {
    "mph": "mi h^-1", "kmh kph kmph": "km h^-1", "cc": "cm^3", "ml mL milliliter millilitre": "cm^3",
    "cl cL centiliter centilitre": "10 cm^3", "dl dL deciliter decilitre": "100 cm^3", "l L liter litre": "dm^3",
    "N newton": "kg m s^-2", "J joule": "kg m^2 s^-2", "kJ kilojoule": "1000 kg m^2 s^-2", "W watt": "kg m^2 s^-3",
    "kW kilowatt": "1000 kg m^2 s^-3", "Pa pascal": "kg m^-1 s^-2", "kPa kilopascal": "1000 kg m^-1 s^-2",
    "Hz hz hertz": "s^-1", "kHz khz kilohertz": "1000 s^-1", "MHz mhz megahertz": "1000000 s^-1", "C coulomb": "A s",
    "V volt": "kg m^2 s^-3 A^-1",
}  # fmt: skip
_CURRENCIES = {"$": "usd", "\\$": "usd", "US$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "Rs": "inr"}
_CURRENCY = re.compile(r"^(?:\\text\s*\{)?\s*-?\s*(\\?\$|US\\?\$|[€£¥₹]|Rs)[\s.}]*(?=-?[\d.]|\\frac)")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
# Of a unit that is no nonsense; more could be made to take long.
_MOST_PARTS, _MOST_POWER = 5, 9
_TOKEN = re.compile(r"\^\s*-?\s*\d+|[A-Za-z]+|\d+|\S")


def differ(one: frozenset[Unit], other: frozenset[Unit]) -> bool:
    """Whether two answers name known units that cannot be the same. Nothing is converted."""
    return bool(one and other) and not one & other


@lru_cache(maxsize=CACHED)
def units_of(text: str) -> frozenset[Unit]:
    """Return the possible meanings of an answer's unit (`m`: meter or minute); empty if it has none or an unknown
    part."""
    bare, whole = as_latex(text), with_units(text).strip()
    if found := _CURRENCY.match(without_delimiters(from_unicode(text))):
        return _meanings(_CURRENCIES[found[1].replace("US\\", "US")]) if whole == bare else frozenset()
    return _meanings(whole[len(bare) :]) if bare and whole.startswith(bare) else frozenset()


def _meanings(text: str) -> frozenset[Unit]:
    """Parse a written unit: `cm^2`, `\\text{ miles per hour}`, `kg m s^-2`."""
    text = re.sub(r"\^\s*\{?\s*\\circ", " degree ", text)
    text = re.sub(r"\\(?:text|mathrm|cdot|times|[,;:! ])|[{}()*~]", " ", text)
    text = re.sub(r"\bdeg(?:ree)?s?\s+(?=(?:C|F|celsius|fahrenheit)\b)", "", text, flags=re.IGNORECASE)
    parts: list[tuple[list[Unit], int]] = []
    power, sign, closed = 1, 1, False
    for token in _TOKEN.findall(text):
        if token in ("/", "per"):
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif parts and (token in _POWERS_BEHIND or token.startswith("^")):
            exponent = _POWERS_BEHIND.get(token) or int(re.sub(r"[\s^]", "", token))
            parts[-1] = parts[-1][0], parts[-1][1] * exponent
        elif found := _named(token):
            if closed and sign > 0:  # J/mol K: is K above or below?
                return frozenset()
            closed = closed or sign < 0
            parts.append((found, sign * power))
            power, sign = 1, 1
        else:
            return frozenset()
    powers = [exponent for _, exponent in parts]
    if len(powers) > _MOST_PARTS or any(abs(power) > _MOST_POWER for power in powers):
        return frozenset()
    return frozenset(
        _product(zip(units, powers, strict=True)) for units in product(*(each for each, _ in parts)) if units
    )


def _product(units: Iterable[tuple[Unit, int]]) -> Unit:
    scale, exponents = Fraction(1), Counter[str]()
    for (factor, names), power in units:
        scale *= Fraction(factor**power)
        for name, exponent in names:
            exponents[name] += exponent * power
    return scale, frozenset((name, exponent) for name, exponent in exponents.items() if exponent)


def _named(token: str) -> list[Unit]:
    known = _known()
    lower = token.lower() if len(token) > 2 else token
    return next((known[each] for each in (token, lower, lower.removesuffix("s")) if each in known), [])


@lru_cache(maxsize=1)
def _known() -> dict[str, list[Unit]]:
    """Build the table of unit names to meanings."""
    known: dict[str, list[Unit]] = {}
    for base, names in _BASES.items():
        for entry in names.split("; "):
            size, *each = entry.split()
            for name in each:
                known.setdefault(name, []).append((Fraction(size), frozenset({(base, 1)})))
    for names, definition in _DERIVED.items():
        first, *others = definition.split()
        scale = Fraction(first) if first.isdecimal() else Fraction(1)
        pairs = [each.partition("^") for each in (others if first.isdecimal() else (first, *others))]
        factor, bases = _product((known[name][0], int(power or 1)) for name, _, power in pairs)
        for name in names.split():
            known.setdefault(name, []).append((scale * factor, bases))
    return known
