"""Expected answers: values of the data as the text that the data has, and the messages about those that cannot be
used."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.rewards.protocol import Unscorable, column_problems, described, listed, quote
from rlhfless.spec import ExactMatchSpec, MathSpec, RegexSpec
from rlhfless.util.text import WrittenFloat

AnswerSpec = ExactMatchSpec | RegexSpec | MathSpec


def answer_text(value: Any) -> str | None:
    """A value as it is written in the data; None if it is no text, number, truth value or date.

    `1.50` of JSON stays `1.50`. Formats without a written form (Parquet) give the shortest decimal without an exponent:
    0.00001, and not 1e-05.
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
    """The expected answer as text. Raises Unscorable."""
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
    """A message if the expected answers of some prompts cannot be used."""
    assert spec.answer_field is not None
    if problems := column_problems(spec.answer_field, prompts, lambda value: answer_text(value) is not None):
        return [*problems]
    faults = []
    for prompt in prompts if spec.answer_pattern is not None else ():
        try:
            answer_of(prompt.columns, spec)
        except Unscorable:
            faults.append((prompt, quote(answer_text(find_field(prompt.columns, spec.answer_field)) or "")))
    if faults:
        what = f"answer_pattern {spec.answer_pattern!r} is not found in the column `{spec.answer_field}`"
        return [listed(what, faults, len(prompts))]
    empty = [
        (prompt, "it would be right to say nothing")
        for prompt in prompts
        if not answer_of(prompt.columns, spec).strip()
    ]
    what = f"the expected answer in `{spec.answer_field}` is empty"
    return [listed(what, empty, len(prompts), "fill it in, or remove these rows")] if empty else []
