"""A row's prompt as text and tokens, as the policy sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfless.chat.encoding import Encoder
from rlhfless.chat.messages import ASSISTANT, DataFault, Message, conversation, tools_of
from rlhfless.chat.template import ChatTemplate
from rlhfless.prepare.data_rows import Row
from rlhfless.prepare.faults import Faults
from rlhfless.records.fields import dotted_names, find_field
from rlhfless.spec import DataSpec
from rlhfless.spec.explain import nearest, shown

_CONVERSATIONS = ("messages", "conversations", "conversation")

_ENDED_BY_ASSISTANT = {
    "prompts": "end it with the user's message; a run of `type: sft` learns written answers",
    "demonstrations": "set demonstrations.response_field: null to learn the whole conversation",
    "preferences": "end it with the user's message; the answers are `chosen` and `rejected`",
}
"""Hints for a prompt that ends with a message of the assistant, by section."""


class PromptReader:
    """Reads the prompts of one source. `end_token_ids`: further tokens that end a response. `answered`: see
    load_prompts."""

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
        """The prompt as the policy sees it; None, with a fault, if the row has no usable one. `notes` gets what a
        warning is for."""
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
        """The tokens of each text."""
        return self._encoder.prompts(texts)

    def check_tokens(self, row: Row, token_ids: Sequence[int], faults: Faults, notes: Faults) -> None:
        """Add a fault if the prompt has two beginnings, or an end."""
        if not self._answered and (what := self._encoder.fault(token_ids)):
            hint = "remove that token from the prompt, or from the chat template"
            faults.add("the prompt has a special token too many", row, what, hint)
        if self._template and self._encoder.begins and self._tokenizer.bos_token_id not in token_ids:
            what = f"the tokenizer begins a text with {self._tokenizer.bos_token!r}"
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
        """Once for each role that a prompt ends with."""
        if not self._answered and messages[-1].role not in self._opened:
            template.require_opening(messages, rendering)
            self._opened.add(messages[-1].role)
