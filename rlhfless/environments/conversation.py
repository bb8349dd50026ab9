"""What a user's own loop talks to: the model, as turns that extend one conversation.

The tokens of a turn are kept, so a conversation can only grow. A request whose messages change what was said before, or
start another conversation, would have to be rendered anew; it is refused and counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless.chat.messages import ASSISTANT, DataFault, Message, ToolCall, conversation, tools_of
from rlhfless.environments.contract import ConversationChanged, EpisodeOver
from rlhfless.environments.protocol import ModelAnswer, ModelAsked
from rlhfless.environments.tool_messages import tool_message
from rlhfless.spec.explain import shown

TOOL = "tool"


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool call of the model, as a user's loop reads it."""

    id: str
    name: str
    arguments: Any
    """A mapping; another value if the model wrote one."""


@dataclass(frozen=True, slots=True)
class ModelMessage:
    """A turn of the model, as a user's loop reads it."""

    content: str
    thought: str
    tool_calls: tuple[CalledTool, ...]
    finish_reason: str
    """`stop`, `tool_calls`, or `length` at a limit of tokens."""
    context_tokens: int
    """Tokens before the turn."""
    tokens: int
    role: str = ASSISTANT


class ConversationModel:
    """The model of one episode."""

    def __init__(self, ask: Callable[[ModelAsked], Awaitable[ModelAnswer | None]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] = []
        self._last: ModelMessage | None = None
        self._calls: tuple[ToolCall, ...] = ()
        """Calls of the last turn."""
        self.turns = 0
        self.refused = 0
        """Requests that did not extend the conversation."""
        self.is_over = False
        """A limit of the episode was reached."""

    async def turn(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> ModelMessage:
        """Add messages to the conversation, and return the model's next turn.

        `tools`: schemas as in OpenAI's API, given with the first turn. `max_tokens`: limit of this turn, besides
        `turn_tokens`. Raises EpisodeOver at a limit of the episode, ValueError for messages that cannot be used.
        """
        async with self._lock:
            added = _parsed(messages)
            if self.turns and any(message.role == ASSISTANT for message in added):
                raise ValueError(
                    "`model.turn` adds messages, and the model's own are there already; `model.chat` takes all of them"
                )
            return await self._next(added, tools, max_tokens)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> ModelMessage:
        """Return the model's next turn after a whole conversation, as OpenAI's API does.

        The conversation must extend the previous one; see `turn`. The same messages again get the same answer, so a
        client may repeat a request. Raises ConversationChanged.
        """
        async with self._lock:
            whole = _parsed(messages)
            if self._last is not None and _same(whole, self._messages[:-1]):
                return self._last
            before = self._messages
            if not _same(whole[: len(before)], before):
                self.refused += 1
                raise ConversationChanged(_difference(before, whole))
            return await self._next(whole[len(before) :], tools, max_tokens)

    async def _next(
        self, added: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, max_tokens: int | None
    ) -> ModelMessage:
        if not added:
            raise ValueError("there is no message after the model's last turn; add one")
        if max_tokens is not None and (isinstance(max_tokens, bool) or max_tokens < 1):
            raise ValueError(f"`max_tokens` is {shown(max_tokens)}; it must be at least 1, or left out")
        schemas = _schemas(tools)
        if self.turns and schemas is not None and schemas != self._tools:
            self.refused += 1
            raise ConversationChanged("the tools differ from those of the first turn, which the model has read")
        asked = self._as_results(added)
        if self.is_over:
            raise EpisodeOver("the episode has reached a limit")
        answer = await self._ask(ModelAsked(tuple(asked), tuple(schemas or ()), max_tokens))
        if answer is None:
            self.is_over = True
            raise EpisodeOver("the episode has reached a limit")
        self._tools = (schemas or []) if not self.turns else self._tools
        self._messages += [*added, answer.message]
        self._calls = answer.message.calls
        self._last = self._read(answer)
        self.turns += 1
        return self._last

    def _read(self, answer: ModelAnswer) -> ModelMessage:
        calls = tuple(
            CalledTool(f"call_{self.turns}_{index}", call.name, call.arguments)
            for index, call in enumerate(answer.message.calls)
        )
        reason = "length" if answer.is_cut else "tool_calls" if calls else "stop"
        message = answer.message
        return ModelMessage(message.text, message.thought, calls, reason, answer.context_tokens, answer.tokens)

    def _as_results(self, added: Sequence[Message]) -> list[Message]:
        """Return messages with the results of the last turn's calls in the order of the calls, as templates need them.

        Raises ValueError unless each call has one result.
        """
        results = [message for message in added if message.role == TOOL]
        if not self.turns or not results:  # a loop may answer calls in words, for instance that it takes none
            return list(added)
        if len(results) != len(self._calls):
            raise ValueError(f"the model made {len(self._calls)} tool calls, and {len(results)} results follow")
        ids = [called.id for called in self._last.tool_calls] if self._last else []
        given = [result.further.get("tool_call_id") for result in results]
        if any(given):
            if sorted(map(str, given)) != sorted(ids):
                raise ValueError(f"the results are for the calls {shown(given)}, and the model made {shown(ids)}")
            results.sort(key=lambda result: ids.index(str(result.further["tool_call_id"])))
        written = [
            tool_message(call, index, result.text)
            for index, (call, result) in enumerate(zip(self._calls, results, strict=True))
        ]
        return [*written, *(message for message in added if message.role != TOOL)]


def _parsed(messages: Any) -> list[Message]:
    try:
        return conversation(messages, "messages")
    except DataFault as error:
        raise ValueError(f"{error}; {error.hint}") from error


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    try:
        schemas = tools_of({"tools": tools}) or []
    except DataFault as error:
        raise ValueError(f"{error}; {error.hint}") from error
    if len(schemas) != len(tools):
        raise ValueError(f"`tools` is {shown(tools)}; write each as {{type: function, function: {{name: ...}}}}")
    return schemas


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Message, other: Message) -> bool:
    """Compare what the model reads. Clients drop thoughts, and write calls and spaces in their own way."""
    if one.role != other.role or one.text.strip() != other.text.strip():
        return False
    return [_comparable(call) for call in one.calls] == [_comparable(call) for call in other.calls]


def _comparable(call: ToolCall) -> tuple[str, str]:
    arguments = call.arguments
    return call.name, arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)


def _difference(before: Sequence[Message], given: Sequence[Message]) -> str:
    """Say where messages leave the conversation."""
    for number, message in enumerate(before, 1):
        if number > len(given):
            return (
                f"the conversation has {len(before)} messages so far, and the request the first {len(given)} of them; "
                "a request extends all messages before it"
            )
        other = given[number - 1]
        if not _is_same(message, other):
            was, now = (f"{each.role} {shown(each.text[:200])}" for each in (message, other))
            return f"message {number} was {was}, and is now {now}; a request extends all messages before it"
    raise AssertionError("they differ")
