"""What a user's own loop talks to: the model, as turns of one or several conversations.

The tokens of a turn are kept, so a conversation only grows. Messages that change what was said before, or have nothing
to do with it, begin another conversation, which is rendered anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless.chat.messages import ASSISTANT, DataFault, Message, ToolCall, conversation, tools_of
from rlhfless.environments.contract import EpisodeOver
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


class _Conversation:
    """Messages that grow, and the model's turns among them."""

    def __init__(self, number: int, tools: list[dict[str, Any]]) -> None:
        self.number = number
        self.tools = tools
        self.messages: list[Message] = []
        self.turns: list[tuple[int, ModelMessage]] = []
        """Each with the number of messages before it."""
        self._calls: tuple[ToolCall, ...] = ()
        """Calls of the last turn."""

    def add(self, added: Sequence[Message], answer: ModelMessage, message: Message) -> None:
        """Add messages and the model's turn after them."""
        self.messages += added
        self.turns.append((len(self.messages), answer))
        self.messages.append(message)
        self._calls = message.calls

    def takes(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether a request has the tools of the first turn, which the model has read. None: it names none."""
        return tools is None or tools == self.tools

    def answered(self, messages: Sequence[Message]) -> ModelMessage | None:
        """Return the turn after exactly these messages, if there is one."""
        found = (turn for before, turn in self.turns if _same(messages, self.messages[:before]))
        return next(found, None)

    def as_results(self, added: Sequence[Message]) -> list[Message]:
        """Return messages with the results of the last turn's calls in the order of the calls, as templates need them.

        Raises ValueError unless each call has one result.
        """
        results = [message for message in added if message.role == TOOL]
        if not self.turns or not results:  # a loop may answer calls in words, for instance that it takes none
            return list(added)
        if len(results) != len(self._calls):
            raise ValueError(f"the model made {len(self._calls)} tool calls, and {len(results)} results follow")
        ids = [called.id for called in self.turns[-1][1].tool_calls]
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


@dataclass
class _TokenConversation:
    """Tokens that grow, and the model's turns among them."""

    number: int
    token_ids: tuple[int, ...] = ()
    turns: dict[int, ModelAnswer] = field(default_factory=dict)
    """By the number of tokens before it."""


class ConversationModel:
    """The model of one episode."""

    def __init__(self, ask: Callable[[ModelAsked], Awaitable[ModelAnswer | None]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._conversations: list[_Conversation] = []
        self._of_tokens: list[_TokenConversation] = []
        self.turns = 0
        self.is_over = False
        """A limit of the episode was reached."""

    async def turn(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> ModelMessage:
        """Add messages to the first conversation, and return the model's next turn.

        `tools`: schemas as in OpenAI's API, given with the first turn. `max_tokens`: limit of this turn, besides
        `turn_tokens`. Raises EpisodeOver at a limit of the episode, ValueError for messages that cannot be used.
        """
        async with self._lock:
            added, schemas = _parsed(messages), _schemas(tools)
            if not self._conversations:
                return await self._next(_Conversation(self._count, schemas or []), added, max_tokens)
            first = self._conversations[0]
            if any(message.role == ASSISTANT for message in added):
                raise ValueError(
                    "`model.turn` adds messages, and the model's own are there already; `model.chat` takes all of them"
                )
            if not first.takes(schemas):
                raise ValueError("the tools differ from those of the first turn, which the model has read")
            return await self._next(first, added, max_tokens)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> ModelMessage:
        """Return the model's next turn after a whole conversation, as OpenAI's API does.

        It continues the conversation that it extends. Other messages begin a new one: of a sub-agent, or with a
        shortened history. The same messages again get the same answer, so a client may repeat a request.
        """
        async with self._lock:
            whole, schemas = _parsed(messages), _schemas(tools)
            like = [each for each in self._conversations if each.takes(schemas)]
            for each in like:
                if (answer := each.answered(whole)) is not None:
                    return answer
            extended = [each for each in like if _same(whole[: len(each.messages)], each.messages)]
            if not extended:
                return await self._next(_Conversation(self._count, schemas or []), whole, max_tokens)
            longest = max(extended, key=lambda each: len(each.messages))
            return await self._next(longest, whole[len(longest.messages) :], max_tokens)

    async def generate(self, token_ids: tuple[int, ...], max_tokens: int | None = None) -> ModelAnswer:
        """Return the model's next turn after all tokens of a conversation, with its tokens and logprobs.

        As in `chat`, tokens that extend no conversation begin another, and the same tokens get the same answer.
        """
        async with self._lock:
            for each in self._of_tokens:
                if len(token_ids) in each.turns and each.token_ids[: len(token_ids)] == token_ids:
                    return each.turns[len(token_ids)]
            extended = [
                each
                for each in self._of_tokens
                if len(token_ids) > len(each.token_ids) and token_ids[: len(each.token_ids)] == each.token_ids
            ]
            begun = _TokenConversation(self._count)
            of = max(extended, key=lambda each: len(each.token_ids), default=begun)
            added = token_ids[len(of.token_ids) :]
            answer = await self._asked(ModelAsked((), (), max_tokens, of.number, added), max_tokens)
            self._of_tokens += [of] if of is begun else []
            of.turns[len(token_ids)] = answer
            of.token_ids = token_ids + answer.token_ids
            return answer

    @property
    def _count(self) -> int:
        return len(self._conversations) + len(self._of_tokens)

    async def _next(self, of: _Conversation, added: Sequence[Message], max_tokens: int | None) -> ModelMessage:
        if not added:
            raise ValueError("there is no message after the model's last turn; add one")
        asked = ModelAsked(tuple(of.as_results(added)), tuple(of.tools), max_tokens, of.number)
        answer = await self._asked(asked, max_tokens)
        if of not in self._conversations:
            self._conversations.append(of)
        read = self._read(answer)
        of.add(added, read, answer.message)
        return read

    async def _asked(self, asked: ModelAsked, max_tokens: int | None) -> ModelAnswer:
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise ValueError(f"`max_tokens` is {shown(max_tokens)}; it must be at least 1, or left out")
        if self.is_over:
            raise EpisodeOver("the episode has reached a limit")
        answer = await self._ask(asked)
        if answer is None:
            self.is_over = True
            raise EpisodeOver("the episode has reached a limit")
        self.turns += 1
        return answer

    def _read(self, answer: ModelAnswer) -> ModelMessage:
        calls = tuple(
            CalledTool(f"call_{self.turns - 1}_{index}", call.name, call.arguments)
            for index, call in enumerate(answer.message.calls)
        )
        reason = "length" if answer.is_cut else "tool_calls" if calls else "stop"
        message = answer.message
        return ModelMessage(message.text, message.thought, calls, reason, answer.context_tokens, answer.tokens)


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
