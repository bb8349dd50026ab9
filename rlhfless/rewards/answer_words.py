"""Answers that are no formulas, each in one form: words, times, choices, and texts that no parser reads."""

from __future__ import annotations

import math
import re
from functools import lru_cache

from rlhfless.rewards.math_text import CACHED, FUNCTIONS, GREEK, from_unicode, with_units, without_delimiters

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
    """An answer as a text in one form, to compare those that no parser reads: without sizes of brackets, braces around
    a single character and spaces that separate no numbers or words, and with its words in lower case."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", with_units(text))
    text = re.sub(r"\\[lc]?dots(?![A-Za-z])", "...", text)
    text = re.sub(r"[A-Za-z]{3,}", lambda found: found[0] if found[0].isupper() else found[0].lower(), text)
    text = re.sub(r"\{(\w)\}", r"\1", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)|(?<=[A-Za-z])\s+(?=[A-Za-z])", "\0", text)
    text = re.sub(r"\s", "", text).replace("\0", " ")
    return re.sub(r"(?<=[a-z]{3}),(?=\d)", "", text).rstrip(".;,")  # 2 hours and 30 minutes


@lru_cache(maxsize=CACHED)
def choice(text: str) -> tuple[str, str] | None:
    """Letter and value of an answer to a multiple choice question: `(B) 7`, `\\textbf{(C)}\\ 9`, `D`; else None."""
    text = without_delimiters(re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf|bf|mbox)\b", "", text))
    if whole := re.fullmatch(r"\{([^{}]*)\}", text):
        text = whole[1].strip()
    found = _CHOICE.fullmatch(text)
    if found is None or _OTHER_CHOICE.search(found["value"]):
        return None
    return found["bracketed"] or found["braced"] or found["marked"] or found["alone"], found["value"].strip()


@lru_cache(maxsize=CACHED)
def as_words(text: str) -> str | None:
    """The words of an answer that is no mathematics (`\\text{east}`, `No solution.`), in one form; None if it is not
    made of words."""
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
        return None
    maths = {*FUNCTIONS, *GREEK.values(), "infinity", "inf", "sqrt", "and", "or"}
    said = {word.casefold() for word in re.findall(r"[^\W\d_]+", text)} - maths
    if max(map(len, said), default=0) < 3:
        return None
    return " ".join(words).casefold().strip(".")
