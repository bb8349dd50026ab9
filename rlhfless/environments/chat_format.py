"""The tokens of a conversation that grows by turns: what the model generated is never rendered or tokenised again.

The tokens between two turns come from the model's own chat template, rendered once with a stand-in for each text. The
template's part is encoded with its special tokens. Texts of an environment are encoded without any, so that a tool's
result cannot pass for the end of a message.

Thoughts of earlier turns stay in the context, also where the template would leave them out: the model reads what it
wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlhfless.chat.encoding import Encoder
from rlhfless.chat.messages import ASSISTANT, DataFault, Message, ToolCall
from rlhfless.chat.template import ChatTemplate
from rlhfless.environments.tool_calls import Syntax, Unreadable, syntax_of
from rlhfless.environments.tool_messages import call_id, function_name, tool_message
from rlhfless.environments.trajectory import Parsed, Tokens
from rlhfless.records import FinishReason
from rlhfless.spec.errors import InputError, Problem

_MARK = re.compile("\ue004([0-9]+)\ue005|\\\\ue004([0-9]+)\\\\ue005")
"""Stands for a text in a rendering; escaped where the template writes the text as JSON."""
_ANSWER = "\ue006"
_CUT = "\n[... {} tokens cut ...]\n"

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A model's turn as the environment gets it."""

    text: str
    message: Message
    parsed: Parsed
    fault: str = ""
    """For the model: what is wrong with its call."""


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens between two turns, or of a prompt."""

    token_ids: Tokens
    bodies: tuple[tuple[int, int], ...]
    """Positions of the messages' texts, in order."""
    cut_tokens: tuple[int, ...]
    """Per message, the tokens of its text that were left out."""


class ChatFormat(Protocol):
    """Converts between messages and tokens."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    def check(self, tools: Tools) -> None:
        """Find the syntax of tool calls, and prove that turns can be added. Raises InputError."""
        ...

    def opening(self, prompt: Sequence[Message], added: Sequence[Message], tools: Tools, most: int) -> Given:
        """Return the tokens up to the model's first turn. `most`: tokens of each text of `added`."""
        ...

    def read(self, token_ids: Sequence[int], finish_reason: FinishReason, tools: Tools) -> ReadTurn:
        """Read a turn of the model. Without tools, it has no calls."""
        ...

    def following(self, turn: ReadTurn, token_ids: Sequence[int], added: Sequence[Message], most: int) -> Given:
        """Return the tokens from the end of a turn to the start of the next one, with `added` between them."""
        ...


class _Texts:
    """Encodes pieces of the template and texts of an environment."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, added)) or "(?!)")

    def scaffold(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        return ids

    def turn(self, token_ids: Sequence[int], ends: frozenset[int]) -> str:
        """Return the text of a model's turn without the tokens that end it."""
        ids = list(token_ids)
        while ids and ids[-1] in ends:
            ids.pop()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def body(self, text: str, most: int) -> tuple[list[int], int]:
        """Return the tokens of a text without special tokens, and how many were cut from its middle."""
        ids: list[int] = []
        at = 0
        while found := self._special.search(text, at):  # encoded in two parts, it is ordinary text
            ids += self.scaffold(text[at : found.start() + 1])
            at = found.start() + 1
        ids += self.scaffold(text[at:])
        if len(ids) <= most:
            return ids, 0
        kept = max(most - len(self.scaffold(_CUT.format(len(ids)))), 0)
        mark = self.scaffold(_CUT.format(len(ids) - kept))
        head, tail = (kept + 1) // 2, kept // 2
        return [*ids[:head], *mark, *ids[len(ids) - tail :]][:most], len(ids) - kept

    def joined(self, text: str, bodies: Sequence[tuple[str, int]], start: Sequence[int] | None = None) -> Given:
        """Encode a rendering with a mark per body. `start`: tokens of what comes before the first mark."""
        ids: list[int] = []
        spans, cuts, at = [], [], 0
        for mark in _MARK.finditer(text):
            body, most = bodies[int(mark[1] or mark[2])]
            ids += self.scaffold(text[at : mark.start()]) if at or start is None else start
            inner, cut = self.body(body if mark[1] else json.dumps(body)[1:-1], most)
            spans.append((len(ids), len(ids) + len(inner)))
            cuts.append(cut)
            ids += inner
            at = mark.end()
        ids += self.scaffold(text[at:]) if at or start is None else start
        return Given(tuple(ids), tuple(spans), tuple(cuts))


