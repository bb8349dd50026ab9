"""Show rows of a data set as the policy reads them, as they are learned, and as rewards get them (`rlhfless data
show`).

Prompts and examples are the run's own (`load_sets`): nothing is rendered here; text is decoded from their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhfless.prepare.data_rows import Row, read_rows
from rlhfless.prepare.examples import load_sets
from rlhfless.prepare.model import PolicyModel, special_tokens
from rlhfless.prepare.prompts import PromptSets
from rlhfless.prepare.rewards import reward_problems
from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.records.rollouts import Example
from rlhfless.rewards.answers import answer_of
from rlhfless.rewards.code_tests import tests_of
from rlhfless.rewards.mathematics import MathReward
from rlhfless.rewards.protocol import Unscorable
from rlhfless.spec import (
    CodeSpec,
    ExactMatchSpec,
    HttpSpec,
    JsonSchemaSpec,
    JudgeSpec,
    MathSpec,
    PreferencesSpec,
    PythonRewardSpec,
    RegexSpec,
    RewardModelSpec,
    RewardSpec,
    RunSpec,
)
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest

TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """A part of a text whose tokens are alike."""

    text: str
    special: bool
    """One token of the tokenizer's own, such as `<|im_end|>`."""
    learned: bool


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """Tokens of a prompt, or of a prompt with a response."""

    name: str
    """`prompt`, `response`, `chosen` or `rejected`."""
    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]  # by token
    pieces: tuple[ShownPiece, ...]

    @property
    def text(self) -> str:
        """The decoded text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def learned_text(self) -> str:
        """The learned part of it."""
        return "".join(piece.text for piece in self.pieces if piece.learned)


@dataclass(frozen=True, slots=True)
class ShownRow:
    data_set: str
    number: int
    """Position in its file, from 1."""
    rows: int
    where: str
    use: str
    """`training` or `held out`, or why the run does not use it."""
    prompt_id: str
    values: Mapping[str, Any]
    sequences: tuple[ShownSequence, ...]
    rewards: tuple[RewardInput, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _DataSet:
    name: str
    field: str
    path: str
    split: str
    source: str
    """Prompt.source of its prompts."""
    held_out: bool


def shown_rows(spec: RunSpec, policy: PolicyModel, name: str | None, number: int) -> list[ShownRow]:
    """Return row `number`, from 1, of the named data set; without a name, of each data set that has it.

    Raises InputError with the problems of all rows, as a run does, and for a missing data set or row.
    """
    data_sets = list(_data_sets(spec))
    chosen = [each for each in data_sets if name in (None, each.name)]
    if not chosen:
        names = [each.name for each in data_sets]
        hint = f"{nearest(name or '', names)}The data sets of this spec are {', '.join(names)}"
        raise InputError("the command line", [Problem("--dataset", f"no data set is named {name!r}", hint)])
    sets = load_sets(spec, policy)
    broken: list[tuple[Row, str]] | None = [] if spec.data.on_bad_row == "skip" else None
    rows = {each: read_rows(each.field, each.path, each.split, spec.sizes, broken) for each in chosen}
    most = max(map(len, rows.values()))
    if number > most:
        what = f"{number}, but there are {most} rows"
        raise InputError("the command line", [Problem("--row", what, f"use 1 to {most}")])
    return [_shown(spec, policy, sets, each, rows[each], number) for each in chosen if number <= len(rows[each])]


def _data_sets(spec: RunSpec) -> Iterator[_DataSet]:
    data = spec.data
    if data.path is not None:
        yield _DataSet(TRAIN, f"{data.section}.path", data.path, data.split, "", held_out=False)
    for index, each in enumerate(data.mixed):
        yield _DataSet(each.name, f"prompts.mixture.{index}.path", each.path, each.split, each.name, held_out=False)
    if data.held_out is not None and data.held_out.path is not None:
        yield _DataSet(
            HELD_OUT, f"{data.section}.held_out.path", data.held_out.path, data.held_out.split, "", held_out=True
        )
    for index, named in enumerate(spec.evaluation.sets):
        yield _DataSet(named.name, f"evaluation.sets.{index}.path", named.path, named.split, named.name, held_out=True)


def _shown(
    spec: RunSpec, policy: PolicyModel, sets: PromptSets, data_set: _DataSet, rows: Sequence[Row], number: int
) -> ShownRow:
    row = rows[number - 1]
    use, prompt = _found(spec, sets, data_set, row)
    about = (f"{data_set.field}:", *(() if data_set.held_out else (f"{spec.data.section}.held_out:",)))
    return ShownRow(
        data_set.name,
        number,
        len(rows),
        row.where,
        use,
        "" if prompt is None else prompt.prompt_id,
        row.values,
        () if prompt is None else tuple(_sequences(spec, policy.tokenizer, prompt)),
        () if prompt is None or spec.supervised else tuple(reward_inputs(spec, prompt)),
        tuple(text for text in sets.warnings if row.where in text or text.startswith(about)),
    )


def _found(spec: RunSpec, sets: PromptSets, data_set: _DataSet, row: Row) -> tuple[str, Prompt | None]:
    """Return the use of a row and its prompt; None if the run does not use it."""
    skipped = dict(row for each in sets.skipped if each.field == data_set.field for row in each.rows)
    if why := skipped.get(row.where):
        return f"skipped: {why}", None
    held_out = spec.data.held_out
    shared = held_out is not None and held_out.fraction is not None  # the file has held-out prompts, too
    places = [] if data_set.held_out else [("training", sets.train)]
    places += [("held out", sets.held_out)] if data_set.held_out or shared else []
    for use, prompts in places:
        for prompt in prompts:
            if prompt.where == row.where and prompt.source == data_set.source:
                return use, prompt
    if data_set.held_out or shared:
        return "not used: max_prompts of its held-out prompts is smaller", None
    return "not used: its prompt is held out, too", None


def _sequences(spec: RunSpec, tokenizer: Any, prompt: Prompt) -> Iterator[ShownSequence]:
    if not isinstance(prompt, Example):
        yield _sequence("prompt", prompt.token_ids, [False] * len(prompt.token_ids), tokenizer)
        return
    names = ("chosen", "rejected") if isinstance(spec.data, PreferencesSpec) else ("response",)
    for index, (name, token_ids) in enumerate(zip(names, prompt.sequences, strict=True)):
        yield _sequence(name, token_ids, prompt.learned(index), tokenizer)


def _sequence(name: str, token_ids: Sequence[int], learned: Sequence[bool], tokenizer: Any) -> ShownSequence:
    return ShownSequence(name, tuple(token_ids), tuple(learned), tuple(pieces(tokenizer, token_ids, learned)))


def pieces(tokenizer: Any, token_ids: Sequence[int], learned: Sequence[bool]) -> Iterator[ShownPiece]:
    """The text of tokens, split where special tokens or learned tokens begin and end.

    Each piece is what decoding its tokens adds to the text before it: a token that is decoded alone can lose a space at
    its beginning. Where a character spans two pieces, it is in the second one.
    """
    special = special_tokens(tokenizer)
    before, start = "", 0
    for place, token in enumerate(token_ids):
        end = place + 1
        alike = end < len(token_ids) and learned[place] == learned[end]
        if alike and token not in special and token_ids[end] not in special:
            continue
        text = str(tokenizer.decode(token_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        whole = text if end == len(token_ids) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        if added := whole[len(before) :]:
            yield ShownPiece(added, end - start == 1 and token in special, learned[place])
        before, start = max(before, whole, key=len), end


# -- what rewards get


@dataclass(frozen=True, slots=True)
class RewardInput:
    """A reward's input besides the response."""

    reward: str
    kind: str
    weight: float
    gets: Mapping[str, Any]
    """By name: `expected`, `tests`, `schema`, `columns` or `prompt`; empty for a reward of the response alone."""
    problems: tuple[str, ...] = ()
    """Why it cannot score this prompt."""


