"""Demonstrations and preferences: rows with written responses, as the sequences that a model learns.

A policy (`sft`, `dpo`) reads a prompt as in an RLHF run, and learns the response with its end-of-sequence token. A
reward model reads what functions/scoring/reward_model.py would score, followed by a token that stands for the score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, cast

from rlhfless.chat.encoding import Encoder
from rlhfless.chat.messages import ASSISTANT, DataFault, Message, conversation, role_of, tools_of
from rlhfless.chat.template import ChatTemplate
from rlhfless.chat.turns import Learned, learned_of_texts, learned_turns
from rlhfless.prepare.data_rows import Row, read_rows
from rlhfless.prepare.faults import Faults
from rlhfless.prepare.model import PolicyModel, load_policy
from rlhfless.prepare.prompts import PromptSets, load_prompts
from rlhfless.prepare.rewards import columns_read, unscorable
from rlhfless.prepare.teachers import with_teacher_prompts
from rlhfless.records import Prompt
from rlhfless.records.fields import dotted_names, field_value, find_field
from rlhfless.records.rollouts import Example
from rlhfless.spec import DataSpec, DemonstrationsSpec, PreferencesSpec, RunSpec
from rlhfless.spec.explain import nearest, shown

MOST_READ = 1_000
"""Rows whose lengths a plan reads: their mean is within some per cent."""

RESPONSE = "response"
"""The column with the response of a conversation; its other messages are the prompt."""


def load_examples(spec: RunSpec, policy: PolicyModel, every: int = 1) -> PromptSets:
    """Load training and held-out examples; one of each `every` rows. Raises InputError with the problems of all
    rows."""
    data = spec.data
    rows = _Rows(data, policy, scored=spec.type == "reward_model")
    return load_prompts(
        data,
        policy.tokenizer,
        max_context_tokens=policy.context_tokens,
        seed=spec.seed,
        sizes=spec.sizes,
        read=frozenset(fields_of(data)),
        every=every,
        edit=partial(_edited, data=data),
        finish=rows.examples,
        end_token_ids=policy.end_token_ids,
        answered=spec.type == "reward_model",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleLengths:
    """Mean tokens of training rows."""

    prompt_tokens: float
    response_tokens: float
    rows: int
    read: int
    """Rows in the means."""


def example_lengths(spec: RunSpec) -> ExampleLengths:
    """Measure the lengths of about MOST_READ examples. Raises InputError."""
    policy, path = load_policy(spec.model), spec.data.path
    assert path is not None, "data of written responses has a path"
    rows = len(read_rows(f"{spec.data.section}.path", path, spec.data.split, spec.sizes, broken=[]))
    train = cast(Sequence[Example], load_examples(spec, policy, every=max(rows // MOST_READ, 1)).train)
    prompts = [len(example.token_ids) for example in train for _ in example.sequences]
    both = [len(tokens) for example in train for tokens in example.sequences]
    return ExampleLengths(fmean(prompts), fmean(both) - fmean(prompts), rows, len(train))


def fields_of(data: DataSpec) -> tuple[str, ...]:
    """Return the columns with the responses of a prompt."""
    if isinstance(data, PreferencesSpec):
        return data.chosen_field, data.rejected_field
    return ((data.response_field or RESPONSE) if isinstance(data, DemonstrationsSpec) else RESPONSE,)


def _edited(row: Row, data: DataSpec) -> Row:
    """Split whole conversations into prompt and responses. Raises DataFault."""
    if data.chat_template and isinstance(data, DemonstrationsSpec) and data.response_field is None:
        return _split(row, data.prompt_field)
    return _pair(row, data) if isinstance(data, PreferencesSpec) else row


def _split(row: Row, field: str) -> Row:
    """Split off a conversation's last message as the response."""
    messages = find_field(row.values, field)
    if not isinstance(messages, list) or not messages:
        return row
    if role_of(messages[-1]) != ASSISTANT or len(messages) < 2:
        what = f"it has {len(messages)} messages, the last from {role_of(messages[-1])!r}: {shown(messages[-1])}"
        hint = "remove these rows, or what follows the last answer"
        raise DataFault(f"the conversation in `{field}` does not end with an assistant message", what, hint)
    conversation(messages, field)  # so that faults count the messages as the data does
    return dataclasses.replace(row, values={**row.values, field: messages[:-1], RESPONSE: messages[-1:]})


