"""Parse chat messages of data sets: OpenAI's `role` and `content`, and ShareGPT's `from` and `value`.

A message holds its content (one text, or several parts), its thought and its tool calls. What a text model cannot read
(an image, a null) is refused by name, so that no template prints it as a Python value.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.spec.explain import nearest, shown

ASSISTANT = "assistant"
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a thought: DeepSeek's and Qwen's, gpt-oss's and TRL's, OpenRouter's."""
THINK = re.compile(r"(<think>|</think>)")

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": ASSISTANT,
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_READ = ("role", "from", "content", "value", "tool_calls", "function_call", "weight", *THOUGHT_KEYS)
_NO_TEXT = ("name", "tool_call_id", "id", "annotations", "metadata", "model", "language", "timestamp")
"""Further keys, whose values nobody says."""
_NOT_TEXT = ("image", "images", "image_url", "audio", "audios", "video", "videos", "file", "files")


class DataFault(Exception):
    """A row cannot be used: kind of fault, detail and hint."""

    def __init__(self, kind: str, detail: str, hint: str) -> None:
        super().__init__(kind, detail, hint)
        self.kind, self.detail, self.hint = kind, detail, hint

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the assistant."""

    name: str
    arguments: Any
    """A mapping, or text that is no JSON object."""
    call_id: str | None = None

    def written(self, *, as_text: bool) -> dict[str, Any]:
        """Return the call in OpenAI's form, its arguments as a mapping, or as JSON with `as_text`."""
        arguments = self.arguments
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return call if self.call_id is None else {"id": self.call_id, **call}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` has one text, or one per part."""

    role: str
    content: tuple[str, ...] = ("",)
    thought: str = ""
    thought_key: str = THOUGHT_KEYS[0]
    calls: tuple[ToolCall, ...] = ()
    further: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other keys, which a template may read."""
    learned: bool = True
    """False where the data says `weight: 0`."""

    @property
    def text(self) -> str:
        return "\n".join(self.content)

    def mapped(self, change: Callable[[str, str], str]) -> Message:
        """Replace each text by `change(what, text)`, where `what` names it for a reader, always in the same order.

        A thought between tags inside the content is a text of its own.
        """
        parts = len(self.content) > 1
        content = tuple(
            self._mapped_content(f"content part {number}" if parts else "content", text, change)
            for number, text in enumerate(self.content, 1)
        )
        thought = change(self.thought_key, self.thought) if self.thought.strip() else self.thought
        calls = []
        for number, call in enumerate(self.calls, 1):
            what = f"tool call {number}"
            calls.append(
                dataclasses.replace(
                    call,
                    name=change(f"the name of {what}", call.name),
                    arguments=_mapped(f"the arguments of {what}", call.arguments, change),
                )
            )
        further = {
            key: value if key in _NO_TEXT else _mapped(f"`{key}`", value, change) for key, value in self.further.items()
        }
        return dataclasses.replace(self, content=content, thought=thought, calls=tuple(calls), further=further)

    def _mapped_content(self, what: str, text: str, change: Callable[[str, str], str]) -> str:
        if self.role != ASSISTANT or "</think>" not in text:
            return change(what, text) if text.strip() else text
        pieces, inside = THINK.split(text), "<think>" not in text  # a template may have opened the thought
        for index, piece in enumerate(pieces):
            if piece in ("<think>", "</think>"):
                inside = piece == "<think>"
            elif piece.strip():
                pieces[index] = change(f"{what}'s thought" if inside else what, piece)
        return "".join(pieces)

    @property
    def numbers(self) -> Iterator[str]:
        """The numbers among its calls' arguments, as JSON."""
        for call in self.calls:
            yield from _numbers(call.arguments)

    def written(
        self, *, parts: bool, arguments_as_text: bool, none_for_empty: bool, thought_key: str
    ) -> dict[str, Any]:
        """Return the message for a template, with its content as a list of `parts` or as one text."""
        content: Any = [{"type": "text", "text": text} for text in self.content] if parts else self.text
        if none_for_empty and not self.text:
            content = None
        message = {"role": self.role, "content": content, **self.further}
        if self.thought.strip():
            message[thought_key] = self.thought
        if self.calls:
            message["tool_calls"] = [call.written(as_text=arguments_as_text) for call in self.calls]
        return message


def conversation(value: Any, field: str, row: Mapping[str, Any] | None = None) -> list[Message]:
    """Parse the messages in a row's field; a text is one user message. Raises DataFault."""
    if isinstance(value, str):
        if value.lstrip().startswith("[{") and re.search(r'"(role|from)"\s*:', value):
            hint = "parse the field, so that it is a list of messages"
            raise DataFault(f"`{field}` is a text with the JSON of messages", f"got {shown(value)}", hint)
        return [Message("user", (value,))]
    if not _is_conversation(value):
        hint = "write each message as {role: user, content: ...}, or {from: human, value: ...}"
        raise DataFault(f"`{field}` is not a list of chat messages", f"got {shown(value)}", hint)
    messages = [_message(field, number, message) for number, message in enumerate(value, 1)]
    system = (row or {}).get("system")
    if "from" in value[0] and isinstance(system, str) and system.strip():
        if messages[0].role == "system":
            hint = "keep one of them"
            raise DataFault("a conversation and its column `system` both have a system message", shown(system), hint)
        messages.insert(0, Message("system", (system,)))
    return messages


def role_of(message: Any) -> str:
    """Return a message's role; empty if it is no message."""
    if not isinstance(message, Mapping):
        return ""
    role, said_by = message.get("role"), message.get("from")
    return role if isinstance(role, str) else _SHAREGPT_ROLES.get(said_by, "") if isinstance(said_by, str) else ""


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Parse the function schemas in a row's column `tools`, a list or its JSON; None if there are none. Raises
    DataFault."""
    value = row.get("tools")
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except ValueError as error:
            hint = "write it as a list of function schemas, or rename the column"
            raise DataFault("`tools` is not JSON", f"{error}: {shown(row['tools'])}", hint) from error
    value = [value] if isinstance(value, Mapping) else value
    named = isinstance(value, Sequence) and all(isinstance(tool, Mapping) and _tool_name(tool) for tool in value)
    if named:
        _require_json("tools", "a function schema", value)
    return [dict(tool) for tool in value] if value and named and not isinstance(value, str) else None


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_tool_name(tool) for tool in tools]


def _tool_name(tool: Mapping[str, Any]) -> str:
    schema = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
    return str(schema.get("name") or "") if isinstance(schema, Mapping) else ""


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(
        isinstance(message, Mapping) and isinstance(message.get("role") or message.get("from"), str)
        for message in value
    )


def _message(field: str, number: int, message: Mapping[str, Any]) -> Message:
    given = {key: value for key, value in message.items() if value is not None and value != []}
    said_by = given.get("role") or given["from"]
    role = said_by if "role" in given else _SHAREGPT_ROLES.get(said_by)
    where = f"message {number} ({said_by})"
    if role is None:
        hint = f"{nearest(said_by, _SHAREGPT_ROLES)}Known are {', '.join(_SHAREGPT_ROLES)}"
        raise DataFault(f"`{field}` has a message from an unknown role", f"{where} is from {said_by!r}", hint)
    content, calls = given.get("content", given.get("value")), _calls(field, where, given)
    if said_by == "function_call" and "role" not in given:
        calls, content = _sharegpt_calls(field, where, content), None
    texts, part_thought = _texts(field, where, content) if content is not None else (None, "")
    key, thought = _thought(field, where, given, part_thought)
    if texts is None:
        if role != ASSISTANT or not (calls or thought.strip()):
            hint = "write its text, or remove it; only an assistant's message with tool calls may be without"
            raise DataFault(f"`{field}` has a message without content", f"{where} has none", hint)
        texts = ("",)
    if role != ASSISTANT and (calls or thought.strip()):
        hint = "give the message to the assistant"
        raise DataFault(f"`{field}` has a thought or a tool call of another role", f"at {where}", hint)
    if medium := next((name for name in _NOT_TEXT if given.get(name)), None):
        hint = "only text can be rendered; remove the row, or the key"
        raise DataFault(f"`{field}` has a message with more than text", f"{where} has `{medium}`", hint)
    further = {name: item for name, item in given.items() if name not in _READ}
    return Message(role, texts, thought, key, calls, further, _is_learned(field, where, given))


def _is_learned(field: str, where: str, given: Mapping[str, Any]) -> bool:
    weight = given.get("weight", 1)
    if weight not in (0, 1):
        raise DataFault(f"`{field}` has a message of some other weight", f"{where} has {shown(weight)}", "use 0 or 1")
    return bool(weight)


def _thought(field: str, where: str, given: Mapping[str, Any], in_parts: str) -> tuple[str, str]:
    """Return key and text of the thought; the text is empty if there is none."""
    found = {key: given[key] for key in THOUGHT_KEYS if key in given and given[key] != ""}
    if in_parts:
        found["thinking"] = in_parts
    for key, value in found.items():
        if not isinstance(value, str):
            hint = "write the thought as one text"
            raise DataFault(f"`{key}` is not text", f"{where} of `{field}` has {shown(value)}", hint)
    if len(set(found.values())) > 1:
        hint = "keep one of them"
        raise DataFault("a message has several thoughts", f"{where} of `{field}` has {', '.join(found)}", hint)
    return next(iter(found.items()), (THOUGHT_KEYS[0], ""))


def _texts(field: str, where: str, content: Any) -> tuple[tuple[str, ...], str]:
    """Return a content's texts, and the thought among its parts. Raises DataFault."""
    if isinstance(content, str):
        return (content,), ""
    if not isinstance(content, Sequence):
        hint = "write the content as a text; for a structure, as its JSON"
        raise DataFault(f"`{field}` has a content that is not text", f"{where} has {shown(content)}", hint)
    texts, thoughts = [], []
    for number, part in enumerate(content, 1):
        given = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind in _TEXT_PARTS and isinstance(given.get("text"), str):
            texts.append(given["text"])
        elif kind == "thinking" and isinstance(given.get("thinking"), str):
            thoughts.append(given["thinking"])
        else:
            named = f"of type `{kind}`" if isinstance(kind, str) else shown(part)
            hint = "only parts with text can be rendered: {type: text, text: ...}; remove the row, or the part"
            raise DataFault(f"`{field}` has a content part that is not text", f"{where}, part {number}: {named}", hint)
    return tuple(texts) or ("",), "\n".join(thoughts)


def _calls(field: str, where: str, given: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    value = given.get("tool_calls", [given["function_call"]] if "function_call" in given else [])
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _no_call(field, where, value)
    return tuple(_call(field, where, call) for call in value)


def _sharegpt_calls(field: str, where: str, content: Any) -> tuple[ToolCall, ...]:
    """Parse the calls in a `function_call` message of ShareGPT, whose value is their JSON."""
    try:
        value = json.loads(content)
    except (TypeError, ValueError) as error:
        raise _no_call(field, where, content) from error
    return tuple(_call(field, where, call) for call in (value if isinstance(value, list) else [value]))


def _call(field: str, where: str, call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(function, Mapping):
        raise _no_call(field, where, call)
    arguments: Any = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, Mapping | str):
        raise _no_call(field, where, call)
    _require_json(field, where, arguments)
    call_id = call.get("id")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


def _require_json(field: str, where: str, value: Any) -> None:
    """Raises DataFault for a value that JSON lacks, such as a Parquet date: templates would print its Python form."""
    try:
        json.dumps(value)
    except TypeError as error:
        hint = "write it as a text or a number"
        raise DataFault(f"`{field}` has a value that JSON lacks", f"{where}: {error}", hint) from error


def _no_call(field: str, where: str, value: Any) -> DataFault:
    hint = "write it as {type: function, function: {name: ..., arguments: {...}}}"
    return DataFault(f"`{field}` has a tool call that cannot be read", f"{where}: {shown(value)}", hint)


def _mapped(what: str, value: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return change(what, value) if value.strip() else value
    if isinstance(value, Mapping):
        return {key: _mapped(what, inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(what, inner, change) for inner in value]
    return value


def _numbers(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