def reward_inputs(spec: RunSpec, prompt: Prompt) -> Iterator[RewardInput]:
    """Yield the inputs of the rewards that score the prompt's set."""
    problems = reward_problems(spec, [prompt])
    for index, reward in enumerate(spec.rewards):
        if not reward.scores(prompt.source):
            continue
        own = [problem.what for problem in problems if problem.where == f"rewards.{index}"]
        try:
            gets = gets_of(reward, prompt)
            if isinstance(reward, MathSpec):
                gets = {**gets, "read as": MathReward(reward).read(gets["expected"])}
        except Unscorable as error:
            gets, own = {}, own or [str(error)]
        yield RewardInput(reward.label, reward.type, reward.weight, gets, tuple(own))


def gets_of(reward: RewardSpec, prompt: Prompt) -> Mapping[str, Any]:
    """Return what a reward gets of a prompt (see RewardInput.gets). Raises Unscorable."""
    match reward:
        case ExactMatchSpec():
            expected = answer_of(prompt.columns, reward)
            expected = expected.strip() if reward.strip else expected
            return {"expected": expected.casefold() if reward.ignore_case else expected}
        case RegexSpec(answer_field=str()):
            return {"expected": answer_of(prompt.columns, reward).strip()}
        case MathSpec():
            return {"expected": answer_of(prompt.columns, reward)}
        case CodeSpec():
            tests = tests_of(prompt.columns, reward)[: reward.max_tests]
            plain = [asdict(test) for test in tests]
            # without an empty `function`
            return {"tests": [{k: v for k, v in each.items() if v or k != "function"} for each in plain]}
        case JsonSchemaSpec(schema_field=None):
            return {"schema": reward.json_schema}
        case JsonSchemaSpec(schema_field=str() as field):
            return {"schema": _parsed(find_field(prompt.columns, field))}
        case RewardModelSpec(prompt_field=str() as field):
            return {"prompt": find_field(prompt.columns, field)}
        case RewardModelSpec():
            return {"prompt": prompt.text}
        case PythonRewardSpec() | HttpSpec() | JudgeSpec():
            names = reward.columns if isinstance(reward, JudgeSpec) else prompt.columns
            return {"prompt": prompt.text, "columns": {name: find_field(prompt.columns, name) for name in names}}
        case _:
            return {}


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
