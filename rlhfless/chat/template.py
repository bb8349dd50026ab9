"""Render messages by a tokenizer's chat template, and check that it drops no text.

A template may drop what it was not written for: a system message, a tool's result, a thought, a list of parts. So each
text gets a mark, and a rendering is used only if it has all of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhfless.chat.marks import Text, located_texts, marked_messages, named_texts
from rlhfless.chat.messages import ASSISTANT, THINK, THOUGHT_KEYS, DataFault, Message, tool_names
from rlhfless.spec.data import RESERVED_KWARGS
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import nearest, shown

_STAND_IN = "\ue002"
"""Replaces a content that bypasses the template."""
_LITERAL = re.compile(r"""['"]type['"]: ?['"]text['"]""")
"""A list of parts, printed as a Python value."""
_NONE = re.compile(r"\bNone\b")
_TAG = re.compile(r"</?\w+>")
_GENERATION_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages as a template writes them."""

    text: str
    texts: tuple[Text, ...]
    form: MessageForm

    @property
    def lost(self) -> list[Text]:
        """Texts that the rendering lacks or changes."""
        return [text for text in self.texts if text.end is None]

    def end_of(self, message: int) -> int | None:
        """Return the position after a message's last text; None if it has none."""
        return max((text.end for text in self.texts if text.message == message and text.end is not None), default=None)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How messages are passed to a template; templates differ in the form they read."""

    parts: bool
    """Contents are lists of parts."""
    arguments_as_text: bool = False
    """Tool call arguments are JSON."""
    none_for_empty: bool = False
    """Empty contents are None, by which some templates recognise tool calls."""


class ChatTemplate:
    """The chat template of a transformers `tokenizer`, with extra arguments."""

    def __init__(
        self,
        tokenizer: Any,
        kwargs: Mapping[str, Any],
        end_token_ids: Iterable[int] = (),
        key: str = "chat_template",
    ) -> None:
        self._key = key
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        try:
            self.source = str(tokenizer.get_chat_template())
            self._names = _names_read(self.source)
        except Exception:  # there is none, or a broken one: transformers says so when it is rendered
            self.source, self._names = "", frozenset()
        ends = tokenizer.convert_ids_to_tokens(sorted({tokenizer.eos_token_id, *end_token_ids} - {None}))
        self.ends = tuple(str(token) for token in ends if token)
        """The texts of the end-of-sequence tokens."""
        self._specials = tuple(dict.fromkeys([*self.ends, *map(str, tokenizer.all_special_tokens)]))
        self._control: tuple[str, ...] | None = None

    @property
    def reads_tools(self) -> bool:
        return "tools" in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        opens: bool,
        kept: Sequence[bool],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[Rendering, list[Text]]:
        """Render messages in the first form that loses no text; `opens` adds the start of the assistant's turn.

        A template that reads thoughts drops earlier ones on purpose: thoughts of messages that are not `kept` may be
        missing, and are returned. Raises DataFault if the template fails or drops a text.
        """
        fault: DataFault | None = None
        for form in _forms(messages):
            try:
                rendering = self._render(messages, form, opens, tools)
                return rendering, self._require(rendering, messages, kept, tools)
            except DataFault as error:
                fault = fault or error
        assert fault is not None, "there is a form"
        raise fault

    def scored(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Rendering:
        """Render messages for a model that learns or scores the last one, keeping its thought. Raises DataFault."""
        kept = [False] * (len(messages) - 1) + [True]
        return self.whole(messages, kept, tools)

    def whole(
        self, messages: Sequence[Message], kept: Sequence[bool], tools: Sequence[Mapping[str, Any]] | None
    ) -> Rendering:
        """Render messages, bypassing the template for the last thought if it drops that. Raises DataFault."""
        try:
            return self.render(messages, opens=False, kept=kept, tools=tools)[0]
        except DataFault:
            past = self._verbatim(messages, tools, kept)
            if past is None:
                raise
            return past

    def _require(
        self,
        rendering: Rendering,
        messages: Sequence[Message],
        kept: Sequence[bool],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[Text]:
        """Raises DataFault if the rendering lacks a text; return the thoughts that it may lack."""
        cut = []
        for text in rendering.lost:
            if not kept[text.message] and self._cuts(text.what):
                cut.append(text)
                continue
            is_thought = text.what in THOUGHT_KEYS or text.what.endswith("thought")
            hint = "use a template that writes it, or remove it from the data"
            if is_thought and kept[text.message] and text.message < len(messages) - 1:
                hint = f"{hint}; with learned_turns: last, earlier thoughts need not be written"
            detail = f"{text.what} of {_place(messages, text.message)}, {shown(text.text)}, is not in what it writes"
            raise DataFault("the chat template drops a text", detail, hint)
        for index, message in enumerate(messages):
            if lost := next((number for number in message.numbers if number not in rendering.text), None):
                detail = f"{lost} in a tool call of {_place(messages, index)} is not in what it writes"
                raise DataFault("the chat template drops a text", detail, "use a template that writes tool calls")
        self._require_tools(rendering, messages, tools)
        return cut

    def _require_tools(
        self, rendering: Rendering, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Raises DataFault if the rendering lacks an offered function. A call does not describe it; a system message
        may."""
        described = " ".join(message.text for message in messages if message.role in ("system", "developer"))
        for name in tool_names(tools or ()):
            if name not in (rendering.text if self.reads_tools else described):
                hint = "use a template that writes tools, or remove the column"
                raise DataFault("the chat template drops the column `tools`", f"{name!r} is not in it", hint)

    def require_no_control(self, messages: Sequence[Message], field: str, *, is_text: bool) -> None:
        """Raises DataFault if a message contains a control token of the template, such as `<|im_end|>`."""
        for index, message in enumerate(messages):
            for _, text in named_texts(message):
                token = next((token for token in self._control_tokens() if token in text), None)
                if token is not None:
                    hint = "remove it: the policy would take it for the end or the start of a message"
                    if is_text:
                        hint = f"leave {self._key} out if the prompt is already rendered, or remove it"
                    detail = f"{_place(messages, index)} has {token!r}: {shown(text)}"
                    raise DataFault(f"`{field}` has a control token of the model", detail, hint)

    def require_opening(self, messages: Sequence[Message], rendering: Rendering) -> None:
        """Raises DataFault if the prompt does not open the assistant's turn."""
        mark = "\ue000\ue001"
        try:
            closed = self._text(messages, rendering.form, opens=False)
            answered = self._text([*messages, Message(ASSISTANT, (mark,))], rendering.form, opens=False)
        except DataFault:
            return  # a template for single prompts
        head = answered.partition(mark)[0]
        if closed == rendering.text and head.startswith(closed) and head.removeprefix(closed).strip():
            detail = (
                f"it ends with {shown(rendering.text[-40:])}; an answer would start after {shown(head[len(closed) :])}"
            )
            hint = "use a template that reads `add_generation_prompt`"
            raise DataFault("the chat template does not open the assistant's turn", detail, hint)

    def end_of_turn(
        self, rendering: Rendering, messages: Sequence[Message], index: int, start: int
    ) -> tuple[int, bool]:
        """Return where the turn of message `index` ends, and whether an end-of-sequence token ends it.

        It ends with the first end-of-sequence token after its last text, else with the first special token, else with
        its last character before the next message.
        """
        text, begin = rendering.text, max(rendering.end_of(index) or start, start)
        following = (t for t in rendering.texts if t.message > index and t.end is not None)
        bound = next((t.end - len(t.text.strip()) for t in following if t.end is not None and t.end > begin), len(text))
        if (end := _after_first(self.ends, text, begin, bound)) is not None:
            return end, True
        before = text if index == len(messages) - 1 else self._text(messages[: index + 1], rendering.form, opens=False)
        if text.startswith(before):
            bound = max(len(before), begin)
        end = _after_first(self._specials, text, begin, bound)
        return (max(len(text[:bound].rstrip()), begin) if end is None else end), False

    def opened(self, messages: Sequence[Message], form: MessageForm, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render the messages and the start of the assistant's turn."""
        return self._text(messages, form, opens=True, tools=tools)

    def _verbatim(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kept: Sequence[bool]
    ) -> Rendering | None:
        """Render with the last message's thought and content bypassing a template that drops thoughts: between
        `<think>` tags, as the policy writes them.

        None without such a thought, if the template writes its own thought, or if another text is lost.
        """
        last = messages[-1]
        before, _, answer = last.text.rpartition("</think>")
        thought = last.thought.strip() or before.strip().removeprefix("<think>").strip()
        if "</think>" not in self.source or not thought or THINK.search(thought) or (last.thought.strip() and before):
            return None
        form = next(_forms(messages))
        text = f"<think>\n{thought}\n</think>\n\n{answer.lstrip()}"
        whole = [*messages[:-1], dataclasses.replace(last, content=(text,), thought="")]
        bare = [*messages[:-1], dataclasses.replace(last, content=(_STAND_IN,), thought="")]
        try:
            head = self._text(bare, form, opens=False, tools=tools).partition(_STAND_IN)[0]
            rendering = self._render(whole, form, False, tools, past=True)
            self._require(rendering, whole, kept, tools)
        except DataFault:
            return None
        return None if head.rstrip().endswith(("<think>", "</think>")) else rendering

    def _cuts(self, what: str) -> bool:
        """Whether the template reads, and so may drop, thoughts of this kind."""
        if what in THOUGHT_KEYS:
            return any(key in self._names for key in THOUGHT_KEYS)
        return what.endswith("thought") and "</think>" in self.source

    def _control_tokens(self) -> tuple[str, ...]:
        """Return special tokens that the template writes, and begin and end tokens; not tags such as `<think>`, which
        texts may mention."""
        if self._control is None:
            try:
                written = self._text([Message("user", ("a",))], MessageForm(parts=False), opens=True)
            except DataFault:
                written = ""
            ends = {*self.ends, str(self._tokenizer.bos_token or ""), str(self._tokenizer.eos_token or "")}
            others = (token for token in self._specials if token in written and not _TAG.fullmatch(token))
            self._control = tuple(token for token in dict.fromkeys([*ends, *others]) if token.strip())
        return self._control

    def _render(
        self,
        messages: Sequence[Message],
        form: MessageForm,
        opens: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        past: bool = False,
    ) -> Rendering:
        text = self._text(messages, form, opens=opens, tools=tools, past=past)
        plain = [(index, what, part) for index, message in enumerate(messages) for what, part in named_texts(message)]
        literal = _LITERAL if form.parts else _NONE if form.none_for_empty else None
        if literal and len(literal.findall(text)) > sum(len(literal.findall(part)) for _, _, part in plain):
            return Rendering(text, tuple(Text(*piece, None) for piece in plain), form)
        try:
            marked = self._text(marked_messages(messages), form, opens=opens, tools=tools, past=past)
        except DataFault:  # it reads what the texts say
            marked = text
        return Rendering(text, tuple(located_texts(plain, text, marked)), form)

    def _text(
        self,
        messages: Sequence[Message],
        form: MessageForm,
        *,
        opens: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        past: bool = False,
    ) -> str:
        """`past`: the last message's content bypasses the template."""
        written = [
            message.written(
                parts=form.parts,
                arguments_as_text=form.arguments_as_text,
                none_for_empty=form.none_for_empty,
                thought_key=self._thought_key(message.thought_key),
            )
            for message in messages
        ]
        if past:
            written[-1]["content"] = [{"type": "text", "text": _STAND_IN}] if form.parts else _STAND_IN
        given = {} if tools is None else {"tools": list(tools)}
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    written, tokenize=False, add_generation_prompt=opens, **given, **self._kwargs
                )
            )
        except Exception as error:  # a template is a program by the model's author, and may raise any error
            hint = f"correct the messages, or leave {self._key} out if the model has no template"
            raise DataFault("the chat template fails", f"{type(error).__name__}: {error}", hint) from error
        return text.replace(_STAND_IN, messages[-1].text) if past else text

    def _thought_key(self, own: str) -> str:
        """The key under which the template reads thoughts, if it reads any."""
        return own if own in self._names else next((key for key in THOUGHT_KEYS if key in self._names), own)


