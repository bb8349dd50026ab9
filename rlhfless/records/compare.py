"""Compares the samples of two traces, which seeds make equal whatever the fleet did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, TracedRollout

Key = tuple[int, str, int]
"""(step, prompt id, sample index)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples of two runs, compared by their key."""

    compared: int
    """Number of samples that both runs have."""
    identical: int
    """Number of samples with the same tokens."""
    first_difference: Key | None
    """The first of the samples that differ."""
    only_in_first: int
    only_in_second: int

    @property
    def fraction(self) -> float:
        """Share of the compared samples that are token-identical; 1 if none were compared."""
        return self.identical / self.compared if self.compared else 1.0


def compare_samples(first: Trace, second: Trace) -> Comparison:
    """Compare all samples that both traces hold. Raises TraceError for a trace without token ids."""
    samples, others = _by_key(first), _by_key(second)
    common = sorted(samples.keys() & others.keys())
    different = [key for key in common if samples[key].token_ids != others[key].token_ids]
    return Comparison(
        compared=len(common),
        identical=len(common) - len(different),
        first_difference=next(iter(different), None),
        only_in_first=len(samples.keys() - others.keys()),
        only_in_second=len(others.keys() - samples.keys()),
    )


def _by_key(trace: Trace) -> Mapping[Key, TracedRollout]:
    if any(rollout.token_ids is None for rollout in trace.rollouts):
        raise TraceError(f"the trace of {trace.meta.run_id} has no token ids; record it with logging.record_tokens")
    return {(rollout.step, rollout.prompt_id, rollout.sample_index): rollout for rollout in trace.rollouts}
