"""Traces in the runtime's format: one with known latencies, and random runs with the invariants that hold for each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from fakes.tiny_scenario import PRICES, PlayedStep, play
from fakes.views import Restless
from rlhfless.prefixes.shared_forward import SharedForward
from rlhfless.prefixes.tree import CPU_BLOCK_TOKENS
from rlhfless.records import (
    PREFIXES,
    Decision,
    FinishReason,
    FunctionName,
    Holding,
    Invocation,
    Rollout,
    Score,
    StepRecord,
    Work,
)
from rlhfless.records.traces import Trace, TraceMeta, TraceWriter
from rlhfless.scaling.accounting import Interval, clip, length, summarise, union
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import load_price_book
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.policies import make_policy
from rlhfless.sim.replay.what_if import run_policy
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.draw import behind_prefixes
from rlhfless.sim.scenarios.work import PrefixLevel
from rlhfless.sim.setup import ActorShape, LearnerShape, PrefixUse, ServiceShape, Setup, SlotSetup, Transport
from rlhfless.sim.workloads.synthetic import LognormalLengths, SyntheticWorkload
from rlhfless.spec import CheapestSpec, FastestSpec, SyncSpec, WeightedSpec

ENGINE = LinearEngine(6e-3, 1.5e-4, 2e-6, 2e-5, 1e-9)
LEARN_S, LEARN_TOKEN_S, EVALUATE_TOKEN_S = 0.3, 1e-4, 2e-5
LOAD_S, PUBLISH_S, GROUP_S = 0.05, 0.02, 4e-4
EPOCH_S = 1_795_000_000.0


def record(
    folder: Path,
    actors: int,
    prompts: int = 16,
    median_tokens: float = 20.0,
    steps: int = 8,
    levels: Sequence[PrefixLevel] = (),
    scaling: Mapping[str, Any] | None = None,
    prompt_tokens: float = 7.0,
) -> Path:
    """Write the trace of a run with actors on CPU cores, and return its folder.

    `levels`: of shared prefixes. `scaling`: as in the spec; by default static actors.
    """
    shape = LognormalLengths(median_tokens, 0.7, 0.5)
    workload = SyntheticWorkload(shape, 64, prompts, 4, prompt_tokens, 112, 0.0, seed=actors)
    batches = list(workload.batches(steps))
    setup, policy = _setup(actors), make_policy("static")
    meta = TraceMeta(f"demo-{actors}", 1, load_price_book().snapshot(), _spec(scaling), {})
    if scaling is not None:  # a live run's first step starts when its replicas are serving
        setup = replace(setup, warm=True, fewest_actors=scaling["generation"]["min_actors"])
        policy = run_policy(Trace(meta, steps=(StepRecord(0, 0.0, 1.0, {}),) * steps))[1]
    if levels:
        batches = [behind_prefixes(batch, levels) for batch in batches]
        setup = replace(setup, prefixes=PrefixUse(planned=True, forward=SharedForward(8192)))
    trace, played = play(setup, batches, policy, load_price_book())
    actor_at = actors_of(trace)
    with TraceWriter(folder, meta, record_tokens=False) as writer:
        for holding in trace.holdings:
            writer.add(_later(holding))
        for call in trace.invocations:
            writer.add(_later(_told(call, batches)))
        for batch, step in zip(batches, played, strict=True):
            texts = {name: batch.tree.text(number) for number, name in enumerate(batch.prompt_ids)}
            if levels:
                writer.add(Decision(batch.step, EPOCH_S, PREFIXES, "shared", texts))
            for sample in range(batch.samples):
                actor = actor_at(int(step.slot[sample]), float(step.finish_s[sample]))
                prompt = int(batch.prompt_tokens[batch.group[sample]])
                writer.add_rollout(batch.step, _rollout(step, sample, actor), Score(0.0, {}), prompt)
        for decision in trace.decisions:
            writer.add(replace(decision, at_s=EPOCH_S + decision.at_s))
        for step in trace.steps:
            moved = replace(step, start_s=EPOCH_S + step.start_s, end_s=EPOCH_S + step.end_s)
            writer.add(moved)
    return folder


def actors_of(trace: Trace) -> Callable[[int, float], str]:
    """Return a function that names the actor that was at a slot of a run's setup at a time."""

    def actor_at(slot: int, at_s: float) -> str:
        return next(
            row.replica
            for row in trace.holdings
            if row.incarnation.startswith(f"generation-{slot}-") and row.start_s <= at_s <= row.end_s
        )

    return actor_at


def _rollout(step: PlayedStep, sample: int, actor: str) -> Rollout:
    batch, length = step.batch, int(step.batch.response_tokens[sample])
    return Rollout(
        batch.prompt_ids[batch.group[sample]],
        sample - int(np.searchsorted(batch.group, batch.group[sample])),
        0,
        np.zeros(length, np.int32),
        np.zeros(length, np.float32),
        "",
        FinishReason.LENGTH if length == 112 else FinishReason.STOP,
        (),
        actor,
        EPOCH_S + float(step.start_s[sample]),
        EPOCH_S + float(step.finish_s[sample]),
        0,
    )


