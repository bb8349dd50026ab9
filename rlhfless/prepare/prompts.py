"""Read, check, render, tokenise and split prompts.

Invariants: every prompt fits the context with room for one token; ids are unique; no held-out prompt's text is trained
on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from rlhfless.chat.encoding import Encoder
from rlhfless.chat.messages import ASSISTANT, DataFault, Message, conversation, tools_of
from rlhfless.chat.template import ChatTemplate, kwargs_problems
from rlhfless.prepare.data_rows import Row, read_rows
from rlhfless.prepare.faults import Faults, SkippedRows, prompt_warnings
from rlhfless.records import Prompt
from rlhfless.records.fields import dotted_names, find_field
from rlhfless.spec import DataSpec, MixtureSetSpec, NamedSetSpec, SizesSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest, shown
from rlhfless.util.text import storable, storable_values

# 64 bits: a collision among 1e5 prompts has a chance of 3e-10.
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class PromptSets:
    """Training prompts, held-out prompts for evaluation, and warnings."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    warnings: tuple[str, ...]
    skipped: tuple[SkippedRows, ...] = ()
    """Per source with skipped rows; `warnings` names them, too."""


Finish = Callable[[Sequence[Prompt], Faults, Faults], list[Prompt]]
"""Convert the prompts of a source to what the run uses; may add faults, and notes for warnings."""


def _as_they_are(prompts: Sequence[Prompt], faults: Faults, notes: Faults) -> list[Prompt]:  # noqa: ARG001
    return list(prompts)


def load_prompts(
    spec: DataSpec,
    tokenizer: Any,
    *,
    max_context_tokens: int | None,
    seed: int,
    sizes: SizesSpec,
    read: frozenset[str] | None = None,
    named_sets: Sequence[NamedSetSpec] = (),
    edit: Callable[[Row], Row] = lambda row: row,
    finish: Finish = _as_they_are,
    every: int = 1,
    end_token_ids: Sequence[int] = (),
    answered: bool = False,
    whole_rows: bool = False,
) -> PromptSets:
    """Read all prompts that a spec names. Raises InputError with the problems of all sets.

    `max_context_tokens`: None is no limit. `read`: columns that rewards read, None for all; NaN there gives a warning.
    `named_sets`: further held-out prompts. `edit`: applied to each row first, may raise DataFault. `finish`: applied to
    the prompts of each source without a fault. `every`: take one of so many rows. `end_token_ids`: further tokens that
    end a response. `answered`: responses are given, so prompts need not open the policy's turn. `whole_rows`: prompts
    with the same text are different tasks if their other columns differ, as an environment gets the whole row.
    """
    wanted = spec.held_out
    sources: dict[str, _Source] = {
        f"prompts.mixture.{i}.path": _Source(each.name, each.path, each.split, _of_set(spec, each))
        for i, each in enumerate(spec.mixed)
    }
    if spec.path is not None:
        sources[f"{spec.section}.path"] = _Source("", spec.path, spec.split, spec)
    trained_on = tuple(sources)
    if wanted is not None and wanted.path is not None:
        sources[f"{spec.section}.held_out.path"] = _Source("", wanted.path, wanted.split, spec)
    sources |= {
        f"evaluation.sets.{i}.path": _Source(each.name, each.path, each.split, spec)
        for i, each in enumerate(named_sets)
    }
    problems = kwargs_problems(f"{spec.section}.chat_template_kwargs", tokenizer, spec.chat_template_kwargs)
    warnings: list[str] = []
    skipped: list[SkippedRows] = []
    sets: dict[str, list[Prompt]] = {}
    for field, source in sources.items():
        reader = PromptReader(source.spec, tokenizer, end_token_ids, answered=answered)
        loaded = _load(field, source, sizes, reader, max_context_tokens, edit, finish, every)
        sets[field] = list(loaded.prompts)
        problems += loaded.problems
        warnings += loaded.warnings
        skipped += loaded.skipped
        if not problems:
            warnings += prompt_warnings(field, loaded.rows, loaded.prompts, tokenizer, read, whole_rows=whole_rows)
    if problems:
        raise InputError("prompts", problems)
    train, held_out = list(chain(*(sets[field] for field in trained_on))), sets.get(f"{spec.section}.held_out.path", [])
    if wanted is not None and wanted.fraction is not None:
        train, held_out = _split(train, wanted.fraction, seed)
    named = [sets[f"evaluation.sets.{i}.path"] for i in range(len(named_sets))]
    same = partial(_row_text, id_field=spec.id_field) if whole_rows else attrgetter("text")
    train = _without(train, [*held_out, *chain(*named)], same, spec.section, warnings)
    kept = _first_of_each(held_out, wanted.max_prompts) if wanted is not None else []
    further = chain.from_iterable(prompts[: each.max_prompts] for prompts, each in zip(named, named_sets, strict=True))
    return PromptSets(tuple(train), (*kept, *further), tuple(warnings), tuple(skipped))


