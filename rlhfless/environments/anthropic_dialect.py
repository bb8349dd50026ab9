"""Anthropic's messages: requests as messages of an episode, and turns of the model as responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhfless.environments.conversation import ModelMessage
from rlhfless.environments.openai_dialect import AgentRequest, arguments_of, list_of_tools
from rlhfless.spec.explain import shown

_THOUGHTS = ("thinking", "redacted_thinking")
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def parsed(body: Mapping[str, Any]) -> AgentRequest:
    """Return a request. Raises ValueError for one that an episode cannot answer as it asks."""
    if body.get("stop_sequences"):
        raise ValueError("`stop_sequences` is given, which episodes do not support; leave it out")
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise ValueError(f"`tool_choice` is {shown(choice)}, which episodes do not support; use auto or none")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    given = body.get("messages")
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ValueError(f"`messages` is {shown(given)}; it must be a list of messages")
    for message in given:
        messages += _messages(message)
    tools = list_of_tools(body.get("tools")) if choice != "none" else None
    return AgentRequest(messages, None if tools is None else [_tool(each) for each in tools], body.get("max_tokens"))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "name" not in tool or "input_schema" not in tool:
        raise ValueError(
            f"the tool {shown(tool)} has no `name` or no `input_schema`; tools of the server are not there"
        )
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of one, which may have a text and results of several calls."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ValueError(f"`content` is {shown(content)}; it must be a text or a list of blocks")
    results = [block for block in blocks if block.get("type") == "tool_result"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    rest = [block for block in blocks if block not in results and block not in calls]
    for block in results:
        text = _text(block.get("content") or "")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    text = _text([block for block in rest if block.get("type") not in _THOUGHTS])
    if text or calls or not results:
        called = [
            {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input") or {}}}
            for block in calls
        ]
        yield {"role": role, "content": text, **({"tool_calls": called} if called else {})}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(each, Mapping) and "text" in each for each in content):
        raise ValueError(f"a content is {shown(content)}; only text is supported")
    return "\n".join(str(block["text"]) for block in content)


def written(message: ModelMessage, model: str, number: int) -> dict[str, Any]:
    """Return a turn as a response."""
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(message),
        "stop_reason": _REASONS[message.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": message.context_tokens, "output_tokens": message.tokens},
    }


def _blocks(message: ModelMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        given = call.arguments if isinstance(call.arguments, Mapping) else {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(given)})
    return blocks


def streamed(message: ModelMessage, model: str, number: int, with_usage: bool) -> Iterator[str]:  # noqa: ARG001
    """Yield a turn as server-sent events."""
    whole = written(message, model, number)
    usage = whole["usage"]
    yield _event("message_start", {"message": {**whole, "content": [], "stop_reason": None}})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": arguments_of(block["input"])}
        yield _event("content_block_start", {"index": index, "content_block": start})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", {"delta": ended, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _event("message_stop", {})


def _event(kind: str, value: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value}, ensure_ascii=False)}\n\n"
