"""Small fleets and steps as a policy sees them, made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.policy import UNASSIGNED, EngineLimits, FleetView, ReplicaSlot, SlotView, StepView

MODEL = LinearEngine(fixed_s=0.01, sequence_s=0.0005, context_s=0.0, prefill_token_s=1e-5, prefill_context_s=0.0)
ENGINE = EngineLimits(MODEL, kv_capacity_tokens=10_000, max_sequences=8)

UP = SlotView(ReplicaState.SERVING)
ABSENT = SlotView(None)
ASLEEP = SlotView(ReplicaState.STALE)


def replica_slot(index: int, **changes: object) -> ReplicaSlot:
    plain = ReplicaSlot(
        FunctionName.GENERATION,
        FunctionRole.SAMPLES,
        "h100",
        (f"gpu-{index}",),
        f"node-{index // 2}",
        usd_per_s=0.001,
        start_s=40.0,
        engine=ENGINE,
    )
    return dataclasses.replace(plain, **changes)


def learner(*devices: int, node: str = "node-0") -> ReplicaSlot:
    names = tuple(f"gpu-{index}" for index in devices)
    usd_per_s = 0.001 * len(devices)
    of = {"function": FunctionName.LEARNER, "role": FunctionRole.UPDATES, "engine": None}
    return replica_slot(0, devices=names, node=node, usd_per_s=usd_per_s, **of)


def fleet_of(*replica_slots: ReplicaSlot, **changes: object) -> FleetView:
    plain = FleetView(replica_slots, load_s=1.0, move_s=0.01, beat_s=0.5, max_tokens=100)
    return dataclasses.replace(plain, **changes)


def view_of(
    fleet: FleetView,
    slots: Sequence[SlotView],
    *,
    prompts: int,
    siblings: int,
    tokens: Sequence[int] | None = None,
    finished: Sequence[bool] | None = None,
    home: Sequence[int] | None = None,
    step: int = 1,
    prompt_ids: Sequence[str] | None = None,
) -> StepView:
    samples = prompts * siblings
    return StepView(
        fleet,
        tuple(slots),
        step,
        tuple(prompt_ids or [f"p{i}" for i in range(prompts)]),
        np.full(prompts, 10),
        np.repeat(np.arange(prompts), siblings),
        np.array(tokens if tokens is not None else [0] * samples),
        np.array(finished if finished is not None else [False] * samples),
        np.zeros(samples, bool),
        np.array(home if home is not None else [UNASSIGNED] * samples),
    )


def homes(left: dict[int, list[int]], samples: int) -> list[int]:
    """`[samples]`: the slot of each one in `left` (slot: samples), and UNASSIGNED for samples that have ended."""
    home = [UNASSIGNED] * samples
    for slot, mine in left.items():
        for sample in mine:
            home[sample] = slot
    return home
