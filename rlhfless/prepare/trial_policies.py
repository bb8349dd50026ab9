"""Policies with which `rlhfless environments test` plays: random calls, a script, or a model on the CPU."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfless.chat.messages import ToolCall
from rlhfless.environments.chat_format import Format, TemplateFormat
from rlhfless.environments.trajectory import GeneratedTurn
from rlhfless.records import FinishReason
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import shown
from rlhfless.util.text import parsed_json

_WORDS = ("", "a", "yes", "no", "héllo", "日本", "</tool_response>", "0")
_TEXT_TURNS = 0.05
"""Share of a random policy's turns without a call, and of calls with a wrong name."""


class _Writer:
    """Turns texts and calls into the tokens of a turn."""

    def __init__(self, tokenizer: Any, chat: Format) -> None:
        self._tokenizer = tokenizer
        self._chat = chat

    def generated(self, text: str, max_tokens: int) -> GeneratedTurn:
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        reason = FinishReason.STOP if len(ids) <= max_tokens else FinishReason.LENGTH
        return GeneratedTurn(tuple(ids[:max_tokens]), reason)

    def call(self, call: ToolCall) -> str:
        return self._chat.written_call(call) if isinstance(self._chat, TemplateFormat) else json.dumps(call.arguments)


class RandomPolicy(_Writer):
    """Calls tools with random arguments of the right types; without tools it says words that it has read, and
    numbers."""

    def __init__(self, tokenizer: Any, chat: Format, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tokenizer, chat)
        self._tools = [tool["function"] for tool in tools]

    async def generate(self, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> GeneratedTurn:
        rng = random.Random(seed)
        if not self._tools:
            read = self._tokenizer.decode(list(token_ids)[-200:], skip_special_tokens=True)
            words = re.findall(r"\w+", read) or ["a"]
            return self.generated(rng.choice([rng.choice(words), str(rng.randrange(101))]), max_tokens)
        if rng.random() < _TEXT_TURNS:
            return self.generated("I am done.", max_tokens)
        tool = rng.choice(self._tools)
        name = "no_such_tool" if rng.random() < _TEXT_TURNS else tool["name"]
        parameters = tool["parameters"]
        arguments = _value(rng, parameters, parameters.get("$defs", {}))
        return self.generated(self.call(ToolCall(name, arguments)), max_tokens)


def _value(rng: random.Random, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Return a random value of a JSON schema, as pydantic writes them."""
    if "$ref" in schema:
        return _value(rng, definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _value(rng, rng.choice(options), definitions)
    if "const" in schema or "enum" in schema:
        return schema.get("const", rng.choice(schema.get("enum", [None])))
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    match schema.get("type"):
        case "integer":
            return rng.randint(int(low), int(schema.get("maximum", schema.get("exclusiveMaximum", low + 101) - 1)))
        case "number":
            return round(rng.uniform(low, schema.get("maximum", low + 100)), 2)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            items = range(rng.randint(schema.get("minItems", 0), schema.get("maxItems", 3)))
            return [_value(rng, schema.get("items", {"type": "string"}), definitions) for _ in items]
        case "object":
            required = schema.get("required", [])
            given = [name for name in schema.get("properties", {}) if name in required or rng.random() < 0.5]
            return {name: _value(rng, schema["properties"][name], definitions) for name in given}
        case "null":
            return None
    return rng.choice(_WORDS)


class ScriptedPolicy(_Writer):
    """Plays the turns of one line of a script, and then ends."""

    def __init__(self, tokenizer: Any, chat: Format, turns: Sequence[Any]) -> None:
        super().__init__(tokenizer, chat)
        self._turns = iter(turns)

    async def generate(self, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> GeneratedTurn:  # noqa: ARG002
        turn = next(self._turns, "")
        parts = turn if isinstance(turn, list) else [turn]
        texts = [
            part if isinstance(part, str) else self.call(ToolCall(part["name"], part["arguments"])) for part in parts
        ]
        return self.generated("\n".join(texts), max_tokens)


def read_script(path: Path) -> list[list[Any]]:
    """Read a script: one episode per line, a JSON list of turns.

    A turn is a text as the model writes it, or a call `{"name": ..., "arguments": {...}}`, or a list of calls. Raises
    InputError.
    """
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        episodes = [parsed_json(line) for line in lines]
    except (OSError, ValueError) as error:
        raise _refused(str(error)) from error
    for number, turns in enumerate(episodes, start=1):
        each = [part for turn in turns for part in (turn if isinstance(turn, list) else [turn])] if turns else []
        if not isinstance(turns, list) or not all(isinstance(part, str) or _is_call(part) for part in each):
            raise _refused(f"line {number}: got {shown(turns)}")
    if not episodes:
        raise _refused("it is empty")
    return episodes


def _is_call(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("name"), str) and "arguments" in part


def _refused(what: str) -> InputError:
    hint = 'write one JSON list of turns per line: texts, or {"name": "guess", "arguments": {"number": 50}}'
    return InputError("the script cannot be used", [Problem("--policy", what, hint)])


class LocalModel:
    """Generates with transformers on the CPU: slow, for a few episodes."""

    def __init__(self, path: str, ends: frozenset[int]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        self._ends = sorted(ends)

    async def generate(self, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> GeneratedTurn:
        return await asyncio.to_thread(self._generate, list(token_ids), seed, max_tokens)

    def _generate(self, token_ids: list[int], seed: int, max_tokens: int) -> GeneratedTurn:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ids = torch.tensor([token_ids])
            whole = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_tokens,
                eos_token_id=self._ends,
                pad_token_id=self._ends[0],
            )
        new = whole[0, len(token_ids) :].tolist()
        return GeneratedTurn(
            tuple(new), FinishReason.STOP if new[-1:] and new[-1] in self._ends else FinishReason.LENGTH
        )
