"""Warnings about prompts that are allowed but unusual: unknown tokens, repetitions, columns that are NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless.prepare.data_rows import Row
from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.spec.explain import shown


def prompt_warnings(
    field: str, rows: Sequence[Row], prompts: Sequence[Prompt], tokenizer: Any, read: frozenset[str] | None
) -> list[str]:
    """The warnings of one source; `field` is the spec's field that names it. `read`: columns that rewards read, None
    for all."""
    warnings = [
        _unknown_tokens(rows, prompts, tokenizer),
        _repetitions(rows, prompts),
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
        "policy cannot see what is written there"
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
