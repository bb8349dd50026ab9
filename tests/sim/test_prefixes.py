"""Whole steps behind shared prefixes: what is computed, in which calls, and what sharing saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from fakes.tiny_scenario import (
    LEARNER,
    MODEL,
    PRICED,
    REFERENCE,
    SCORING,
    actor,
    called,
    on,
    one_step,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly
from rlhfless.prefixes.shared_forward import SharedForward
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.records import Work
from rlhfless.scaling.fleet_constants import MOVE_S
from rlhfless.scaling.policy import Action, Assign, Event, Heartbeat, Move, Start, StepBegan, StepView
from rlhfless.sim.engine import EngineShape
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import PrefixUse, Setup

ROOMY = EngineShape(max_sequences=8, kv_blocks=1000, block_tokens=4, chunk_tokens=None)
SHARED, OWN = 400, 8
"""Tokens of the prefix, and of each prompt behind it."""


def behind_one_prefix(groups: int, siblings: int, tokens: int = 20) -> RolloutBatch:
    return RolloutBatch(
        1,
        tuple(f"p{number}" for number in range(groups)),
        np.full(groups, SHARED + OWN),
        np.repeat(np.arange(groups), siblings),
        np.full(groups * siblings, tokens),
        prefixes=PrefixTree(np.array([SHARED]), np.array([NONE]), np.zeros(groups, np.int64)),
    )


def setup(actors: int = 2, **changes: object) -> Setup:
    return setup_of(*(actor(number, engine=ROOMY) for number in range(actors)), **changes)


def metrics_of(setup: Setup, batch: RolloutBatch, policy: Evenly | None = None) -> dict[str, float]:
    trace, _ = one_step(setup, policy or Evenly(), batch)
    return dict(trace.steps[0].metrics)


@pytest.mark.parametrize("planned", [False, True])
def test_each_actor_computes_the_prefix_once_by_hand(planned: bool) -> None:
    """Two actors with two groups of two: the prefix twice, of each group its own 4 tokens that fill a block once, and
    of each sample the last 4."""
    batch = behind_one_prefix(4, 2)
    changed = setup(prefixes=PrefixUse(planned=planned))
    trace, step = one_step(changed, Evenly(), batch)
    metrics = trace.steps[0].metrics
    assert metrics["prompt_tokens_computed/generation"] == 2 * SHARED + 4 * 4 + 8 * 4
    assert metrics["prompt_tokens_unique/generation"] == SHARED + 4 * OWN
    assert metrics["prompt_tokens_computed/learner"] == 8 * (SHARED + OWN)
    assert metrics["prefix_tokens_evicted"] == 0
    calls = called(trace, Work.PRECOMPUTE)
    assert [call.input_tokens - call.cached_tokens for call in calls] == [SHARED] * (2 if planned else 0)
    for call in calls:
        assert call.duration_s == pytest.approx(MOVE_S.value + MODEL.prefill_s(SHARED))
    first = min(step.start_s)
    assert not calls or first >= calls[0].end_s


class Late(Evenly):
    """All on the first actor; the second one gets the last groups at the first heartbeat after it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = False

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, StepBegan):
            return [Start(0), Start(1), Assign(0, np.arange(len(view.group)))]
        if isinstance(event, Heartbeat) and not self.moved and view.tokens.any():
            self.moved = True
            return [Move(0, 1, np.flatnonzero(view.group >= 2))]
        return super().decide(at_s, event, view)


def test_an_actor_that_takes_a_tail_computes_the_prefix_first() -> None:
    trace, _ = one_step(setup(prefixes=PrefixUse(planned=True)), Late(), behind_one_prefix(4, 2, 150))
    first, second = called(trace, Work.PRECOMPUTE)
    assert (first.input_tokens, first.cached_tokens) == (SHARED, 0)
    assert (second.replica, second.input_tokens, second.cached_tokens) == ("simulated-generation-1", SHARED, 0)
    assert second.duration_s == pytest.approx(MOVE_S.value + MODEL.prefill_s(SHARED))


def test_reference_and_learner_compute_it_once_by_hand() -> None:
    """Eight samples of 408 + 20 tokens in one micro-batch: 400 once, and for each sample 19 and the 8 of its prompt,
    which are too few for its sibling to share."""
    batch = behind_one_prefix(4, 2)
    alone = dataclasses.replace(on(REFERENCE, slot_setup(8)), token_s=1e-4)
    off = setup(services=(SCORING, alone))
    shared = dataclasses.replace(off, prefixes=PrefixUse(planned=True, forward=SharedForward(10_000)))
    trace, _ = one_step(shared, Evenly(), batch)
    (learned,) = called(trace, Work.LEARN)
    fed = 8 * (SHARED + OWN + 20)
    assert (learned.input_tokens, learned.cached_tokens) == (fed, 7 * SHARED)
    computed = fed - learned.cached_tokens
    assert learned.duration_s == pytest.approx(LEARNER.fixed_s + LEARNER.learn_token_s * computed)
    metrics = trace.steps[0].metrics
    assert metrics["prompt_tokens_computed/learner"] == SHARED + 8 * OWN
    assert SHARED + 8 * OWN <= metrics["prompt_tokens_computed/reference"] <= 4 * (SHARED + 2 * OWN)
    assert metrics_of(off, batch)["prompt_tokens_computed/reference"] == 8 * (SHARED + OWN)


def test_evictions_are_counted() -> None:
    """One sequence at a time, in an engine that holds little more than the longest: a prompt that shares nothing lies
    between two that share, and takes the prefix's blocks."""
    tree = PrefixTree(np.array([SHARED]), np.array([NONE]), np.array([0, NONE, 0]))
    prompts = np.array([SHARED + OWN, SHARED + 40, SHARED + OWN])
    batch = RolloutBatch(1, ("a", "b", "c"), prompts, np.arange(3), np.full(3, 10), prefixes=tree)
    tight = EngineShape(max_sequences=1, kv_blocks=115, block_tokens=4, chunk_tokens=None)
    one = setup_of(actor(0, engine=tight, prices=PRICED))
    metrics = metrics_of(one, batch)
    # The second holds 449 tokens in 113 of the 115 blocks; the prefix's first two, which it would take last, are left.
    assert metrics["prefix_tokens_evicted"] == SHARED - 2 * 4
    assert metrics["prompt_tokens_computed/generation"] == prompts.sum() - 2 * 4
