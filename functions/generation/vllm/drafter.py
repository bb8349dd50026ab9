"""Drafters for vLLM's `custom_class`, which draft suffixes of prompts and responses (`suffixes`).

`DraftingPasses` calls them after each iteration with the requests of the batch, whose state is in the model runner.
Finished responses are kept for their siblings; responses of earlier steps arrive with a request
(`SampleRequest.earlier`), from the run's record (rlhfless.orchestrator.prompt_selection). The index is not part of
that record: the engine's process reads and extends it, and the driver receives tokens only when a response ends.

vLLM's own n-grams are not used on CPUs: they are compiled by numba, whose threads wait for each other on a busy
core.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from rlhfless.functions.generation.suffixes import Pace, PromptSuffixes
from rlhfless.functions.generation.vllm.rng_resume import DRAWN, EARLIER, unpacked

MOST_INDEXED_TOKENS = 1 << 20
"""Tokens indexed per worker over all prompts, at some 150 bytes each; least recently used prompts are dropped first."""


@dataclass(slots=True)
class _Drafting:
    """The drafting state of one request."""

    prompt: tuple[int, ...]
    index: Hashable
    """The key of its suffixes."""
    pace: Pace


class SuffixDrafter:
    """One worker's drafts, from all responses to a prompt."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._suffixes: OrderedDict[Hashable, PromptSuffixes] = OrderedDict()
        self._requests: dict[str, _Drafting] = {}
        self.runner: Any = None
        """The model runner, set by `DraftingPasses` because vLLM does not pass it."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: vLLM calls this, but there is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return no drafts: vLLM calls this, but drafts come from `drafts`."""
        return [[] for _ in sampled_token_ids]

    def drafts(self, ids: list[str], sampled: list[list[int]], limit: int) -> list[list[int]]:
        """Return at most `limit` drafts per request for the tokens after those just sampled.

        A request without new tokens is in the middle of its prefill.
        """
        lengths = self.runner.input_batch.num_tokens_no_spec
        return [
            self._draft(name, min(limit, self._longest - int(lengths[row]) - 1)) if sampled[row] else []
            for row, name in enumerate(ids)
        ]

    def saw(self, verified: Iterable[tuple[str, int, int]]) -> None:
        """Record the requests that had drafts in a pass, as (name, drafts, accepted drafts)."""
        for name, drafted, accepted in verified:
            if name in self._requests:
                self._requests[name].pace.saw(drafted, accepted)

    def end(self, names: Iterable[str]) -> None:
        """End requests that are still in the runner; their tokens stay indexed."""
        for name in names:
            if name in self.runner.requests:
                self._read(name)
            self._requests.pop(name, None)

    def _draft(self, name: str, most: int) -> list[int]:
        if most < 1:
            return []
        request, suffixes = self._read(name)
        depth = min(request.pace.next(), most)
        return suffixes.draft(name, depth) if depth else []

    def _read(self, name: str) -> tuple[_Drafting, PromptSuffixes]:
        """Return the request and its suffixes, updated with all generated tokens."""
        state = self.runner.requests[name]
        request = self._requests.get(name) or self._begin(name, state)
        suffixes = self._of(request)
        suffixes.add(name, _after(state, len(request.prompt), suffixes.length(name)))
        return request, suffixes

    def _begin(self, name: str, state: Any) -> _Drafting:
        extra = state.sampling_params.extra_args or {}
        prompt = tuple(state.prompt_token_ids[: len(state.prompt_token_ids) - extra.get(DRAWN, (0,))[0]])
        request = _Drafting(prompt, self._index_of(name, prompt), Pace(self._most))
        suffixes = self._of(request)
        for response in extra.get(EARLIER, ()):
            if not suffixes.length(response):
                suffixes.add(response, unpacked(response))
        self._requests[name] = request
        return request

    def _of(self, request: _Drafting) -> PromptSuffixes:
        suffixes = self._suffixes.get(request.index)
        if suffixes is None:
            suffixes = self._suffixes[request.index] = PromptSuffixes(request.prompt)
            tokens = sum(each.tokens for each in self._suffixes.values())
            while len(self._suffixes) > 1 and tokens > MOST_INDEXED_TOKENS:
                tokens -= self._suffixes.popitem(last=False)[1].tokens
        self._suffixes.move_to_end(request.index)
        return suffixes

    def _index_of(self, name: str, prompt: tuple[int, ...]) -> Hashable:  # noqa: ARG002
        return prompt


class NgramDrafter(SuffixDrafter):
    """Drafts only from a response's own prompt and earlier part."""

    def _index_of(self, name: str, prompt: tuple[int, ...]) -> Hashable:  # noqa: ARG002
        return name

    def end(self, names: Iterable[str]) -> None:
        """End requests and forget their tokens."""
        for name in names:
            self._requests.pop(name, None)
            self._suffixes.pop(name, None)


def _after(state: Any, prompt_tokens: int, known: int) -> list[int]:
    """Return the tokens of a response after the first `known`; some may come from an earlier engine."""
    brought = len(state.prompt_token_ids) - prompt_tokens
    return [*state.prompt_token_ids[prompt_tokens + known :], *state.output_token_ids[max(known - brought, 0) :]]
