"""OpenAI's chat completions: requests as messages of an episode, and turns of the model as responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhfless.environments.conversation import ModelMessage
from rlhfless.spec.explain import shown


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A client's request for a turn."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "logprobs": (None, False),
    "echo": (None, False),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
"""Keys that would change what the model generates, with their values without an effect. Temperature and other sampling
are those of the run, as the model learns from what it samples."""


def parsed(body: Mapping[str, Any]) -> AgentRequest:
    """Return a request. Raises ValueError for one that an episode cannot answer as it asks."""
    for key, usual in UNSUPPORTED.items():
        if body.get(key) not in usual:
            raise ValueError(f"`{key}` is {shown(body[key])}, which episodes do not support; leave it out")
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise ValueError(f"`messages` is {shown(messages)}; it must be a list of messages")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    return AgentRequest(
        [{**each, "role": "system"} if each.get("role") == "developer" else {**each} for each in messages],
        list_of_tools(tools),
        body.get("max_completion_tokens") or body.get("max_tokens"),
    )


def list_of_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a request; None without any. Raises ValueError."""
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise ValueError(f"`tools` is {shown(tools)}; it must be a list of function schemas")
    return [dict(each) for each in tools]


def written(message: ModelMessage, model: str, number: int) -> dict[str, Any]:
    """Return a turn as a response."""
    choice = {"index": 0, "message": _message(message), "finish_reason": message.finish_reason, "logprobs": None}
    return {**_head(model, number, "chat.completion"), "choices": [choice], "usage": _usage(message)}


def streamed(message: ModelMessage, model: str, number: int, with_usage: bool) -> Iterator[str]:
    """Yield a turn as server-sent events."""
    head = _head(model, number, "chat.completion.chunk")
    whole = _message(message)
    calls = whole.pop("tool_calls", [])
    deltas: list[dict[str, Any]] = [{key: value for key, value in whole.items() if value is not None}]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    for delta, reason in [*((delta, None) for delta in deltas), ({}, message.finish_reason)]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield _event({**head, "choices": [choice]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(message)})
    yield "data: [DONE]\n\n"


def _head(model: str, number: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


def _message(message: ModelMessage) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call.arguments)}}
        for call in message.tool_calls
    ]
    content = message.content if message.content or not calls else None
    thought = {"reasoning_content": message.thought} if message.thought else {}
    return {"role": "assistant", "content": content, **thought, **({"tool_calls": calls} if calls else {})}


def arguments_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _usage(message: ModelMessage) -> dict[str, int]:
    return {
        "prompt_tokens": message.context_tokens,
        "completion_tokens": message.tokens,
        "total_tokens": message.context_tokens + message.tokens,
    }


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
