"""Many more samples than an engine runs at once: most of them wait, and nothing that is planned or learned breaks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes.naive_engine import LinearModel
from fakes.recorded_run import CONTRACTS, Run, check_books
from fakes.tiny_scenario import SHAPE, actor, batch_of, setup_of
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware.group_times import ActorType
from rlhfless.scaling.policy import Action, Event, Note, Policy, StepView
from rlhfless.sim.engine import EnginePool, EngineShape, PricedModel
from rlhfless.sim.policies import make_policy
from rlhfless.sim.samples import RolloutBatch, StepProgress
from rlhfless.spec import WeightedSpec
from rlhfless.spec.fleet import ContractSpec

SLOTS = SHAPE.max_sequences
PROMPT_TOKENS = 10


def batches_of(kinds: Sequence[tuple[int, float]], samples: int, steps: int, seed: int) -> list[RolloutBatch]:
    """The same prompts in each step, with 4 siblings. Lengths are drawn from `kinds`: tokens and weight of each."""
    generator = np.random.default_rng(seed)
    weights = np.array([weight for _, weight in kinds])
    shape = steps, -(-samples // 4), 4
    drawn = generator.choice([tokens for tokens, _ in kinds], shape, p=weights / weights.sum())
    return [
        dataclasses.replace(batch_of([(PROMPT_TOKENS, siblings) for siblings in step.tolist()]), step=number)
        for number, step in enumerate(drawn, 1)
    ]


@st.composite
def crowded(draw: st.DrawFn) -> Run:
    """One or two actors and 8 to 128 samples for each sequence that they run at once, of any distribution of lengths;
    enough steps for the scaler to learn from."""
    count = draw(st.integers(1, 2))
    kinds = st.lists(st.tuples(st.integers(1, 120), st.floats(0.001, 1.0)), min_size=1, max_size=6)
    samples = count * SLOTS * draw(st.sampled_from([8, 20, 128]))
    seed = draw(st.integers(0, 1000))
    batches = batches_of(draw(kinds), samples, draw(st.integers(2, 7)), seed)
    return Run(setup_of(*(actor(slot) for slot in range(count)), seed=seed), batches, seed)


class Watched:
    """A policy whose decisions are looked at."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.planned: list[int] = []
        """Samples in each plan."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        actions = self.policy.decide(at_s, event, view)
        for decision in (action.decision for action in actions if isinstance(action, Note)):
            figures = [value for value in decision.inputs.values() if isinstance(value, float)]
            assert np.isfinite(figures).all(), decision
            if decision.kind == "plan":
                assert float(decision.inputs["step_s"]) > 0
                self.planned.append(int(decision.inputs["samples"]))
        return actions


THOUSAND_ON_EIGHT_SLOTS = batches_of([(20, 1.0), (40, 1.0), (60, 0.5), (110, 0.01)], 128 * SLOTS, 6, seed=0)


@given(run=crowded(), contract=CONTRACTS)
@example(run=Run(setup_of(actor(0)), THOUSAND_ON_EIGHT_SLOTS, 0), contract=WeightedSpec())
@settings(max_examples=20)
def test_every_sample_is_drawn_once_and_every_plan_is_finite(run: Run, contract: ContractSpec) -> None:
    policy = Watched(make_policy("cost_aware", run=RunContract(contract, len(run.batches))))
    check_books(run, policy)
    assert policy.planned == [batch.samples for batch in run.batches]


HEAVY = LinearModel(context_s=1e-5, prefill_fixed_s=0.0, prefill_token_s=0.0)
"""The context of a full batch takes almost half of its iteration. Prefill takes none: the closed form of what is
left has none."""

ROOMY = EngineShape(max_sequences=SLOTS, kv_blocks=1000, block_tokens=4, chunk_tokens=None)


@pytest.mark.parametrize("times", [8, 32])
def test_the_closed_form_foresees_when_an_engine_ends_whose_samples_wait(times: int) -> None:
    """So many times as many samples as sequences that run at once."""
    (batch,) = batches_of([(40, 1.0), (60, 1.0), (100, 1.0)], times * SLOTS, 1, seed=1)
    order = np.argsort(-batch.response_tokens, kind="stable")
    progress = StepProgress(batch)
    engine = EnginePool(ROOMY, PricedModel(HEAVY, SLOTS), progress.table, [0]).open(0, progress, 0.0)
    engine.submit(order, 0.0)
    engine.advance(math.inf)
    device = ActorType("h100", HEAVY, 4000, SLOTS, 0.001)
    everyone = np.full(batch.samples, PROMPT_TOKENS)
    tokens = batch.response_tokens.astype(np.float64)
    assert device.drain_s(tokens, everyone, float(tokens.max())) == pytest.approx(engine.now_s, rel=0.03)
