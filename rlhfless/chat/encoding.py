"""Encode texts as token ids, with one beginning and without an end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any


class Encoder:
    """Encode prompts and their continuations with a transformers tokenizer.

    `templated`: a chat template has already written the special tokens.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Sequence[int], *, templated: bool) -> None:
        self._tokenizer = tokenizer
        self._ends = {*end_token_ids, tokenizer.eos_token_id} - {None}
        before, after = self._added()
        self._templated = templated
        self._before, self._after = ([], []) if templated else (before, after)
        self.begins = tokenizer.bos_token_id is not None and before[:1] == [tokenizer.bos_token_id]
        """Whether the tokenizer begins each text with its begin-of-sequence token."""

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each prompt, with one beginning and without an end that the tokenizer adds."""
        return [self._with_added(ids) for ids in self._encoded(list(texts))]

    def scored(self, text: str) -> list[int]:
        """Return the tokens of a text as a reward model reads it: with all that the tokenizer adds, and one
        beginning."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=not self._templated, verbose=False)["input_ids"]
        begin = self._tokenizer.bos_token_id
        return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids

    def fault(self, ids: Sequence[int]) -> str:
        """Say what is wrong with a prompt's special tokens; empty if nothing."""
        begin = self._tokenizer.bos_token_id
        if begin is not None and list(ids[:2]) == [begin, begin]:
            return f"it starts with {self._tokenizer.bos_token!r} twice"
        if ids and ids[-1] in self._ends and not (len(ids) == 1 and ids[0] == begin):
            end = self._tokenizer.convert_ids_to_tokens(ids[-1])
            return f"it ends with the end-of-sequence token {end!r}, after which the policy has nothing to say"
        return ""

    def continued(self, ids: Sequence[int], text: str, following: Sequence[str]) -> list[list[int]]:
        """Return the tokens of successive texts after a prompt with the text `text` and the tokens `ids`.

        They are those of the whole text where its tokens do not cross texts, so a tokenizer that begins texts with a
        space does so once; else each text is encoded alone, as it is generated.
        """
        parts, known = [], list(ids)
        texts = list(accumulate(following, initial=text))[1:]
        for each, whole in zip(following, map(self._with_added, self._encoded(texts)), strict=True):
            if known and whole[: len(known)] == known and len(whole) > len(known):
                parts.append(whole[len(known) :])
            else:
                parts.append(self._encoded([each])[0])
            known = [*known, *parts[-1]]
        return parts

    def _with_added(self, ids: list[int]) -> list[int]:
        before = self._before
        if before and ids and before[-1] == ids[0] == self._tokenizer.bos_token_id:
            before = before[:-1]
        return [*before, *ids, *self._after]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # `verbose=False`: prompts that are too long get our own message.
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _added(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after a text, without end-of-sequence tokens."""
        plain = self._encoded(["a"])[0]
        whole: list[int] = self._tokenizer("a", verbose=False)["input_ids"]
        at = next((i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain), 0)
        after = whole[at + len(plain) :] if plain else []
        return whole[:at] if plain else whole, [token for token in after if token not in self._ends]