def kwargs_problems(field: str, tokenizer: Any, kwargs: Mapping[str, Any]) -> list[Problem]:
    """Report arguments that the chat template never reads, at `field` of the spec."""
    if not kwargs:
        return []
    import jinja2.meta
    from jinja2 import nodes

    try:
        tree = _tree(str(tokenizer.get_chat_template()))
    except Exception:  # there is no template, or it is broken: rendering says so
        return []
    asked = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"} - asked
    own |= {"raise_exception", "strftime_now", "namespace", "range", *RESERVED_KWARGS}
    undeclared = jinja2.meta.find_undeclared_variables(tree)
    read = sorted(name for name in undeclared - own if not name.endswith("_token"))
    return [
        Problem(
            f"{field}.{name}",
            f"{shown(value)}, but the chat template never reads {name!r}",
            f"{nearest(name, read)}It reads {', '.join(read) or 'no further arguments'}",
        )
        for name, value in kwargs.items()
        if name not in read
    ]


def _tree(source: str) -> Any:
    """Parse a template. Raises jinja2.TemplateSyntaxError."""
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION_TAGS.sub("", source))


def _names_read(source: str) -> frozenset[str]:
    """Return the names that a template looks up: `thinking` of `message.thinking`."""
    from jinja2 import nodes

    tree = _tree(source)
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    items = {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return frozenset(map(str, attributes | items))


def _forms(messages: Sequence[Message]) -> Iterator[MessageForm]:
    """Yield the forms to try: parts first where the data has several, arguments as mappings first."""
    parts = any(len(message.content) > 1 for message in messages)
    calls = any(message.calls for message in messages)
    for none_for_empty, as_text in product((False, True), repeat=2) if calls else ((False, False),):
        yield MessageForm(parts, as_text, none_for_empty)
        yield MessageForm(not parts, as_text, none_for_empty)


def _place(messages: Sequence[Message], index: int) -> str:
    return f"message {index + 1} ({messages[index].role})"


def _after_first(tokens: Sequence[str], text: str, start: int, end: int) -> int | None:
    """Return the position after the first of some tokens in text[start:end], or None."""
    found = [(at, at + len(token)) for token in tokens if (at := text.find(token, start, end)) >= 0]
    return min(found)[1] if found else None
