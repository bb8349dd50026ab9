"""Tool calls in a model's text, in the syntaxes that chat templates write.

The syntax of a model is the one that reads what its own template writes (`syntax_of`). A wrong one would find no calls,
and a run would learn to do without tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.chat.messages import ToolCall
from rlhfless.util.text import parsed_json

Tools = Sequence[Mapping[str, Any]]


class Unreadable(Exception):
    """A text begins a call that cannot be read; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a model writes its calls."""

    name: str
    opening: str
    """A text that holds this has a call."""
    closing: str
    """Ends a call; a turn may be cut before it."""
    read: Callable[[str, Tools], list[ToolCall]]
    """Returns the calls of a text that has `opening`. Raises Unreadable."""

    def split(self, text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
        """Return the text before the first call, and the calls. Raises Unreadable."""
        if self.name == "json":
            is_call = text.lstrip().startswith("{") and '"name"' in text
            return ("", self.read(text, tools)) if is_call else (text, [])
        content, mark, _ = text.partition(self.opening)
        return (content, self.read(text, tools)) if mark else (text, [])

    def is_open(self, text: str) -> bool:
        """Return whether the last call of a text lacks its end."""
        return bool(self.closing) and text.count(self.opening) > text.count(self.closing)


def syntax_of(write: Callable[[ToolCall], str]) -> Syntax | None:
    """Return the syntax that reads what a template writes. `write`: renders an assistant's turn with one call."""
    arguments = {"text": 'say "é", <b>\n', "number": -3, "flag": True, "items": [1, "two"]}
    schema = {"text": "string", "number": "integer", "flag": "boolean", "items": "array"}
    parameters = {"type": "object", "properties": {name: {"type": kind} for name, kind in schema.items()}}
    tools = [{"type": "function", "function": {"name": "probe", "parameters": parameters}}]
    text = write(ToolCall("probe", arguments, "call00001"))
    for syntax in SYNTAXES:
        try:
            calls = syntax.split(text, tools)[1]
        except Unreadable:
            continue
        if [(call.name, call.arguments) for call in calls] == [("probe", arguments)]:
            return syntax
    return None


def _blocks(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts between the marks. Raises Unreadable if the last one does not end."""
    blocks = []
    for part in text.split(opening)[1:]:
        block, end, _ = part.partition(closing)
        if not end:
            raise Unreadable(f"the tool call does not end with {closing}")
        blocks.append(block.strip())
    return blocks


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise Unreadable('a tool call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return ToolCall(value["name"], arguments, value.get("id") if isinstance(value.get("id"), str) else None)


def _json(text: str) -> Any:
    try:
        return parsed_json(text)
    except ValueError as error:
        raise Unreadable(f"the tool call is not JSON: {error}") from error


def _tagged_json(text: str, tools: Tools) -> list[ToolCall]:  # noqa: ARG001
    return [_call(_json(block)) for block in _blocks(text, "<tool_call>", "</tool_call>")]


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _tagged_function(text: str, tools: Tools) -> list[ToolCall]:
    """Read `<function=name><parameter=key>value</parameter></function>`, as Qwen3-Coder and Qwen3.5 write it."""
    calls = []
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        found = _FUNCTION.fullmatch(block)
        if found is None:
            raise Unreadable("a tool call is <function=NAME> with <parameter=KEY> elements and </function>")
        calls.append(ToolCall(found[1], _typed(found[1], dict(_PARAMETER.findall(found[2])), tools)))
    return calls


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _tagged_pairs(text: str, tools: Tools) -> list[ToolCall]:
    """Read `name<arg_key>key</arg_key><arg_value>value</arg_value>`, as GLM-4.5 writes it."""
    calls = []
    for block in _blocks(text, "<tool_call>", "</tool_call>"):
        name = block.partition("<arg_key>")[0].strip()
        if not name or "{" in name:
            raise Unreadable("a tool call is the function's name with <arg_key> and <arg_value> elements")
        calls.append(ToolCall(name, _typed(name, dict(_PAIR.findall(block)), tools)))
    return calls


_WORDS = {"True": True, "False": False, "None": None}


def _typed(name: str, values: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    """Read values that are written without quotes: texts as they are, others as JSON or Python if that is possible."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    properties = functions.get(name, {}).get("parameters", {}).get("properties", {})
    typed: dict[str, Any] = {}
    for key, value in values.items():
        typed[key] = value
        if properties.get(key, {}).get("type") != "string":
            try:
                typed[key] = _WORDS[value] if value in _WORDS else parsed_json(value)
            except ValueError:
                continue
    return typed


def _listed_json(text: str, tools: Tools) -> list[ToolCall]:  # noqa: ARG001
    """Read `[TOOL_CALLS][{...}, ...]`, as Mistral writes it."""
    value = _json(text.partition("[TOOL_CALLS]")[2].strip().removesuffix("</s>"))
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _bare_json(text: str, tools: Tools) -> list[ToolCall]:  # noqa: ARG001
    """Read a turn that is one JSON object, as Llama 3 writes it; further objects follow after `;`."""
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"the tool call is not JSON: {error}") from error
        calls.append(_call(value))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls


SYNTAXES = (
    Syntax("tagged_json", "<tool_call>", "</tool_call>", _tagged_json),
    Syntax("tagged_function", "<tool_call>", "</tool_call>", _tagged_function),
    Syntax("tagged_pairs", "<tool_call>", "</tool_call>", _tagged_pairs),
    Syntax("listed_json", "[TOOL_CALLS]", "", _listed_json),
    Syntax("json", '{"name"', "", _bare_json),
)