def _pair(row: Row, data: PreferencesSpec) -> Row:
    """Split two whole conversations into their shared messages and their continuations."""
    pair = [find_field(row.values, field) for field in fields_of(data)]
    chosen, rejected = pair
    if isinstance(chosen, str) and isinstance(rejected, str) and find_field(row.values, data.prompt_field) is None:
        return row if data.chat_template else _pair_of_texts(row, data, chosen, rejected)
    whole = [isinstance(value, list) and bool(value) and role_of(value[0]) not in (ASSISTANT, "") for value in pair]
    if not all(whole):
        return row
    if not data.chat_template:
        hint = f"set {data.section}.chat_template: true"
        raise DataFault(f"`{data.chosen_field}` is a list of chat messages", f"got {shown(chosen)}", hint)
    prompt, names = find_field(row.values, data.prompt_field), f"`{data.chosen_field}` and `{data.rejected_field}`"
    most = min(len(chosen), len(rejected)) - 1
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if isinstance(prompt, list):
        shared = len(prompt)
        if not prompt == chosen[:shared] == rejected[:shared]:
            hint = "correct the prompt, or remove its column: it is found from both"
            raise DataFault(f"{names} do not start with `{data.prompt_field}`", f"got {shown(prompt)}", hint)
    elif isinstance(prompt, str) and not any(_says(message, prompt) for message in chosen[:shared]):
        hint = f"set {data.section}.prompt_field to a field that the rows do not have, or correct the conversations"
        raise DataFault(f"`{data.prompt_field}` is not a message that {names} share", f"got {shown(prompt)}", hint)
    tails = {data.chosen_field: chosen[shared:], data.rejected_field: rejected[shared:]}
    if not all(tail and role_of(tail[0]) == ASSISTANT for tail in tails.values()):
        hint = "both must share all messages before an answer of the assistant"
        after = " and ".join(shown(tail[:1]) for tail in tails.values())
        what = f"they share {shared} messages, then come {after}"
        raise DataFault(f"{names} differ before the assistant answers", what, hint)
    return dataclasses.replace(row, values={**row.values, data.prompt_field: chosen[:shared], **tails})


def _pair_of_texts(row: Row, data: PreferencesSpec, chosen: str, rejected: str) -> Row:
    """Split two whole texts without a prompt column into their shared words and their continuations (Anthropic's
    hh-rlhf).

    The prompt ends before the space of the first differing word, where tokens end, too.
    """
    most = min(len(chosen), len(rejected))
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    # A word that one of the two ends with may go on in the other.
    while shared and not chosen[shared - 1 : shared].isspace():
        shared -= 1
    prompt = chosen[:shared].rstrip()
    if not prompt:
        return row
    tails = {data.chosen_field: chosen[len(prompt) :], data.rejected_field: rejected[len(prompt) :]}
    return dataclasses.replace(row, values={**row.values, data.prompt_field: prompt, **tails})


def _says(message: Any, text: str) -> bool:
    return isinstance(message, Mapping) and text.strip() in (
        str(message.get(key)).strip() for key in ("content", "value")
    )


