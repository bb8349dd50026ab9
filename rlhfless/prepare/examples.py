"""Demonstrations and preferences: rows with written responses, as the sequences that a model learns.

A policy (`sft`, `dpo`) reads a prompt as it does in an RLHF run, and learns the tokens of the response, of which the
last is the end-of-sequence token: so it learns to stop. A reward model reads what rlhfless.functions.reward_model would
score; its score is computed from the last token of that, which here is followed by a token that stands for the score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, cast

from rlhfless.prepare.data_rows import Row, read_rows
from rlhfless.prepare.model import PolicyModel, load_policy
from rlhfless.prepare.prompts import Faults, PromptSets, load_prompts
from rlhfless.records import Prompt
from rlhfless.records.examples import Example
from rlhfless.records.fields import dotted_names, field_value, find_field
from rlhfless.spec import DataSpec, DemonstrationsSpec, PreferencesSpec, RunSpec
from rlhfless.spec.errors import InputError
from rlhfless.spec.explain import nearest, shown

MOST_READ = 1_000
"""Rows whose lengths a plan reads: they give a mean within some per cent."""

RESPONSE = "response"
"""The column with the response of a conversation, whose other messages are the prompt."""


def load_examples(spec: RunSpec, policy: PolicyModel, every: int = 1) -> PromptSets:
    """The examples of a run that learns from written responses, for training and held out; of each `every` rows one.
    Raises InputError with the problems of all rows."""
    data, context = spec.data, policy.context_tokens
    whole = isinstance(data, DemonstrationsSpec) and data.response_field is None
    sets = load_prompts(
        data,
        policy.tokenizer,
        max_context_tokens=context,
        seed=spec.seed,
        sizes=spec.sizes,
        read=frozenset(fields_of(data)),
        every=every,
        edit=partial(_split, field=data.prompt_field) if whole else lambda row: row,
    )
    faults = Faults(f"{data.section}.path", len(sets.train) + len(sets.held_out))
    rows = _Rows(data, policy, faults, _scored if spec.type == "reward_model" else _drawn)
    train, held_out = (tuple(filter(None, map(rows.example, part))) for part in (sets.train, sets.held_out))
    if problems := faults.problems():
        raise InputError(data.section, problems)
    return PromptSets(train, held_out, sets.warnings)


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleLengths:
    """Mean tokens of training rows."""

    prompt_tokens: float
    response_tokens: float
    rows: int
    read: int
    """The rows that the means are of."""


def example_lengths(spec: RunSpec) -> ExampleLengths:
    """The lengths of a run's examples, from about MOST_READ of its rows. Raises InputError."""
    policy, path = load_policy(spec.model), spec.data.path
    assert path is not None, "data of written responses has a path"
    rows = len(read_rows(f"{spec.data.section}.path", path, spec.data.split, spec.sizes))
    train = cast(Sequence[Example], load_examples(spec, policy, every=max(rows // MOST_READ, 1)).train)
    prompts = [len(example.token_ids) for example in train for _ in example.sequences]
    both = [len(tokens) for example in train for tokens in example.sequences]
    return ExampleLengths(fmean(prompts), fmean(both) - fmean(prompts), rows, len(train))


def fields_of(data: DataSpec) -> tuple[str, ...]:
    """The columns with the responses of a prompt."""
    if isinstance(data, PreferencesSpec):
        return data.chosen_field, data.rejected_field
    return ((data.response_field or RESPONSE) if isinstance(data, DemonstrationsSpec) else RESPONSE,)


def _split(row: Row, field: str) -> Row:
    """A conversation without its last message, and that message as the response."""
    messages = find_field(row.values, field)
    if not isinstance(messages, list) or len(messages) < 2:
        return row
    return dataclasses.replace(row, values={**row.values, field: messages[:-1], RESPONSE: messages[-1:]})


def _drawn(policy: PolicyModel, prompt: Prompt, response: str, *, templated: bool) -> tuple[list[int], int]:
    """The sequence that the policy is to draw, and where the response begins: up to the first end-of-sequence token of
    a rendered response, or with one at its end."""
    ids: list[int] = policy.tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
    end = policy.tokenizer_info.eos_token_id
    if templated and end in ids:
        ids = ids[: ids.index(end)]
    return [*prompt.token_ids, *ids, end], len(prompt.token_ids)


def _scored(policy: PolicyModel, prompt: Prompt, response: str, *, templated: bool) -> tuple[list[int], int]:
    """The sequence that a reward model scores, with the token that stands for its score."""
    text = prompt.text + response
    ids: list[int] = policy.tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]
    return [*ids, policy.tokenizer_info.pad_token_id], len(ids)


class _Rows:
    """Makes examples of prompts whose columns have the responses."""

    def __init__(self, data: DataSpec, policy: PolicyModel, faults: Faults, sequence: Callable[..., Any]) -> None:
        self._data = data
        self._policy = policy
        self._faults = faults
        self._sequence = sequence

    def example(self, prompt: Prompt) -> Example | None:
        """None, with a fault, if the row has no usable response."""
        row = Row(prompt.place, prompt.columns)
        responses = [self._response(row, prompt, field) for field in fields_of(self._data)]
        made = [self._made(row, prompt, response) for response in responses if response is not None]
        if len(made) < len(responses):
            return None
        if len({tokens for tokens, _ in made}) < len(made):
            self._faults.add("both responses are the same", row, "nothing is preferred", "remove these rows")
        sequences, firsts = zip(*made, strict=True)
        return Example(
            prompt.prompt_id,
            prompt.token_ids,
            prompt.text,
            sequences=sequences,
            learned_from=firsts,
            where=prompt.where,
        )

    def _response(self, row: Row, prompt: Prompt, field: str) -> str | None:
        """The response as text, in the form in which it follows the prompt's."""
        value = find_field(row.values, field)
        if value is None:
            fields = ", ".join(row.values) or "none"
            near = nearest(field, dotted_names(row.values))
            hint = f"{near}Name the field in {self._data.section}, or remove these rows"
            self._faults.add(f"no response in `{field}`", row, f"its other fields are {fields}", hint)
            return None
        text = value if isinstance(value, str) else _said(value)
        if text is None or not text.strip():
            hint = "a response is a string, or a list of one message of the assistant"
            self._faults.add(f"`{field}` is no response", row, f"got {shown(value)}", hint)
            return None
        return self._rendered(row, prompt, text) if self._data.chat_template else text

    def _rendered(self, row: Row, prompt: Prompt, text: str) -> str | None:
        """What the chat template writes after the prompt."""
        written = field_value(row.values, self._data.prompt_field)
        messages = [{"role": "user", "content": written}] if isinstance(written, str) else [*written]
        messages.append({"role": "assistant", "content": text})
        try:
            whole = str(self._policy.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template is a program by the model's author, and may raise any error
            hint = f"correct the messages, or leave {self._data.section}.chat_template out"
            self._faults.add("the chat template fails", row, f"{type(error).__name__}: {error}", hint)
            return None
        if not whole.startswith(prompt.text):
            hint = "give prompt and response as the model is to read them, without chat_template"
            what = "the chat template writes the prompt otherwise once it is answered"
            self._faults.add(what, row, f"got {shown(whole)}", hint)
            return None
        return whole.removeprefix(prompt.text)

    def _made(self, row: Row, prompt: Prompt, response: str) -> tuple[tuple[int, ...], int]:
        tokens, first = self._sequence(self._policy, prompt, response, templated=self._data.chat_template)
        most = self._policy.context_tokens
        if most is not None and len(tokens) > most:
            hint = f"shorten or remove them, or raise model.max_context_tokens (now {most})"
            self._faults.add(f"prompt and response have more than {most} tokens", row, f"{len(tokens)} tokens", hint)
        return tuple(tokens), first


def _said(value: Any) -> str | None:
    """The text of a list of one message of the assistant."""
    if isinstance(value, Sequence) and len(value) == 1 and isinstance(value[0], Mapping):
        message = value[0]
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return str(message["content"])
    return None
