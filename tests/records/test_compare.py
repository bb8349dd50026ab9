"""Which samples of two traces are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfless.records import FinishReason
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, TracedRollout, TraceMeta, compare_samples

META = TraceMeta("run", 1, {}, {}, {})


def row(step: int, sample: int, *tokens: int) -> TracedRollout:
    reason = FinishReason.STOP
    return TracedRollout(step, "p", sample, 1, 4, len(tokens), 0, 0.0, {}, {}, reason, (), "a", 0.0, 1.0, tokens, None)


def trace(*rows: TracedRollout) -> Trace:
    return Trace(META, rollouts=rows)


def test_samples_are_compared_by_name_and_the_first_difference_is_named() -> None:
    result = compare_samples(
        trace(row(1, 0, 5, 6), row(2, 1, 7), row(2, 0, 7), row(3, 0, 1)),
        trace(row(2, 0, 8), row(2, 1, 9), row(1, 0, 5, 6), row(9, 0, 1), row(9, 1, 1)),
    )
    assert (result.compared, result.identical, result.fraction) == (3, 1, 1 / 3)
    assert result.first_difference == (2, "p", 0)
    assert (result.only_in_first, result.only_in_second) == (1, 2)


def test_a_trace_without_tokens_is_refused() -> None:
    with pytest.raises(TraceError, match=r"no token ids; record it with logging\.record_tokens"):
        compare_samples(trace(replace(row(1, 0, 1), token_ids=None)), trace())
    assert compare_samples(trace(), trace()).fraction == 1