def _setup(actors: int) -> Setup:
    def slot_setup(core: int, start_s: float = 1.0) -> SlotSetup:
        return SlotSetup(Allocation.of([Device(f"cpu-{core}", "cpu-core", core)], 0.3), "node", start_s, beside=True)

    shape = EngineShape(256, 100_000, CPU_BLOCK_TOKENS, 8192)
    prices = PricedModel(ENGINE, shape.max_sequences)
    scoring = ServiceShape(slot_setup(0), FunctionName.SCORING, Work.SCORE, GROUP_S, 0.0)
    learner = LearnerShape(slot_setup(1), LEARN_S, EVALUATE_TOKEN_S, LEARN_TOKEN_S, PUBLISH_S)
    return Setup(
        tuple(ActorShape(slot_setup(i % 2), shape, prices) for i in range(actors)),
        (scoring,),
        learner,
        Transport("auto", 1.0, LOAD_S, 0),
        0.5,
        SyncSpec(),
        0.0,
        112,
        0,
    )


def _spec(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    engine = {"max_sequences": 256, "max_batch_tokens": 8192}
    spec = {"model": {"path": "nowhere"}, "generation": {"max_tokens": 112, "engine": engine}}
    return spec if scaling is None else spec | {"scaling": scaling}


def _told(call: Invocation, batches: Sequence[RolloutBatch]) -> Invocation:
    """Return the call with the tokens and sequences that the runtime records."""
    batch = next((batch for batch in batches if batch.step == call.step), None)
    if batch is None or call.work in (Work.LOAD_WEIGHTS, Work.PUBLISH, Work.PRECOMPUTE):
        return call
    if call.work is Work.SCORE:
        groups = round(call.duration_s / GROUP_S)
        return replace(call, sequences=4 * max(groups, 1))
    tokens = int(batch.prompt_tokens[batch.group].sum() + batch.response_tokens.sum())
    return replace(call, input_tokens=tokens, sequences=batch.samples)


def _later(record: Any) -> Any:
    """Return the record with its times shifted to this century."""
    assert isinstance(record, Holding | Invocation)
    return replace(record, start_s=EPOCH_S + record.start_s, end_s=EPOCH_S + record.end_s)


@dataclasses.dataclass(frozen=True)
class Run:
    """A fleet, its batches, and a policy's seed."""

    setup: Setup
    batches: list[RolloutBatch]
    seed: int

    def restless(self) -> Restless:
        return Restless(self.seed)


def check_books(run: Run, policy: Policy) -> None:
    """Simulate a run, and assert that every sample is generated once and that the bill matches the holdings."""
    trace, steps = play(run.setup, run.batches, policy)
    for batch, step in zip(run.batches, steps, strict=True):
        assert step.tokens.tolist() == batch.response_tokens.tolist()
        assert sorted(step.learned) == list(range(batch.groups))
        assert np.isfinite(step.finish_s).all()
        assert (step.slot >= 0).all()
    assert [step.step for step in trace.steps] == [batch.step for batch in run.batches]
    total = summarise(trace, PRICES).total  # raises if holdings overlap
    held_s = math.fsum(holding.device_s for holding in trace.holdings)
    assert total.provisioned_device_s == pytest.approx(held_s, rel=1e-9)
    for call in trace.invocations:
        assert unheld_s(trace.holdings, [call]) == pytest.approx(0.0, abs=1e-6), call
    assert total.cost_usd == pytest.approx(PRICES.cost_usd(trace.holdings))
    assert crowd(trace.holdings) <= 1.0 + 1e-9
    drawn_tokens = sum(call.output_tokens for call in trace.invocations)
    needed = sum(int(batch.response_tokens.sum()) for batch in run.batches)
    crashes = any(actor.spot_mean_s < math.inf for actor in run.setup.actors)
    assert crashes or drawn_tokens == needed  # a call that is lost leaves no row


def unheld_s(holdings: Sequence[Holding], invocations: Sequence[Invocation]) -> float:
    """Return the seconds of invocations outside every holding of their incarnation."""
    held: dict[str, list[Interval]] = defaultdict(list)
    for holding in holdings:
        held[holding.incarnation].append((holding.start_s, holding.end_s))
    whole = {incarnation: union(intervals) for incarnation, intervals in held.items()}
    return math.fsum(
        call.duration_s
        - length(piece for begin, end in whole.get(call.incarnation, []) for piece in clip(worked, begin, end))
        for call in invocations
        for worked in [[(call.start_s, call.end_s)]]
    )


CONTRACTS = st.one_of(
    st.builds(WeightedSpec, time_weight=st.sampled_from([0.0, 0.5, 1.0])),
    st.builds(CheapestSpec, deadline_s=st.sampled_from([0.5, 5.0, 500.0]), per=st.sampled_from(["step", "run"])),
    st.builds(FastestSpec, budget_usd=st.sampled_from([1e-6, 0.01, 1.0]), per=st.sampled_from(["step", "run"])),
)


def crowd(holdings: Sequence[Holding]) -> float:
    """Return the largest share of a device that is billed at any instant."""
    edges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for holding in holdings:
        edges[holding.device] += [(holding.start_s, holding.share), (holding.end_s, -holding.share)]
    sums = (itertools.accumulate(share for _, share in sorted(changes)) for changes in edges.values())
    return max(total for device in sums for total in device)
