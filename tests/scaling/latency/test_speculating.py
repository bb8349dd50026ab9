"""An engine model with drafts: by hand, and against published pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.engine_model import Speculating, decode_s, per_pass
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.policies.cost_aware.group_times import fit_iteration_times

ENGINE = LinearEngine(fixed_s=0.010, sequence_s=0.0005, context_s=2e-7, prefill_token_s=1e-5, prefill_context_s=0.0)
HALVES = (0.5, 0.25, 0.125)


def test_a_token_takes_its_part_of_a_pass() -> None:
    """Two places, with a draft each: 12 tokens of 4 sequences in .010 + 12 x .0005 s, of which each sequence keeps
    1.75, after 2 x .001 s for the drafts and .0005 s that it always loses."""
    engine = Speculating(ENGINE, (1, 1, 1), HALVES, depth=2, draft_s=0.001, standing_s=0.0005)
    assert engine.iteration_s(4) == pytest.approx((0.016 + 0.002 + 0.0005) / 1.75)
    assert engine.context_s == pytest.approx(2e-7 / 1.75)
    assert engine.prefill_s(100) == ENGINE.prefill_s(100)
    passes_s = 8 * (0.0185 + 2e-7 * (4000 + 4 * 1.75 * 7 / 2))
    assert decode_s(engine, 4, 4000, 14) == pytest.approx(passes_s, rel=1e-3)


def test_drafts_that_are_not_always_there_cost_less() -> None:
    engine = Speculating(ENGINE, (0.5, 0.25), (0.4, 0.2), depth=2)
    assert engine.iteration_s(8) == pytest.approx((0.010 + 14 * 0.0005) / 1.6)


def test_the_depth_follows_the_batch() -> None:
    """Of B sequences a place costs .0005 B: the first is worth it while that is below half of .010 + .0005 B, which is
    up to B = 20; the second, for a quarter of a token, while .0005 B < .25 (.010 + .001 B) / 1.5, which is up to 5."""
    engine = Speculating(ENGINE, (1, 1), HALVES[:2])
    assert [engine.depth_at(sequences) for sequences in (1, 4, 6, 19, 21, 256)] == [2, 2, 1, 1, 0, 0]
    for sequences in (1, 11, 256):
        fixed = [Speculating(ENGINE, (1, 1), HALVES[:2], depth).iteration_s(sequences) for depth in range(3)]
        assert engine.iteration_s(sequences) == min(fixed)


def test_the_depth_follows_the_context() -> None:
    """Of 100 sequences a place costs .05 s, the first of .06 s without context: not worth half a token. With 5,000
    tokens of context each, which take .1 s to read in any pass, the first is worth it: 1.5 tokens in .21 s against .16;
    the second is not: 1.75 in .26 s."""
    engines = [Speculating(ENGINE, (1, 1), HALVES[:2], context_tokens=tokens) for tokens in (0, 5000)]
    assert [engine.depth_at(100) for engine in engines] == [0, 1]
    assert [decode_s(engine, 100, 500_000, 1) for engine in engines] == pytest.approx([0.21 / 1.5] * 2)
    assert decode_s(engines[1], 100, 0, 1) == pytest.approx(0.06), "it chooses by the context that there is"
    planned_s = engines[1].iteration_s(100) + engines[1].context_s * 500_000
    assert planned_s == pytest.approx(0.21 / 1.5), "at the context that a plan is made for"


@given(
    st.integers(1, 256),
    st.integers(0, 20_000),
    st.integers(1, 300),
    st.lists(st.floats(0, 1), min_size=1, max_size=7).map(lambda shares: sorted(shares, reverse=True)),
    st.floats(0, 0.002),
)
def test_the_best_depth_is_never_worse_than_any(
    sequences: int, context: int, iterations: int, accepted: list[float], draft_s: float
) -> None:
    """Chosen anew whenever something happens, as the simulator does, it is the best for each iteration of the span but
    for what the context grows by in it."""
    auto = Speculating(ENGINE, (1,) * len(accepted), tuple(accepted), draft_s=draft_s)
    now_s, each = 0.0, np.zeros(len(auto.ways))
    for iteration in range(iterations):
        total = sequences * (context + iteration)
        now_s += decode_s(auto, sequences, total, 1)
        each += [decode_s(way, sequences, total, 1) for way in auto.ways]
    fixed_s = float(each.min())
    assert now_s <= fixed_s * (1 + 1e-9)
    at_once_s = decode_s(auto, sequences, sequences * context, iterations)
    assert at_once_s <= fixed_s * (1 + 1e-9) + ENGINE.context_s * sequences * iterations**2 / 2


def test_a_plan_can_use_it() -> None:
    """More sequences never take less time, so that nothing is levelled; the price of a full batch is the same."""
    engine = Speculating(ENGINE, (1, 1), HALVES[:2])
    table = [engine.iteration_s(sequences) for sequences in range(1, 257)]
    assert all(before <= after for before, after in pairwise(table))
    assert float(fit_iteration_times(table).of(256)) == pytest.approx(ENGINE.iteration_s(256), rel=1e-2)
    assert float(fit_iteration_times(table).of(4)) == pytest.approx(engine.iteration_s(4), rel=1e-2)


def test_the_places_of_a_ledger() -> None:
    """100 tokens, 40 of them accepted drafts: 60 passes, of which 50 and 30 had drafts at the two places."""
    drafted, accepted = per_pass(100, (50, 30), (30, 10))
    assert (drafted, accepted) == ((50 / 60, 30 / 60), (30 / 60, 10 / 60))
    assert 1 + sum(accepted) == pytest.approx(100 / 60)
    assert per_pass(0, (), ()) == ((), ())


def test_figures_that_do_not_fit_each_other_are_refused() -> None:
    for drafted, accepted, depth in (((), (), None), ((1,), (0.5, 0.2), None), ((1,), (0.5,), 2)):
        with pytest.raises(ValueError, match="give as many of both"):
            Speculating(ENGINE, drafted, accepted, depth)


@dataclass(frozen=True)
class Published:
    """An engine by its throughput without drafts, and beyond the largest batch at a constant time per token."""

    tokens_per_s: Mapping[int, float]
    """By requests in flight."""
    beyond_s: float
    context_s: float = 0.0

    def iteration_s(self, sequences: int) -> float:
        sizes = sorted(self.tokens_per_s)
        inside = float(np.interp(sequences, sizes, [size / self.tokens_per_s[size] for size in sizes]))
        return inside + self.beyond_s * max(sequences - sizes[-1], 0)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        raise NotImplementedError


NONE = MappingProxyType({4: 382.0, 32: 2393.0, 64: 4095.0, 128: 6341.0, 256: 8879.0})
SEVEN = MappingProxyType({4: 970.0, 32: 4756.0, 64: 6712.0, 128: 8779.0, 256: 7852.0})
ADAPTIVE = MappingProxyType({4: 902.0, 32: 4501.0, 64: 7144.0, 128: 10356.0, 256: 13325.0})
"""Output tokens per second of a DeepSeek V4 with a draft of seven tokens (DSpark), by requests in flight: without
drafts, with all seven, and with as many as pay (github.com/vllm-project/vllm/pull/52362)."""

ACCEPTED = (0.7123, 0.517, 0.3904, 0.3051, 0.2437, 0.2, 0.1685)
"""Of a draft of the same kind for another model, at the same places (github.com/vllm-project/vllm/pull/52992)."""


@pytest.fixture(scope="module")
def published() -> Published:
    """How long tokens beyond 256 take follows from one of the pairs, 256 requests with seven drafts each."""
    all_s = 256 * (1 + sum(ACCEPTED)) / SEVEN[256]
    return Published(NONE, (all_s - 256 / NONE[256]) / (256 * 7))


@pytest.mark.parametrize("requests", [4, 32, 64, 128])
def test_seven_drafts_pay_where_they_are_published_to_pay(published: Published, requests: int) -> None:
    """Of these four, no pair was used. Within a quarter of what was published, too."""
    fixed = Speculating(published, (1,) * 7, ACCEPTED, depth=7)
    assert (fixed.iteration_s(requests) < published.iteration_s(requests)) == (SEVEN[requests] > NONE[requests])
    assert requests / fixed.iteration_s(requests) == pytest.approx(SEVEN[requests], rel=0.25)


@pytest.mark.parametrize("requests", sorted(ADAPTIVE))
def test_a_depth_by_the_batch_pays_where_it_is_published_to_pay(published: Published, requests: int) -> None:
    """Against no drafts everywhere, and against seven where many requests run. Where few run, the published engine
    loses 5 to 7 % by choosing, and the model gains as much: choosing costs it nothing."""
    auto, fixed = (Speculating(published, (1,) * 7, ACCEPTED, depth) for depth in (None, 7))
    speed, seven = requests / auto.iteration_s(requests), requests / fixed.iteration_s(requests)
    assert speed > NONE[requests]
    if ADAPTIVE[requests] > SEVEN[requests]:
        assert speed > 1.02 * seven
    else:
        assert seven <= speed < 1.07 * seven
