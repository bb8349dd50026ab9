"""Results of tool calls as chat messages, in a form that every template can write."""

from __future__ import annotations

import re

from rlhfless.chat.messages import Message, ToolCall


def tool_message(call: ToolCall, index: int, text: str) -> Message:
    """Return the result of a turn's call number `index` for the model."""
    return Message("tool", (text,), further={"tool_call_id": call_id(call, index), "name": function_name(call)})


def function_name(call: ToolCall) -> str:
    """Return a name that every template can write: the model may have called anything."""
    return call.name if re.fullmatch(r"[\w.-]{1,64}", call.name) else "unknown"


def call_id(call: ToolCall, index: int) -> str:
    return call.call_id or f"call{index:05}"
