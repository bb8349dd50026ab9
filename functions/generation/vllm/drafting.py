"""Drafts of a speculating model runner: where they come from, how deep each pass drafts, its cost, and its outcome.

`SuffixDrafter` and `NgramDrafter`, for vLLM's `custom_class`, draft suffixes of prompts and responses (`drafts`).
Finished responses are kept for their siblings; responses of earlier steps arrive with a request
(`SampleRequest.earlier`), from the run's record (rlhfless.orchestrator.prompt_selection). The index is not part of
that record: the engine's process reads and extends it, and the driver receives tokens only when a response ends.
vLLM's own n-grams are not used on CPUs: they are compiled by numba, whose threads wait for each other on a busy core.

`DraftingPasses` calls our drafter after each pass. vLLM calls a draft model, for as many drafts as the next pass
verifies; even for zero drafts it reads the generated tokens. A pass without drafts to verify takes the runner's plain
path, as in an engine that does not speculate; vLLM would otherwise prepare and verify zero drafts, which takes a third
of a small model's pass. On CPUs, speculation therefore costs nothing while nothing is drafted. On GPUs it always costs
asynchronous scheduling and a noise kernel per sequence, because it uses vLLM's older runner there; a run with many
sequences per actor is refused (`planning.resolve`). Models with recurrent layers never take the plain path: their
states must account for missing drafts.

Not for vLLM's newer runner or asynchronous scheduling: there the scheduler knows the depth, and the worker does not.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.config import VllmConfig

from rlhfless.functions.generation.drafts import DraftDepth, Pace, PromptSuffixes
from rlhfless.functions.generation.vllm.verification import DRAWN, EARLIER, unpacked

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


_Verified: TypeAlias = list[tuple[str, int, int]]
"""Requests that had drafts in a pass, as (name, drafts, accepted drafts)."""


class DraftingPasses:
    """Wraps a worker's model runner."""

    def __init__(self, runner: Any, *, measured: bool) -> None:
        """`measured`: choose the draft depth from measurements instead of always using the maximum."""
        self._runner = runner
        self._drafter: SuffixDrafter | None = runner.drafter if isinstance(runner.drafter, SuffixDrafter) else None
        self._config = runner.speculative_config
        self._limit: int = self._config.num_speculative_tokens
        self._depth = DraftDepth(self._limit) if measured else None
        self._before: tuple[list[str], int, float] = [], 0, 0.0
        """Previous pass: its requests, draft depth, and end time."""
        self._rests, self._width = 0, 0
        """Passes to leave unobserved, and the bit length of the batch size for which this holds."""
        self._can_be_plain = self._drafter is not None and not runner.model_config.is_hybrid
        self._scheduled: Any = None
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        self._propose = runner.propose_draft_token_ids
        if self._drafter is not None:
            self._drafter.runner = runner
        else:
            runner.propose_draft_token_ids = self.propose_draft_token_ids
        self._began_s = self._draft_s = self._verify_s = 0.0

    def times(self) -> tuple[float, float]:
        """Return the seconds of drafting and of passes that verified drafts, since the last call."""
        times, self._draft_s, self._verify_s = (self._draft_s, self._verify_s), 0.0, 0.0
        return times

    def execute_model(self, scheduled: Any, *rest: Any) -> Any:
        """Replace the runner's first half of a pass."""
        self._scheduled = scheduled
        if self._drafter is None:
            scheduled.num_spec_tokens_to_schedule = self._limit
        elif scheduled.finished_req_ids:
            self._drafter.end(scheduled.finished_req_ids)
        verifies = scheduled.scheduled_spec_decode_tokens
        if verifies:
            self._began_s = time.perf_counter()
        if self._can_be_plain:
            self._runner.speculative_config = self._config if verifies else None
        return self._execute(scheduled, *rest)

    def sample_tokens(self, *arguments: Any) -> Any:
        """Replace the runner's second half of a pass, which also drafts for the next pass."""
        drafting_s = -self._draft_s
        output = self._sample(*arguments)
        drafting_s += self._draft_s
        ids, sampled = output.req_ids, output.sampled_token_ids
        if self._rests and len(ids).bit_length() == self._width:
            self._rests -= 1
            return output
        verified = [
            (name, len(drafts), len(sampled[output.req_id_to_index[name]]) - 1)
            for name, drafts in self._scheduled.scheduled_spec_decode_tokens.items()
        ]
        if verified:
            self._verify_s += time.perf_counter() - self._began_s - drafting_s
        if self._depth is not None:
            self._measure(self._depth, ids, all(sampled), verified)
        if self._drafter is not None:
            began_s = time.perf_counter()
            self._draft(self._drafter, ids, sampled, verified)
            self._draft_s += time.perf_counter() - began_s
        return output

    def propose_draft_token_ids(self, *arguments: Any) -> Any:
        """Replace the runner's method, which calls a draft model in the second half of a pass."""
        began_s = time.perf_counter()
        drafts = self._propose(*arguments)
        self._draft_s += time.perf_counter() - began_s
        return drafts

    def _measure(self, depth: DraftDepth, ids: list[str], whole: bool, verified: _Verified) -> None:
        """Measure the pass if it has the same requests and depth as the previous one.

        The engine was then not idle in between and computed no prompt.
        """
        limit, now_s = self._limit, time.perf_counter()
        before, before_limit, began_s = self._before
        self._before = ids, limit, now_s
        if whole and before == ids and before_limit == limit:
            depth.saw(len(ids), now_s - began_s, limit, sum(kept for *_, kept in verified))
        self._limit, self._rests = depth.next(len(ids))
        if self._rests:
            self._before, self._width = ([], 0, 0.0), len(ids).bit_length()

    def _draft(self, drafter: SuffixDrafter, ids: list[str], sampled: list[list[int]], verified: _Verified) -> None:
        runner = self._runner
        drafter.saw(verified)
        drafts = drafter.drafts(ids, sampled, self._limit) if self._limit else []
        if verified or any(drafts):
            runner._draft_token_ids = drafts or [[]] * len(ids)
            runner._draft_token_req_ids = list(ids)
