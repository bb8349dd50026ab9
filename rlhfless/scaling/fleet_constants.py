"""Capabilities and timings of a fleet, declared once for live, planned and simulated fleets. Pure.

Each prior states its source and date. Measurements in a run's ledger replace it (the live fleet's own, `rlhfless
simulate --calibrate`, `rlhfless plan --lengths-of`); a self-test replaces the times of starts, sleep, wakes, loads and
publications (`--measured`).

Excluded because no fleet, live or simulated, supports it: policies that control sleep, releasing a learner, moving a
sample's KV to another actor, passing weights from actor to actor, a broadcast to actors that share GPUs with the
learner or may be released, and keeping a sleeper on a released device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Literal

from rlhfless.records import FunctionRole, SleepTier
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Prior:
    """A value used until a measurement is available."""

    value: float
    source: str
    as_of: date


TIERS: Mapping[FunctionRole, SleepTier] = {
    FunctionRole.SAMPLES: SleepTier.DROPPED,
    FunctionRole.SCORES: SleepTier.HOST,
    FunctionRole.ANNOTATES: SleepTier.HOST,
    FunctionRole.UPDATES: SleepTier.HOST,
}
"""By role: where a function with device memory sleeps between two turns. Actors load the next version in any case;
before the first version they sleep in HOST. Other functions never sleep."""

ENGINE_TURN_S = Prior(
    0.1,
    "an engine without its weights: vLLM's sleep mode takes 0.1 to 0.4 s with small models (its blog)",
    date(2025, 10, 26),
)
"""Seconds in which an engine falls asleep between two versions, and in which it wakes for the next one."""

MOVE_S = Prior(
    0.05,
    "an assumption: an abort, the way through the driver, and a request between actors that are all busy",
    date(2026, 11, 24),
)
"""Seconds until a sample's tokens are migrated to another actor, which recomputes its KV."""

KV_BYTES_PER_S: Mapping[str, Prior] = {
    "folder": Prior(
        0.5e9,
        "files that are written and read once each, at some 1 GB/s (torch tensors, one core, shared memory)",
        date(2026, 11, 25),
    ),
    "nixl": Prior(10e9, "an assumption: half of a network card of 200 Gbit/s", date(2026, 11, 25)),
}
"""By `scaling.prefill.kv_connector`: the rate at which one device of an actor receives its part of some KV."""

PUBLISH_BYTES_PER_S = Prior(
    4.5e9,
    "1 GB to shared memory with its digest, on 2 cores of an AMD EPYC (benchmarks/weights.py)",
    date(2026, 11, 26),
)
"""Rate at which the learner's first rank, the only one that gathers whole tensors, writes a version."""

PULL_BYTES_PER_S = Prior(
    12.5e9,
    "an assumption: a network of 100 Gbit/s, all of it; 1.4e9 were measured over loopback on 2 cores",
    date(2026, 11, 26),
)
"""Total rate at which the learner's node sends a version to the other nodes; each pulls it once."""

LOAD_BYTES_PER_S = Prior(
    4.3e9, "vLLM #48382, dense bf16 models on H200: 0.35 s for 0.6B to 4.51 s for 9B, to 10 %", date(2026, 11, 22)
)
"""Rate at which the engine of one device loads a version from its node's memory."""

BROADCAST_BYTES_PER_S = Prior(
    6.4e9,
    "Moonshot's checkpoint-engine: 26.5 GB per device in 4.12 s (GLM-4.5-Air, bf16, 8 x H800)",
    date(2026, 11, 22),
)
"""Rate at which a device receives its part of a GPU-to-GPU broadcast. This runtime's broadcast has never run on
GPUs."""

LOAD_FIXED_S = Prior(0.2, "an assumption: metadata and one barrier", date(2026, 11, 22))
"""Fixed overhead of each load, in seconds."""

SimulatedTransport = Literal["auto", "nccl"]
"""Weight transports that a simulated fleet distinguishes, named as in `weights.transport`. `auto`: a file in the
memory of the learner's node that each other node pulls once."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds in which a function releases its device's memory, and in which it reclaims it."""

    sleep_s: float
    wake_s: float


def engine_turns() -> TurnTimes:
    """Return the times of an actor between two versions, excluding the load of the next one."""
    return TurnTimes(ENGINE_TURN_S.value, ENGINE_TURN_S.value)


def state_turns(state_bytes: float, sheet: DeviceSheet, devices: int) -> TurnTimes:
    """Return the times of a function whose state moves to host memory and back, in parallel over its devices' links."""
    move_s = state_bytes / (devices * sheet.host_bytes_per_s.value)
    return TurnTimes(move_s, move_s)


def kv_token_s(shape: ModelShape, tensor_parallel: int, bytes_per_s: float) -> float:
    """Return the seconds until the KV of one token is at another actor, where each device receives its own heads."""
    return shape.kv_bytes / min(tensor_parallel, shape.kv_heads) / bytes_per_s


def load_s(shape: ModelShape, devices: int) -> float:
    """Return the seconds for an actor on `devices` devices to load a version from its node's memory."""
    return LOAD_FIXED_S.value + shape.total_bytes / (devices * LOAD_BYTES_PER_S.value)
