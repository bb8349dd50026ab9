"""What a fleet of this runtime can do, and how long it takes: declared once, for live, planned and simulated fleets.
Pure.

A prior says where it is from and when. What a run's ledger has measured takes its place (the live fleet's own,
`rlhfless simulate --calibrate`, `rlhfless plan --lengths-of`), and starts, sleep, wakes, loads and publications of a
self-test (`--measured`).

Not here, because no fleet does it, live or simulated: policies that decide who sleeps, a learner that is released, KV
of samples that moves to another actor, weights that actors pass on to each other, a broadcast to actors that share GPUs
with the learner or may be released, and a device that keeps a sleeper after it was given back.
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
    """A figure that counts until it was measured."""

    value: float
    source: str
    as_of: date


TIERS: Mapping[FunctionRole, SleepTier] = {
    FunctionRole.SAMPLES: SleepTier.DROPPED,
    FunctionRole.SCORES: SleepTier.HOST,
    FunctionRole.COLUMN: SleepTier.HOST,
    FunctionRole.UPDATES: SleepTier.HOST,
}
"""By role: where a function that holds memory on a device sleeps between two turns. Actors load the next version in any
case; before the first one they sleep in HOST. Functions that are not here never sleep."""

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
"""Seconds until a sample is at another actor by its tokens; its KV is computed again there."""

KV_BYTES_PER_S: Mapping[str, Prior] = {
    "folder": Prior(
        0.5e9,
        "files that are written and read once each, at some 1 GB/s (torch tensors, one core, shared memory)",
        date(2026, 11, 25),
    ),
    "nixl": Prior(10e9, "an assumption: half of a network card of 200 Gbit/s", date(2026, 11, 25)),
}
"""By `scaling.prefill.kv_connector`: the rate at which a device of an actor gets its part of some KV."""

PUBLISH_BYTES_PER_S = Prior(
    4.5e9,
    "1 GB to shared memory with its digest, on 2 cores of an AMD EPYC (benchmarks/weights.py)",
    date(2026, 11, 26),
)
"""Rate at which the learner's first rank, which alone gathers whole tensors, writes a version."""

PULL_BYTES_PER_S = Prior(
    12.5e9,
    "an assumption: a network of 100 Gbit/s, all of it; 1.4e9 were measured over loopback on 2 cores",
    date(2026, 11, 26),
)
"""Rate at which the learner's node gives a version to the other nodes, all together; each pulls it once."""

LOAD_BYTES_PER_S = Prior(
    4.3e9, "vLLM #48382, dense bf16 models on H200: 0.35 s for 0.6B to 4.51 s for 9B, to 10 %", date(2026, 11, 22)
)
"""Rate at which the engine of one device takes in a version that is in its node's memory."""

BROADCAST_BYTES_PER_S = Prior(
    6.4e9,
    "Moonshot's checkpoint-engine: 26.5 GB per device in 4.12 s (GLM-4.5-Air, bf16, 8 x H800)",
    date(2026, 11, 22),
)
"""Rate at which a device receives its part of a broadcast from GPU to GPU. This runtime's has never run on one."""

LOAD_FIXED_S = Prior(0.2, "an assumption: metadata and one barrier", date(2026, 11, 22))
"""Seconds of each load, whatever its size."""

SimulatedTransport = Literal["auto", "nccl"]
"""The ways of the weights that differ in a simulated fleet, as `weights.transport` of a run names them. `auto`: a file
in the memory of the learner's node, which each other node pulls once."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds in which a function gives up its device's memory, and in which it has it again."""

    sleep_s: float
    wake_s: float


NO_TURNS = TurnTimes(0.0, 0.0)
"""Of a function that holds nothing on a device."""


def engine_turns() -> TurnTimes:
    """Of an actor between two versions: the load of the next one comes after it."""
    return TurnTimes(ENGINE_TURN_S.value, ENGINE_TURN_S.value)


def state_turns(state_bytes: float, sheet: DeviceSheet, devices: int) -> TurnTimes:
    """Of a function whose state goes to the host's memory and comes back, each device's part over its own link."""
    move_s = state_bytes / (devices * sheet.host_bytes_per_s.value)
    return TurnTimes(move_s, move_s)


def kv_token_s(shape: ModelShape, tensor_parallel: int, bytes_per_s: float) -> float:
    """Seconds until the KV of one token is at another actor, each of whose devices gets its own heads."""
    return shape.kv_bytes / min(tensor_parallel, shape.kv_heads) / bytes_per_s


def load_s(shape: ModelShape, devices: int) -> float:
    """Seconds for an actor on this many devices to load a version from its node's memory."""
    return LOAD_FIXED_S.value + shape.total_bytes / (devices * LOAD_BYTES_PER_S.value)