@dataclass(frozen=True, slots=True)
class _Source:
    """A data set, and how its rows are read."""

    name: str
    """Empty for an unnamed one."""
    path: str
    split: str
    spec: DataSpec

    def named(self, prompt: Prompt, prompt_id: str) -> Prompt:
        """Give a prompt its id, prefixed by the set's name: two sets may have the same prompt."""
        return replace(prompt, prompt_id=f"{self.name}/{prompt_id}" if self.name else prompt_id)


def _of_set(spec: DataSpec, each: MixtureSetSpec) -> DataSpec:
    """Override the spec's fields by those of a mixture's set."""
    own = {key: value for key in ("prompt_field", "id_field") if (value := getattr(each, key)) is not None}
    return spec.model_copy(update=own)


def _first_of_each(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """First `most` prompts; of a mixture, equally many per set."""
    sets = {name: [prompt for prompt in prompts if prompt.source == name] for name in (p.source for p in prompts)}
    return [prompt for of_set in sets.values() for prompt in of_set[: max(most // len(sets), 1)]][:most]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was read of one source; unusable if there are problems."""

    rows: Sequence[Row] = ()
    prompts: Sequence[Prompt] = ()
    """One per row."""
    problems: Sequence[Problem] = ()
    warnings: Sequence[str] = ()
    skipped: Sequence[SkippedRows] = ()


def _load(
    field: str,
    source: _Source,
    sizes: SizesSpec,
    reader: PromptReader,
    max_context_tokens: int | None,
    edit: Callable[[Row], Row],
    finish: Finish,
    every: int,
) -> _Loaded:
    spec = source.spec
    broken: list[tuple[Row, str]] | None = [] if spec.on_bad_row == "skip" else None
    try:
        given = read_rows(field, source.path, source.split, sizes, broken)[::every]
    except InputError as error:
        return _Loaded(problems=error.problems)
    broken = (broken or [])[::every]
    total = len(given) + len(broken)
    faults, notes = Faults(field, total), Faults(field, total)
    for row, what in broken:
        faults.add("a line is not a row", row, what, "correct the line, or remove it")
    rows, texts = list[Row](), list[str]()
    for row in given:
        try:
            edited = edit(row)
        except DataFault as error:
            faults.add(error.kind, row, error.detail, error.hint)
            continue
        text = reader.text(edited, faults, notes)
        if text is not None:
            rows.append(edited)
            texts.append(text)
    prompts = []
    for row, text, token_ids in zip(rows, texts, reader.tokens(texts), strict=True):
        _check_length(row, len(token_ids), max_context_tokens, faults)
        reader.check_tokens(row, token_ids, faults, notes)
        prompts.append(
            Prompt("", tuple(token_ids), text, _other_columns(row, spec), source=source.name, where=row.where)
        )
    prompts = finish([prompt for prompt in prompts if prompt.where not in faults.places], faults, notes)
    # Last, so that a row that is skipped has no part in the ids of others.
    prompts = [prompt for prompt in prompts if prompt.where not in faults.places]
    by_place = {row.where: row for row in rows}
    rows = [by_place[prompt.where] for prompt in prompts]
    ids = _ids(rows, prompts, spec, faults)
    named = [source.named(prompt, prompt_id) for prompt, prompt_id in zip(prompts, ids, strict=True)]
    skipped = faults.skipped(spec)
    return _Loaded(
        [row for row in rows if row.where not in faults.places],
        [prompt for prompt in named if prompt.where not in faults.places],
        faults.problems(spec),
        [*notes.warnings(), *([str(skipped)] if skipped else [])],
        [skipped] if skipped else [],
    )


def _ids(rows: Sequence[Row], prompts: Sequence[Prompt], spec: DataSpec, faults: Faults) -> list[str]:
    if spec.id_field is None:
        seen: dict[str, int] = {}
        return [_hash_id(prompt.text, seen) for prompt in prompts]
    first: dict[str, Row] = {}
    ids = []
    for row in rows:
        value = find_field(row.values, spec.id_field)
        if not isinstance(value, str | int) or value == "":
            near = "" if value is not None else nearest(spec.id_field, dotted_names(row.values))
            hint = f"{near}Leave {spec.section}.id_field out to use hashes"
            faults.add(f"no id in `{spec.id_field}`", row, f"got {shown(value)}", hint)
        elif (earlier := first.setdefault(storable(str(value)), row)) is not row:
            hint = f"ids must differ; leave {spec.section}.id_field out to use hashes"
            faults.add("a prompt id occurs again", row, f"{value!r} is also at {earlier.where}", hint)
        ids.append(storable(str(value)))
    return ids


def _hash_id(text: str, seen: dict[str, int]) -> str:
    """Hash the text; repeated texts get `-2`, `-3`, ... appended."""
    digest = hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).hexdigest()
    seen[digest] = seen.get(digest, 0) + 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def _check_length(row: Row, tokens: int, max_context_tokens: int | None, faults: Faults) -> None:
    if tokens == 0:
        faults.add("the tokenizer makes no token of the prompt", row, "0 tokens", "remove these rows")
    if max_context_tokens is not None and tokens > max_context_tokens - 1:
        kind = f"the prompt has more than {max_context_tokens - 1} tokens (the context less one)"
        hint = f"shorten or remove them, or raise model.max_context_tokens (now {max_context_tokens})"
        faults.add(kind, row, f"{tokens} tokens", hint)


def _other_columns(row: Row, spec: DataSpec) -> dict[str, Any]:
    """Return all columns except prompt and id. A prompt that a chat template renders is kept as written, for
    rewards."""
    columns = {name: value for name, value in row.values.items() if name != spec.prompt_field or spec.chat_template}
    return dict(storable_values(columns))


def _split(prompts: Sequence[Prompt], fraction: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split off a held-out fraction with the smallest hashes; both sets stay in file order."""
    count = max(1, round(fraction * len(prompts)))
    ranked = sorted(
        prompts,
        key=lambda prompt: hashlib.blake2b(f"{seed}/{prompt.prompt_id}".encode(), digest_size=16).digest(),
    )
    chosen = {prompt.prompt_id for prompt in ranked[:count]}
    return (
        [prompt for prompt in prompts if prompt.prompt_id not in chosen],
        [prompt for prompt in prompts if prompt.prompt_id in chosen],
    )


def _row_text(prompt: Prompt, id_field: str | None) -> str:
    columns = {name: value for name, value in prompt.columns.items() if name != id_field}
    return json.dumps([prompt.text, columns], sort_keys=True, default=str)


def _without(
    train: list[Prompt], held_out: list[Prompt], same: Callable[[Prompt], str], section: str, warnings: list[str]
) -> list[Prompt]:
    """Drop training prompts that are held out, by what `same` returns. Raises InputError if none is left."""
    forbidden = set(map(same, held_out))
    kept = [prompt for prompt in train if same(prompt) not in forbidden]
    if not kept:
        what = f"no training prompt is left: all {len(train) or len(held_out)} are held out"
        hint = f"give the held-out prompts a file of their own, or lower {section}.held_out.fraction"
        raise InputError(section, [Problem(f"{section}.held_out", what, hint)])
    if len(kept) < len(train):
        dropped = len(train) - len(kept)
        warnings.append(f"{section}.held_out: {dropped} training prompts are held out too, and are not trained on")
    return kept


# -- text and tokens


_CONVERSATIONS = ("messages", "conversations", "conversation")

_ENDED_BY_ASSISTANT = {
    "prompts": "end it with the user's message; a run of `type: sft` learns written answers",
    "demonstrations": "set demonstrations.response_field: null to learn the whole conversation",
    "preferences": "end it with the user's message; the answers are `chosen` and `rejected`",
}
"""Hints, by section, for a prompt that ends with an assistant message."""


class PromptReader:
    """Read the prompts of one source. `end_token_ids`, `answered`: see load_prompts."""

    def __init__(self, spec: DataSpec, tokenizer: Any, end_token_ids: Sequence[int], *, answered: bool) -> None:
        self._answered = answered
        self._spec = spec
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, end_token_ids, templated=spec.chat_template)
        self._template = (
            ChatTemplate(tokenizer, spec.chat_template_kwargs, end_token_ids, f"{spec.section}.chat_template")
            if spec.chat_template
            else None
        )
        self._opened: set[str] = set()

    def text(self, row: Row, faults: Faults, notes: Faults) -> str | None:
        """Return the prompt as the policy sees it; None, with a fault, if the row has no usable one. `notes` collects
        warnings."""
        try:
            text = self._text(row, notes)
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, as in cut-off JSON escapes
            hint = "remove the character, or write it in full"
            faults.add(f"`{self._spec.prompt_field}` is not valid Unicode", row, str(error), hint)
        except DataFault as fault:
            faults.add(fault.kind, row, fault.detail, fault.hint)
        else:
            return text
        return None

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoder.prompts(texts)

    def check_tokens(self, row: Row, token_ids: Sequence[int], faults: Faults, notes: Faults) -> None:
        """Add a fault if the prompt begins twice, or ends."""
        if not self._answered and (what := self._encoder.fault(token_ids)):
            hint = "remove that token from the prompt, or from the chat template"
            faults.add("the prompt has a special token too many", row, what, hint)
        if self._template and self._encoder.begins and self._tokenizer.bos_token_id not in token_ids:
            what = f"the tokenizer starts a text with {self._tokenizer.bos_token!r}"
            notes.add("the chat template writes no beginning", row, what, "compare it with how the model was trained")

    def _text(self, row: Row, notes: Faults) -> str:
        name, section = self._spec.prompt_field, self._spec.section
        value = find_field(row.values, name)
        if value is None:
            fields = ", ".join(row.values) or "none"
            near = nearest(name, dotted_names(row.values))
            near = near or next((f"did you mean `{each}`? " for each in _CONVERSATIONS if each in row.values), "")
            hint = f"{near}Set {section}.prompt_field to the field with the prompt"
            raise DataFault(f"no field `{name}`", f"its fields are {fields}", hint)
        if not isinstance(value, str | list):
            hint = "a prompt is a string, or a list of chat messages"
            raise DataFault(f"`{name}` is not a string", f"got {shown(value)}", hint)
        if not (value.strip() if isinstance(value, str) else value):
            raise DataFault(f"`{name}` is empty", f"got {shown(value)}", "remove these rows, or fill them in")
        if self._template:
            return self._rendered(self._template, row, value, notes)
        if isinstance(value, str):
            return value
        hint = f"set {section}.chat_template: true, or give the prompt as a string"
        raise DataFault(f"`{name}` is a list of chat messages", f"got {shown(value)}", hint)

    def _rendered(self, template: ChatTemplate, row: Row, value: str | list[Any], notes: Faults) -> str:
        name = self._spec.prompt_field
        messages, tools = conversation(value, name, row.values), tools_of(row.values)
        if messages[-1].role == ASSISTANT:
            hint = _ENDED_BY_ASSISTANT[self._spec.section]
            what = f"message {len(messages)} is {shown(messages[-1].text)}"
            raise DataFault(f"`{name}` ends with a message of the assistant", what, hint)
        if not any(message.text.strip() or message.calls for message in messages):
            raise DataFault(f"`{name}` is empty", f"got {shown(value)}", "remove these rows, or fill them in")
        template.require_no_control(messages, name, is_text=isinstance(value, str))
        rendering, cut = template.render(messages, opens=True, kept=[False] * len(messages), tools=tools)
        for text in cut[:1]:
            what = f"{text.what} of message {text.message + 1}, {shown(text.text)}"
            notes.add("the chat template leaves out earlier thoughts", row, what, "the policy does not see them")
        self._require_opening(template, messages, rendering)
        return rendering.text

    def _require_opening(self, template: ChatTemplate, messages: list[Message], rendering: Any) -> None:
        """Check once per role that a prompt ends with."""
        if not self._answered and messages[-1].role not in self._opened:
            template.require_opening(messages, rendering)
            self._opened.add(messages[-1].role)
