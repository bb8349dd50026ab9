"""The passes of a speculating model runner: how deep each drafts, its cost, and its outcome.

A pass without drafts to verify takes the runner's plain path, as in an engine that does not speculate; vLLM would
otherwise prepare and verify zero drafts, which takes a third of a small model's pass. On CPUs, speculation therefore
costs nothing while nothing is drafted. On GPUs it always costs asynchronous scheduling and a noise kernel per
sequence, because it uses vLLM's older runner there; a run with many sequences per actor is refused
(`planning.resolve`). Models with recurrent layers never take the plain path: their states must account for missing
drafts.

Our drafter is called after a pass, and not by vLLM. vLLM calls a draft model, for as many drafts as the next pass
verifies; even for zero drafts it reads the generated tokens.

Not for vLLM's newer runner or asynchronous scheduling: there the scheduler knows the depth, and the worker does not.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

from rlhfless.functions.generation.draft_depth import DraftDepth
from rlhfless.functions.generation.vllm.drafter import SuffixDrafter

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