class _Rows:
    """Create examples from prompts whose columns have the responses. `scored`: for a reward model."""

    def __init__(self, data: DataSpec, policy: PolicyModel, *, scored: bool) -> None:
        self._data = data
        self._policy = policy
        self._scored = scored
        self._encoder = Encoder(policy.tokenizer, policy.end_token_ids, templated=data.chat_template)
        key = f"{data.section}.chat_template"
        self._template = (
            ChatTemplate(policy.tokenizer, data.chat_template_kwargs, policy.end_token_ids, key)
            if data.chat_template
            else None
        )

    def examples(self, prompts: Sequence[Prompt], faults: Faults, notes: Faults) -> list[Prompt]:
        """See Finish."""
        return [example for prompt in prompts if (example := self._example(prompt, faults, notes))]

    def _example(self, prompt: Prompt, faults: Faults, notes: Faults) -> Example | None:
        """Create an example; None, with a fault, if the row has no usable response."""
        row = Row(prompt.place, prompt.columns)
        try:
            made = [self._learned(row, prompt, field, notes) for field in fields_of(self._data)]
        except DataFault as fault:
            faults.add(fault.kind, row, fault.detail, fault.hint)
            return None
        if len({each.token_ids for each in made}) < len(made):
            faults.add("both responses are the same", row, "nothing is preferred", "remove these rows")
        for each in made:
            self._check(row, each, faults)
        return Example(
            prompt.prompt_id,
            prompt.token_ids,
            prompt.text,
            sequences=tuple(each.token_ids for each in made),
            learned_from=tuple(each.spans[0][0] for each in made),
            spans=tuple(each.spans for each in made),
            source=prompt.source,
            where=prompt.where,
        )

    def _learned(self, row: Row, prompt: Prompt, field: str, notes: Faults) -> Learned:
        response = self._response(row, field)
        if self._template is None:
            if self._scored:
                return self._scoring(prompt.text + _text_of(response, field, self._data.section))
            text = _text_of(response, field, self._data.section)
            return learned_of_texts(self._encoder, prompt.token_ids, prompt.text, text, self._ends)
        written = conversation(field_value(row.values, self._data.prompt_field), self._data.prompt_field, row.values)
        if not self._scored:  # a reward model scores what policies write, special tokens included
            self._template.require_no_control(response, field, is_text=False)
        data = self._data
        whole = isinstance(data, DemonstrationsSpec) and data.response_field is None and data.learned_turns == "all"
        first = 1 if whole else len(written)
        if self._scored:
            return self._scoring(self._template.scored([*written, *response], tools_of(row.values)).text)
        if whole and written[0].role == ASSISTANT:
            hint = "it is not learned: nothing comes before it"
            notes.add("the conversation starts with the assistant", row, shown(written[0].text), hint)
        turns = learned_turns(self._template, written, response, first, row.values, prompt.text)
        if not turns.ended:
            what = f"it ends an answer with {shown(turns.text[-20:])}"
            hint = (
                "an end-of-sequence token is learned after it; set eos_token_id in the model's generation_config.json"
            )
            notes.add("the chat template ends an answer with no end-of-sequence token", row, what, hint)
        return turns.encoded(self._encoder, prompt.token_ids, prompt.text, self._policy.tokenizer_info.eos_token_id)

    @property
    def _ends(self) -> tuple[int, ...]:
        return self._policy.tokenizer_info.eos_token_id, *self._policy.end_token_ids

    def _scoring(self, text: str) -> Learned:
        """Build the sequence that a reward model scores, with the token that stands for the score."""
        ids = self._encoder.scored(text)
        return Learned((*ids, self._policy.tokenizer_info.pad_token_id), ((len(ids), len(ids) + 1),))

    def _response(self, row: Row, field: str) -> list[Message]:
        """Return the response's messages. Raises DataFault."""
        value = find_field(row.values, field)
        if value is None:
            fields = ", ".join(row.values) or "none"
            near = nearest(field, dotted_names(row.values))
            hint = f"{near}Name the field in {self._data.section}, or remove these rows"
            raise DataFault(f"no response in `{field}`", f"its other fields are {fields}", hint)
        hint = "a response is a string, or a list of messages that starts and ends with the assistant"
        if isinstance(value, str):
            messages = [Message(ASSISTANT, (value,))]
        elif isinstance(value, list | Mapping):
            messages = conversation(value if isinstance(value, list) else [value], field)
        else:
            raise DataFault(f"`{field}` is not a response", f"got {shown(value)}", hint)
        ends = {messages[0].role, messages[-1].role}
        last = messages[-1]
        if ends != {ASSISTANT} or not (last.text.strip() or last.calls or last.thought.strip()):
            raise DataFault(f"`{field}` is not a response", f"got {shown(value)}", hint)
        return messages

    def _check(self, row: Row, learned: Learned, faults: Faults) -> None:
        most, tokens = self._policy.context_tokens, len(learned.token_ids)
        if most is not None and tokens > most:
            hint = f"shorten or remove them, or raise model.max_context_tokens (now {most})"
            faults.add(f"prompt and response have more than {most} tokens", row, f"{tokens} tokens", hint)


def _text_of(messages: Sequence[Message], field: str, section: str) -> str:
    """Return the text of a response without a chat template. Raises DataFault if it is more than text."""
    message = messages[0]
    if len(messages) > 1 or message.calls or message.thought.strip():
        hint = f"set {section}.chat_template: true"
        raise DataFault(f"`{field}` has more than a text", "only a chat template writes thoughts and calls", hint)
    return message.text


def load_sets(spec: RunSpec, policy: PolicyModel) -> PromptSets:
    """Load the run's prompts or examples, training and held out. Raises InputError with the problems of all rows."""
    if spec.supervised:
        return load_examples(spec, policy)
    prompts = load_prompts(
        spec.data,
        policy.tokenizer,
        max_context_tokens=policy.context_tokens,
        seed=spec.seed,
        sizes=spec.sizes,
        read=columns_read(spec.rewards) if spec.environment is None else None,
        named_sets=spec.evaluation.sets,
        finish=partial(unscorable, spec),
        end_token_ids=policy.end_token_ids,
        whole_rows=spec.environment is not None,
    )
    return with_teacher_prompts(spec, policy, prompts)
