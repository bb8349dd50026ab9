"""Faulty rows of a data set by kind, refused or skipped; and warnings about unusual ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.prepare.data_rows import Row
from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.spec import DataSpec
from rlhfless.spec.data import MOST_SKIPPED, skip_hint
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import shown

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """The faulty rows of one source that a run does without."""

    field: str
    total: int
    """All rows of the source."""
    rows: tuple[tuple[str, str], ...]
    """Place and fault of each."""

    def __str__(self) -> str:
        named = "; ".join(f"{where}: {why}" for where, why in self.rows[:_MOST_NAMED])
        more = f"; and {len(self.rows) - _MOST_NAMED:,} more" if len(self.rows) > _MOST_NAMED else ""
        return f"{self.field}: skipped {len(self.rows):,} of {self.total:,} rows: {named}{more}"


class Faults:
    """Faulty rows by kind: the first is named, the others are counted."""

    def __init__(self, field: str, total: int) -> None:
        self._field, self._total = field, total
        self._by_kind: dict[str, list[tuple[str, str]]] = {}
        self._rows: dict[str, str] = {}

    def add(self, kind: str, row: Row, detail: str, hint: str) -> None:
        self._by_kind.setdefault(kind, []).append((f"first at {row.where}: {detail}", hint))
        self._rows.setdefault(row.where, f"{kind}: {detail}")

    @property
    def places(self) -> Collection[str]:
        """`Row.where` of each faulty row."""
        return self._rows.keys()

    def skipped(self, spec: DataSpec) -> SkippedRows | None:
        """Return the rows that `on_bad_row: skip` skips; None if it is not set, or for no rows or too many."""
        few = 0 < len(self._rows) <= MOST_SKIPPED * self._total
        if spec.on_bad_row != "skip" or not few:
            return None
        return SkippedRows(self._field, self._total, tuple(self._rows.items()))

    def problems(self, spec: DataSpec) -> list[Problem]:
        """Return one problem per kind, and one if there are too many rows to skip; none if they are skipped."""
        if self.skipped(spec):
            return []
        way_out = skip_hint(spec, len(self._rows), self._total)
        problems = [
            Problem(
                self._field, f"{kind} in {len(places)} of {self._total} rows, {places[0][0]}", places[0][1] + way_out
            )
            for kind, places in self._by_kind.items()
        ]
        if problems and spec.on_bad_row == "skip":
            what = f"skip, but {len(self._rows)} of {self._total} rows of {self._field} are faulty"
            hint = f"at most {MOST_SKIPPED:.0%} are skipped; correct the rows, or the keys that say how they are read"
            problems.append(Problem(f"{spec.section}.on_bad_row", what, hint))
        return problems

    def warnings(self) -> list[str]:
        """Return one warning per kind."""
        return [
            f"{self._field}: {kind} in {len(places)} of {self._total} rows, {places[0][0]}; {places[0][1]}"
            for kind, places in self._by_kind.items()
        ]


def prompt_warnings(
    field: str,
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    read: frozenset[str] | None,
    *,
    whole_rows: bool = False,
) -> list[str]:
    """Warn about unknown tokens, duplicates and NaN in one source. `field`: the spec's field; `read`: columns that
    rewards read, None for all; `whole_rows`: see load_prompts."""
    warnings = [
        _unknown_tokens(rows, prompts, tokenizer),
        "" if whole_rows else _repetitions(rows, prompts),
        *_nan_columns(rows, prompts, read),
    ]
    return [f"{field}: {warning}" for warning in warnings if warning]


def _unknown_tokens(rows: Sequence[Row], prompts: Sequence[Prompt], tokenizer: Any) -> str:
    unknown = tokenizer.unk_token_id
    # Byte-level tokenizers can encode every text; they report their end token as the unknown token.
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return ""
    counts = [prompt.token_ids.count(unknown) for prompt in prompts]
    tokens, total = sum(counts), sum(len(prompt.token_ids) for prompt in prompts)
    if not tokens:
        return ""
    having = [index for index, count in enumerate(counts) if count]
    first = having[0]
    return (
        f"{tokens:,} of {total:,} tokens ({tokens / total:.1%}) are the unknown token {tokenizer.unk_token!r}, in "
        f"{len(having)} of {len(prompts)} prompts, such as {rows[first].where}: {shown(prompts[first].text)}; the "
        "policy cannot see that text"
    )


def _repetitions(rows: Sequence[Row], prompts: Sequence[Prompt]) -> str:
    first: dict[tuple[int, ...], int] = {}
    again = [index for index, prompt in enumerate(prompts) if first.setdefault(prompt.token_ids, index) != index]
    if not again:
        return ""
    earlier = first[prompts[again[0]].token_ids]
    return (
        f"{len(again)} of {len(prompts)} rows have the same tokens as an earlier row, such as {rows[again[0]].where} "
        f"and {rows[earlier].where}; all are kept, so these prompts count more often than others"
    )


def _nan_columns(rows: Sequence[Row], prompts: Sequence[Prompt], read: frozenset[str] | None) -> list[str]:
    places: dict[str, list[Row]] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        for name in prompt.columns if read is None else read:
            if _has_nan(find_field(prompt.columns, name)):
                places.setdefault(name, []).append(row)
    return [
        f"the column `{name}` is NaN in {len(its_rows)} of {len(rows)} rows, such as {its_rows[0].where}; rewards that "
        "read it compare with NaN, which equals nothing: fill it in, or remove these rows"
        for name, its_rows in places.items()
    ]


def _has_nan(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)
