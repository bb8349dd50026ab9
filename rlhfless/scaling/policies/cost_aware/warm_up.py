"""Compiles the loops of the policy ahead of the first step, which would otherwise wait for it, for seconds.

Compiled code is kept on disk, if there is a writable folder (`scaling.compiled`).
"""

from __future__ import annotations

import numpy as np

from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies.cost_aware.forecasters import PredictedLengths
from rlhfless.scaling.policies.cost_aware.policy import CostAware
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Beat,
    EngineLimits,
    FleetView,
    Generated,
    ReplicaSlot,
    SlotView,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.spec import CheapestSpec, CostAwareSpec

PROMPTS, SIBLINGS, ACTORS = 4, 8, 2
"""Few samples, but enough for a plan in which some wait."""

MAX_TOKENS = 64


def warm_up() -> None:
    """Runs two steps of a made-up run with every kind of decision."""
    run = RunContract(CheapestSpec(deadline_s=1.0), steps=2)
    policy = CostAware(CostAwareSpec(), run, PredictedLengths(LengthPredictor(MAX_TOKENS)))
    fleet = _fleet()
    samples = PROMPTS * SIBLINGS
    for step in (1, 2):
        policy.decide(step, StepBegan(), _view(fleet, step, np.zeros(samples, np.int64), np.full(samples, UNASSIGNED)))
        # One sample of each actor is still running; the others have ended.
        tokens, home = np.full(samples, MAX_TOKENS // 2), np.full(samples, UNASSIGNED)
        home[:ACTORS] = range(ACTORS)
        policy.decide(step + 0.5, Beat(), _view(fleet, step, tokens, home))
        over = _view(fleet, step, tokens + 1, np.full(samples, UNASSIGNED))
        policy.decide(step + 0.8, Generated(), over)
        policy.decide(step + 0.9, StepEnded(step, step + 0.9), over)


def _fleet() -> FleetView:
    model = LinearEngine(fixed_s=0.01, sequence_s=0.001, context_s=0.0, prefill_token_s=1e-5, prefill_context_s=0.0)
    replica_slots = tuple(
        ReplicaSlot(
            function=FunctionName.GENERATION,
            role=FunctionRole.SAMPLES,
            kind=f"kind-{index}",
            devices=(f"device-{index}",),
            node="node",
            usd_per_s=0.001,
            start_s=1.0,
            engine=EngineLimits(model, kv_capacity_tokens=10_000, max_sequences=PROMPTS * SIBLINGS // 2 // ACTORS),
        )
        for index in range(ACTORS)
    )
    return FleetView(replica_slots, 0.1, 0.01, 0.1, MAX_TOKENS)


def _view(fleet: FleetView, step: int, tokens: np.ndarray, home: np.ndarray) -> StepView:
    samples = PROMPTS * SIBLINGS
    begun = bool(tokens.any())
    return StepView(
        fleet=fleet,
        slots=(SlotView(ReplicaState.SERVING),) * ACTORS,
        step=step,
        prompt_ids=tuple(map(str, range(PROMPTS))),
        prompt_tokens=np.full(PROMPTS, 8),
        group=np.repeat(np.arange(PROMPTS), SIBLINGS),
        tokens=tokens,
        finished=begun & (home == UNASSIGNED),
        truncated=np.zeros(samples, np.bool_),
        home=home,
    )
