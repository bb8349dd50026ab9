"""Find the learned parts of a conversation: the assistant's turns, from where the policy starts to where it ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rlhfless.chat.encoding import Encoder
from rlhfless.chat.messages import ASSISTANT, DataFault, Message, tools_of
from rlhfless.chat.template import ChatTemplate, Rendering
from rlhfless.spec.explain import shown

_OPENED_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")
"""Some templates add this to the start of the assistant's turn, and drop it once it is answered."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A sequence and its learned positions [start, end)."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LearnedTurns:
    """A rendered conversation and the learned parts [start, end) of its text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ended: bool
    """Whether the last turn ends with an end-of-sequence token."""

    def encoded(self, encoder: Encoder, prompt_ids: Sequence[int], prompt: str, end: int) -> Learned:
        """Encode up to the end of the last turn, adding `end` if no end token ends it. `prompt_ids`: tokens of the text
        `prompt`, as the policy reads it."""
        start = self.spans[0][0]
        head = self.text[:start]
        ids = list(prompt_ids) if head == prompt else encoder.prompts([head])[0]
        cuts = sorted({position for span in self.spans for position in span})
        pieces = encoder.continued(ids, head, [self.text[a:b] for a, b in pairwise(cuts)])
        spans = []
        learned = dict(self.spans)
        for position, piece in zip(cuts, pieces, strict=False):
            if position in learned:
                spans.append((len(ids), len(ids) + len(piece)))
            ids += piece
        if not self.ended:
            ids.append(end)
            spans[-1] = (spans[-1][0], len(ids))
        return Learned(tuple(ids), tuple(spans))


def learned_of_texts(
    encoder: Encoder, prompt_ids: Sequence[int], prompt: str, response: str, ends: Sequence[int]
) -> Learned:
    """Encode prompt and response without a template; the response and one end token are learned (the first of `ends` if
    it has none). Raises DataFault if it contains an end token earlier."""
    (ids,) = encoder.continued(prompt_ids, prompt, [response])
    if any(token in ends for token in ids[:-1]):
        what = f"got {shown(response)}"
        hint = "remove it, or what follows it: a policy ends there"
        raise DataFault("a response has an end-of-sequence token before its end", what, hint)
    if not ids or ids[-1] not in ends:
        ids.append(ends[0])
    first = len(prompt_ids)
    return Learned((*prompt_ids, *ids), ((first, first + len(ids)),))


def learned_turns(
    template: ChatTemplate,
    prompt: Sequence[Message],
    response: Sequence[Message],
    first: int,
    row: Mapping[str, Any],
    prompt_text: str,
) -> LearnedTurns:
    """Render prompt and response; the assistant's messages from `first` on are learned. Raises DataFault if the
    template drops one of their texts, or any other text."""
    messages, tools = [*prompt, *response], tools_of(row)
    kept = [index >= first and each.role == ASSISTANT and each.learned for index, each in enumerate(messages)]
    if not any(kept):
        raise DataFault("no message is learned", "all have `weight: 0`", "remove these rows")
    rendering = template.whole(messages, kept, tools)
    spans, ended = [], True
    for index in (index for index, learned in enumerate(kept) if learned):
        opened = prompt_text if index == len(prompt) else template.opened(messages[:index], rendering.form, tools)
        if index == len(messages) - 1:
            rendering = _with_closed_thought(rendering, opened, messages[-1], index)
        start = _start(rendering, opened, is_last=index == len(messages) - 1)
        end, ended = template.end_of_turn(rendering, messages, index, start)
        own = [text for text in rendering.texts if text.message == index and text.end is not None]
        if end <= start or any(not start < (text.end or 0) <= end for text in own):
            what = f"message {index + 1} is not within {shown(rendering.text[start:end])}"
            raise DataFault("the chat template writes an answer outside of its turn", what, "use another template")
        spans.append((start, end))
    return LearnedTurns(rendering.text, tuple(spans), ended)


def _with_closed_thought(rendering: Rendering, opened: str, answer: Message, index: int) -> Rendering:
    """Restore the empty thought with which the template opens the last turn and which it drops once it is answered.

    Unchanged where it is there, or where the answer has its own thought.
    """
    without = _OPENED_THOUGHT.sub("", opened)
    added = opened[len(without) :]
    thinks = bool(answer.thought.strip()) or "</think>" in answer.text
    if thinks or not added.rstrip().endswith("</think>") or rendering.text.startswith(opened):
        return rendering
    if not rendering.text.startswith(without):
        return rendering
    moved = (
        replace(text, end=text.end + len(added)) if text.message == index and text.end is not None else text
        for text in rendering.texts
    )
    return replace(rendering, text=opened + rendering.text[len(without) :], texts=tuple(moved))


def _start(rendering: Rendering, opened: str, *, is_last: bool) -> int:
    """Return where the assistant's turn, which the template has `opened`, starts. Raises DataFault."""
    if rendering.text.startswith(opened):
        return len(opened)
    without = _OPENED_THOUGHT.sub("", opened)
    if without != opened and rendering.text.startswith(without):
        if not is_last:  # that the template leaves it out of earlier turns is how it writes them
            return len(without)
        what = f"the prompt ends with {shown(opened[len(without) :])}"
        if opened.rstrip().endswith("</think>"):
            hint = "remove the thought, or set chat_template_kwargs so that the template does not end it"
            raise DataFault("the chat template ends the thought, and the response has one", what, hint)
        hint = "give the thought as `reasoning_content`, or set chat_template_kwargs so that the template opens none"
        raise DataFault("the chat template opens a thought, and the response has none", what, hint)
    hint = "give prompt and response as the model is to read them, without chat_template"
    what = "the chat template writes the prompt otherwise once it is answered"
    raise DataFault(what, f"got {shown(rendering.text)}", hint)
