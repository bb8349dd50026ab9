"""Our classes behind vLLM's `custom_class`: they draft suffixes of prompts and responses (`suffixes`).

vLLM asks it after each iteration, with rows of its batch. It finds the requests of the rows in the model runner, which
`StoreWorkerExtension` gives it, and their prompts in the requests. Responses that have ended stay for their siblings;
responses of earlier steps come with a request (`SampleRequest.earlier`).

vLLM's own n-grams are not used on CPUs: they are compiled by numba, whose threads wait for each other on a busy core.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from rlhfless.functions.generation.draft_worth import DraftWorth
from rlhfless.functions.generation.suffixes import Pace, PromptSuffixes
from rlhfless.functions.generation.vllm.generators import DRAWN, EARLIER

MOST_INDEXED_TOKENS = 1 << 20
"""Of all prompts in a worker, some 300 bytes each; the prompts that were asked for longest ago are forgotten first."""


@dataclass(slots=True)
class _Drafting:
    """One request."""

    prompt: tuple[int, ...]
    index: Hashable
    """The key of its suffixes."""
    pace: Pace
    drafted: int = 0
    """In the pass that is under way."""


class SuffixDrafter:
    """One worker's drafts, from all responses to a prompt."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self._depth: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._suffixes: OrderedDict[Hashable, PromptSuffixes] = OrderedDict()
        self._requests: dict[str, _Drafting] = {}
        self.runner: Any = None
        """The model runner; until it is known, nothing is drafted."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM asks for this: there is no model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,  # noqa: ARG002
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> list[list[int]]:
        """By row of the batch, drafts of what comes after the tokens that were just sampled. A row without new tokens
        is in the middle of its prefill."""
        if self.runner is None:
            return [[] for _ in sampled_token_ids]
        for request_id in self._requests.keys() - self.runner.requests.keys():
            self._end(self._requests.pop(request_id))
        ids = self.runner.input_batch.req_ids[: len(sampled_token_ids)]
        worth = self._is_worth_it(ids, sampled_token_ids)
        return [
            self._draft(ids[row], len(new), self._longest - int(num_tokens_no_spec[row]) if worth else 0) if new else []
            for row, new in enumerate(sampled_token_ids)
        ]

    def _is_worth_it(self, ids: list[str], sampled: list[list[int]]) -> bool:  # noqa: ARG002
        """Whether to draft in the next pass."""
        return True

    def _draft(self, request_id: str, new: int, room: int) -> list[int]:
        """`room`: tokens until the longest sequence; 0 for no drafts."""
        state = self.runner.requests[request_id]
        request = self._requests.get(request_id) or self._begin(request_id, state)
        if request.drafted:
            request.pace.saw(request.drafted, min(new - 1, request.drafted))
        suffixes = self._of(request)
        suffixes.add(request_id, _after(state, len(request.prompt), suffixes.length(request_id)))
        depth = min(request.pace.next(), room - 1) if room > 1 else 0
        draft = suffixes.draft(request_id, depth) if depth else []
        request.drafted = len(draft)
        return draft

    def _begin(self, request_id: str, state: Any) -> _Drafting:
        extra = state.sampling_params.extra_args or {}
        prompt = tuple(state.prompt_token_ids[: len(state.prompt_token_ids) - extra.get(DRAWN, (0,))[0]])
        request = _Drafting(prompt, self._index_of(request_id, prompt), Pace(self._depth))
        suffixes = self._of(request)
        for response in map(tuple, extra.get(EARLIER, ())):
            suffixes.add(response, response[suffixes.length(response) :])
        self._requests[request_id] = request
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

    def _index_of(self, request_id: str, prompt: tuple[int, ...]) -> Hashable:  # noqa: ARG002
        return prompt

    def _end(self, request: _Drafting) -> None:
        """A request is gone; what it drew stays."""


class MeasuringDrafter(SuffixDrafter):
    """Drafts where that has saved time in this worker."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._worth = DraftWorth()
        self._last: tuple[list[str], float] = [], 0.0
        """The requests of the pass before, and when it ended."""

    def _is_worth_it(self, ids: list[str], sampled: list[list[int]]) -> bool:
        """Only passes over the same requests as the one before are measured: the engine was not idle in between, and
        computed no prompt."""
        (before, began_s), now_s = self._last, time.perf_counter()
        self._last = list(ids), now_s
        if before == ids and all(sampled):
            drafted = any(self._requests[each].drafted for each in ids if each in self._requests)
            self._worth.saw(len(ids), sum(map(len, sampled)), now_s - began_s, drafted=drafted)
        return self._worth.next(len(ids))


class NgramDrafter(SuffixDrafter):
    """Drafts from a response's own prompt and earlier part alone."""

    def _index_of(self, request_id: str, prompt: tuple[int, ...]) -> Hashable:  # noqa: ARG002
        return request_id

    def _end(self, request: _Drafting) -> None:
        self._suffixes.pop(request.index, None)


def _after(state: Any, prompt_tokens: int, known: int) -> list[int]:
    """The tokens of a response but for the first `known`; an earlier engine may have drawn some of them."""
    brought = len(state.prompt_token_ids) - prompt_tokens
    return [*state.prompt_token_ids[prompt_tokens + known :], *state.output_token_ids[max(known - brought, 0) :]]
