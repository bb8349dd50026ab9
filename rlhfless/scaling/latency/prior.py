"""The assumed speed of an engine before any measurement: its device's data sheet, and its own overhead. Pure.

A fit to the run's own ledger (`fitted`) takes over after its first step, so a prior decides one step, and terms that
the run's batches cannot tell apart. On a CPU core the engine's scheduler and sampler share the core with the model, and
with a small model they take nearly all the time: `OVERHEAD_S` and `SEQUENCE_S`. A prior without them would predict so
short a step that one actor suffices. An unknown accelerator is assumed to be the slowest of the table and not a CPU
core, because a prior that is a thousand times too slow starts every actor.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND

OVERHEAD_S = 0.009
"""Seconds of an iteration of vLLM's CPU engine without the model: 6 to 12 ms on one core of a server, with a model of
0.5 million parameters, whose own time is negligible (fits to the ledger of the bundled demo, 2026-11)."""

SEQUENCE_S = 1.8e-4
"""Seconds of each sequence in it without the model: by the same fits 0.2 ms, including 0.02 ms of the model."""

SLOWEST = "l40s"
"""The slowest of the table's accelerators."""


def prior_of(kind: str, shape: ModelShape | None, tensor_parallel: int = 1) -> EngineModel:
    """The prior of an engine on `devices` devices of a kind. A model of unknown shape is assumed to have no size, in an
    engine on a CPU core."""
    own = LinearEngine(OVERHEAD_S, SEQUENCE_S, 0.0, 0.0, 0.0)
    if shape is None:
        return own
    devices = load_devices()
    sheet = Roofline(shape, devices.get(kind, devices[SLOWEST]), tensor_parallel)
    if kind != CPU_KIND:
        return sheet
    line = LinearEngine.of(sheet)
    return replace(line, fixed_s=line.fixed_s + own.fixed_s, sequence_s=line.sequence_s + own.sequence_s)
