"""How far a run computed each prompt token once, from its trace. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhfless.records import Work
from rlhfless.records.ledger import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.records.traces import Trace

_COMPUTED, _UNIQUE = f"{PROMPT_TOKENS_COMPUTED}/", f"{PROMPT_TOKENS_UNIQUE}/"
_WHOLE_PASSES = (Work.LOGPROBS, Work.LEARN)
"""Calls that compute nothing but tokens of a batch, so that their time is in proportion to these."""


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Of all functions and steps of a run."""

    computed_tokens: float
    unique_tokens: float
    saved: float
    """Part of the steps' time that was saved in reference and learner, if that time is in proportion to their tokens.
    The time that an engine's prefix cache saves is not in the trace, and not in here."""
    evicted_tokens: int = 0
    """Of the computed tokens, those that engines had had in their caches."""

    @property
    def once(self) -> float:
        """Part of the computed prompt tokens that had to be computed: 1 if each was computed once."""
        return min(self.unique_tokens / self.computed_tokens, 1.0) if self.computed_tokens else 1.0


def prompt_reuse(trace: Trace, wall_s: float) -> PromptReuse | None:
    """`wall_s` is the time of all steps. None if the trace has no such figures."""
    values = [(name, value) for record in trace.steps for name, value in record.metrics.items()]
    computed = math.fsum(value for name, value in values if name.startswith(_COMPUTED))
    unique = math.fsum(value for name, value in values if name.startswith(_UNIQUE))
    if not computed:
        return None
    evicted = sum(call.evicted_tokens for call in trace.invocations)
    saved_s = math.fsum(
        call.duration_s * call.cached_tokens / (call.input_tokens - call.cached_tokens)
        for call in trace.invocations
        if call.work in _WHOLE_PASSES and call.input_tokens > call.cached_tokens
    )
    return PromptReuse(computed, unique, saved_s / (saved_s + wall_s), evicted)
