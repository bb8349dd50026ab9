"""Small fleets and scenarios with round numbers that take seconds, for simulated steps and whole runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np

from fakes.naive_engine import LinearModel
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import FunctionName, Invocation, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import Usage, summarise
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import Action, Assign, Event, FleetView, Policy, Start, StepBegan, StepView
from rlhfless.scaling.prices import DevicePrice, PriceBook
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.run import LearnedStep, simulate
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios import Scenario
from rlhfless.sim.setup import ActorShape, LearnerShape, ServiceShape, Setup, SlotSetup, Transport
from rlhfless.spec import SyncSpec

MODEL = LinearModel()
PRICED = PricedModel(MODEL, 8)
SHAPE = EngineShape(max_sequences=8, kv_blocks=60, block_tokens=4, chunk_tokens=None)
TODAY = date(2026, 11, 21)
PRICES = PriceBook(
    devices=(
        DevicePrice(kind="cpu-core", usd_per_hour=0.036, source="test", as_of=TODAY, rented_by="device"),
        DevicePrice(kind="h100", usd_per_hour=3.6, source="test", as_of=TODAY, rented_by="device"),
    )
)
HEARTBEAT_S = 0.5
FOLDER = Transport("auto", 1e9, 0.1, 200_000_000)  # 0.3 s


SLEEP_S, WAKE_S = 0.25, 0.5

SERVING_S = 5.0 + 2.0 + 0.3
"""Seconds until an actor serves: a node, a cold start, and its weights."""


def slot_setup(
    device: int, kind: str = "h100", start_s: float = 2.0, node: int | None = None, **changes: object
) -> SlotSetup:
    """Return one device, on the node of the same number."""
    allocation = Allocation.of([Device(f"{kind}-{device}", kind, device)])
    node = device if node is None else node
    return dataclasses.replace(SlotSetup(allocation, f"node-{node}", start_s, SLEEP_S, WAKE_S), **changes)


def actor(device: int, **changes: object) -> ActorShape:
    return dataclasses.replace(ActorShape(slot_setup(device), SHAPE, PRICED), **changes)


def on(shape: ActorShape | ServiceShape | LearnerShape, where: SlotSetup) -> ActorShape | ServiceShape | LearnerShape:
    """Return the same work on another slot."""
    return dataclasses.replace(shape, slot_setup=where)


SCORING = ServiceShape(slot_setup(0, "cpu-core", 0.0), FunctionName.SCORING, Work.SCORE, 0.004, 0.0)
REFERENCE = ServiceShape(slot_setup(0, start_s=0.7), FunctionName.REFERENCE, Work.LOGPROBS, 0.01, 0.0)
LEARNER = LearnerShape(slot_setup(9, start_s=1.0, node=0), 0.2, 0.0, 0.001, 0.05)


def setup_of(*actors: ActorShape, **changes: object) -> Setup:
    """Return a setup with one scoring service on a CPU core and one learner on a separate device."""
    plain: dict[str, object] = {
        "services": (SCORING,),
        "learner": LEARNER,
        "transport": FOLDER,
        "heartbeat_s": HEARTBEAT_S,
        "schedule": SyncSpec(),
        "node_s": 5.0,
        "max_tokens": 200,
        "seed": 0,
    }
    return Setup(actors, **(plain | changes))


@dataclasses.dataclass(frozen=True)
class PlayedStep:
    """The samples that a step has generated, at its end, `[samples]`; `slot` is where each finished."""

    whole: RolloutBatch
    """The groups that it may learn from, with all their samples."""
    batch: RolloutBatch
    tokens: np.ndarray
    slot: np.ndarray
    start_s: np.ndarray
    finish_s: np.ndarray
    learned: tuple[int, ...]
    """The groups of `whole` that it learned from."""

    @classmethod
    def of(cls, step: LearnedStep) -> PlayedStep:
        table = step.progress.table
        columns = (table.tokens, table.actor, table.sample["start_s"], table.finish_s)
        return cls(step.batch, step.progress.batch, *(column.copy() for column in columns), step.groups)

    @property
    def end_s(self) -> float:
        """When the last sample finished."""
        return float(self.finish_s.max())


def play(
    setup: Setup, batches: Sequence[RolloutBatch], policy: Policy, prices: PriceBook = PRICES
) -> tuple[Trace, list[PlayedStep]]:
    """Simulate a run; return its trace, and the samples of each step."""
    steps: list[PlayedStep] = []
    trace = simulate(setup, policy, prices, batches, on_step=lambda step: steps.append(PlayedStep.of(step)))
    return trace, steps


def one_step(setup: Setup, policy: Policy, batch: RolloutBatch) -> tuple[Trace, PlayedStep]:
    trace, (step,) = play(setup, [batch], policy)
    return trace, step


def fleet_seen(setup: Setup) -> FleetView:
    """Return the fleet of a setup as a policy sees it at the start of the first step."""
    seen: list[FleetView] = []

    class Looks:
        def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
            if not isinstance(event, StepBegan):
                return ()
            seen.append(view.fleet)
            start = () if view.slots[0].state else (Start(0),)
            return *start, Assign(0, np.arange(len(view.group)))

    one_step(setup, Looks(), batch_of([(5, [1])]))
    return seen[0]


def repeated(batch: RolloutBatch, steps: int) -> list[RolloutBatch]:
    """Return the batch of each step, from 1."""
    return [dataclasses.replace(batch, step=step) for step in range(1, steps + 1)]


def called(trace: Trace, work: Work) -> list[Invocation]:
    return sorted((call for call in trace.invocations if call.work is work), key=lambda call: call.start_s)


def usage_of(trace: Trace, function: FunctionName) -> Usage:
    return {row.name: row for row in summarise(trace, PRICES).functions}[function]


def batch_of(groups: list[tuple[int, list[int]]], prefixes: PrefixTree | None = None) -> RolloutBatch:
    """Return a batch from (prompt tokens, response lengths) per group and the prefixes that prompts share."""
    sizes = [len(lengths) for _, lengths in groups]
    return RolloutBatch(
        step=1,
        prompt_ids=tuple(f"p{i}" for i in range(len(groups))),
        prompt_tokens=np.array([prompt for prompt, _ in groups], dtype=np.int64),
        group=np.repeat(np.arange(len(groups)), sizes),
        response_tokens=np.array([length for _, lengths in groups for length in lengths], dtype=np.int64),
        prefixes=prefixes,
    )


CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 32000,
}

POLICIES: list[dict[str, Any]] = [
    {"name": "static_colocated"},
    {"name": "static_disaggregated"},
    {"name": "best_static"},
    {"name": "clairvoyant"},
]


def values(**changes: Any) -> dict[str, Any]:
    """Return the scenario's values, as in a file."""
    return {
        "name": "tiny",
        "cluster": {"machines": [{"kind": "l40s", "devices_per_node": 2}]},
        "model": {"config": CONFIG},
        "workload": {
            "type": "lognormal",
            "lengths": {"median_tokens": 60, "spread": 0.5, "persistence": 0.8},
            "prompts": 8,
            "median_prompt_tokens": 20,
            "source": "made up",
        },
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_tokens": 256,
        "steps": 4,
        "seeds": 2,
        "policies": POLICIES,
        **changes,
    }


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate(values(**changes))