class TemplateFormat:
    """The chat template of a transformers `tokenizer`."""

    def __init__(self, tokenizer: Any, end_token_ids: Sequence[int] = (), kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._texts = _Texts(tokenizer)
        self._template = ChatTemplate(tokenizer, kwargs or {}, end_token_ids)
        self._encoder = Encoder(tokenizer, end_token_ids, templated=True)
        self.ends = frozenset({*end_token_ids, tokenizer.eos_token_id} - {None})
        self._syntax: Syntax | None = None
        self._opens_thought = False
        self._takes_several = True
        """Whether a turn may have several calls."""

    @property
    def vocabulary(self) -> int:
        """See ChatFormat."""
        return len(self._tokenizer)

    def check(self, tools: Tools) -> None:
        """Find the syntax of tool calls, and prove that turns can be added. Raises InputError."""
        problems = []
        try:
            opened = self._rendered([Message("user", ("a",))], opens=True)
            self._opens_thought = opened.rstrip().endswith("<think>")
            self._require_extendable([Message("user", ("first",))], "a user's message")
            if tools:
                self._syntax = syntax_of(self.written_call)
                if self._syntax is None:
                    what = f"writes tool calls in a syntax that is not known: {self.written_call(_EXAMPLE)!r}"
                    problems.append(Problem("chat_template", what, _OTHER))
                results = [tool_message(_EXAMPLE, index, text) for index, text in enumerate(("first", "second"))]
                self._require_extendable(results[:1], "a tool's result")
                try:
                    self._require_extendable(results, "two results")
                except DataFault:
                    self._takes_several = False
        except DataFault as error:
            problems.append(Problem("chat_template", str(error), error.hint))
        if problems:
            raise InputError("environment: the model's chat template cannot be used", problems)

    def opening(self, prompt: Sequence[Message], added: Sequence[Message], tools: Tools, most: int) -> Given:
        marked = [_with_text(message, f"\ue004{index}\ue005") for index, message in enumerate(added)]
        messages = [*prompt, *marked]
        rendering, _ = self._template.render(messages, opens=True, kept=[False] * len(messages), tools=tools or None)
        # As a prompt without an environment is encoded (rlhfless.prepare.prompts).
        first = _MARK.search(rendering.text)
        start = self._encoder.prompts([rendering.text[: first.start()] if first else rendering.text])[0]
        return self._texts.joined(rendering.text, [(message.text, most) for message in added], start)

    def read(self, token_ids: Sequence[int], finish_reason: FinishReason, tools: Tools) -> ReadTurn:
        text = self._texts.turn(token_ids, self.ends)
        thought, closed, answer = text.rpartition("</think>")
        is_cut = finish_reason is FinishReason.LENGTH
        if not closed and ("<think>" in text or self._opens_thought):
            message = Message(ASSISTANT, ("",), thought=text.removeprefix("<think>"))
            return ReadTurn(text, message, Parsed.UNFINISHED, "the turn ended inside its thought")
        thought = thought.partition("<think>")[2] or thought
        try:
            content, calls = (answer, []) if self._syntax is None or not tools else self._syntax.split(answer, tools)
            if calls[1:] and not self._takes_several:
                raise Unreadable("a turn may have one tool call")
        except Unreadable as error:
            fault = f"the turn was cut after {len(token_ids)} tokens" if is_cut else str(error)
            message = Message(ASSISTANT, (answer,), thought=thought)
            return ReadTurn(text, message, Parsed.UNFINISHED if is_cut else Parsed.INVALID, fault)
        message = Message(ASSISTANT, (content.strip(),), thought=thought, calls=tuple(calls))
        return ReadTurn(text, message, Parsed.CALLS if calls else Parsed.TEXT)

    def following(self, turn: ReadTurn, token_ids: Sequence[int], added: Sequence[Message], most: int) -> Given:
        calls = turn.message.calls if any(message.role == "tool" for message in added) else ()
        closing, suffix = self._suffix(calls, added)
        if token_ids and token_ids[-1] in self.ends:
            closing = ""
        elif turn.parsed is Parsed.UNFINISHED:
            closing = self._missing(turn) + closing
        return self._texts.joined(closing + suffix, [(message.text, most) for message in added])

    def _missing(self, turn: ReadTurn) -> str:
        """Return the ends of what a cut turn has left open."""
        if turn.message.thought and not turn.message.text:
            return "\n</think>\n\n"
        is_open = self._syntax is not None and self._syntax.is_open(turn.message.text)
        return f"\n{self._syntax.closing}" if is_open and self._syntax else ""

    def _suffix(self, calls: Sequence[ToolCall], added: Sequence[Message]) -> tuple[str, str]:
        """Return the token that ends the assistant's turn, and what the template writes after it, with marks."""
        before = [Message("user", ("a",)), _answered(calls)]
        marked = [_with_text(message, f"\ue004{index}\ue005") for index, message in enumerate(added)]
        text = self._rendered([*before, *marked], opens=True)
        start = text.rindex(_ANSWER) + len(_ANSWER) if _ANSWER in text else -1
        found = [(at, end) for end in self._template.ends if (at := text.find(end, start)) >= 0]
        if start < 0 or not found:
            detail = f"it writes {text!r}"
            raise DataFault("the chat template does not end an assistant's turn by a special token", detail, _OTHER)
        at, end = min(found)
        return end, text[at + len(end) :]

    def _rendered(self, messages: Sequence[Message], *, opens: bool) -> str:
        """Render in the first form that the template takes."""
        rendering, _ = self._template.render(messages, opens=opens, kept=[False] * len(messages))
        return rendering.text

    def written_call(self, call: ToolCall) -> str:
        """Return the assistant's turn with one call, as the template writes it. Raises DataFault."""
        user = Message("user", ("a",))
        text = self._rendered([user, Message(ASSISTANT, ("",), calls=(call,))], opens=False)
        for opens in (True, False):
            text = text.removeprefix(self._rendered([user], opens=opens))
        ends = [at for end in self._template.ends if (at := text.find(end)) >= 0]
        return text[: min(ends)] if ends else text

    def _require_extendable(self, added: Sequence[Message], what: str) -> None:
        """Raises DataFault unless what the template adds has all texts in order."""
        calls = [_EXAMPLE] * len(added) if added[0].role == "tool" else []
        _, suffix = self._suffix(calls, added)
        marks = [int(mark[1] or mark[2]) for mark in _MARK.finditer(suffix)]
        if marks != list(range(len(added))):
            raise DataFault(f"the chat template does not write {what} after a turn", f"it writes {suffix!r}", _OTHER)


class PlainFormat:
    """Texts without a chat template, for small policies with a vocabulary of their own: no tools."""

    def __init__(self, tokenizer: Any, end_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._texts = _Texts(tokenizer)
        self._encoder = Encoder(tokenizer, end_token_ids, templated=False)
        self.ends = frozenset({*end_token_ids, tokenizer.eos_token_id} - {None})

    @property
    def vocabulary(self) -> int:
        """See ChatFormat."""
        return len(self._tokenizer)

    def check(self, tools: Tools) -> None:
        """Raises InputError if there are tools."""
        if tools:
            hint = "use a model with a chat template, or `observe(text)` in place of tools"
            raise InputError("environment", [Problem("", "has tools, and the model has no chat template", hint)])

    def opening(self, prompt: Sequence[Message], added: Sequence[Message], tools: Tools, most: int) -> Given:  # noqa: ARG002
        start = self._encoder.prompts(["\n".join(message.text for message in prompt)])[0] if prompt else []
        marks = "".join(f"\ue004{index}\ue005" for index in range(len(added)))
        return self._texts.joined(marks, [(message.text, most) for message in added], start)

    def read(self, token_ids: Sequence[int], finish_reason: FinishReason, tools: Tools) -> ReadTurn:  # noqa: ARG002
        text = self._texts.turn(token_ids, self.ends)
        return ReadTurn(text, Message(ASSISTANT, (text,)), Parsed.TEXT)

    def following(self, turn: ReadTurn, token_ids: Sequence[int], added: Sequence[Message], most: int) -> Given:  # noqa: ARG002
        marks = "".join(f"\ue004{index}\ue005" for index in range(len(added)))
        return self._texts.joined(marks, [(message.text, most) for message in added])


Format = TemplateFormat | PlainFormat


def chat_format(
    tokenizer: Any, end_token_ids: Sequence[int], *, template: bool, kwargs: Mapping[str, Any] | None = None
) -> Format:
    """Return the format of conversations with the tokenizer's chat `template`, or of plain texts."""
    return TemplateFormat(tokenizer, end_token_ids, kwargs) if template else PlainFormat(tokenizer, end_token_ids)


_EXAMPLE = ToolCall("probe", {"text": "a"}, "call00001")
_OTHER = "use a model of the families in docs/environments.md"


def _with_text(message: Message, text: str) -> Message:
    return replace(message, content=(text,))


def _answered(calls: Sequence[ToolCall]) -> Message:
    """Return an assistant's turn whose last text is the stand-in."""
    if not calls:
        return Message(ASSISTANT, (_ANSWER,))
    names = [function_name(call) for call in calls]
    names[-1] += _ANSWER
    written = (
        ToolCall(name, {}, call_id(call, index)) for index, (name, call) in enumerate(zip(names, calls, strict=True))
    )
    return Message(ASSISTANT, ("",), calls=tuple(written))
