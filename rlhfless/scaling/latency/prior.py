"""What an engine is taken to do before anything was measured: its device's data sheet, and its own work. Pure.

A fit to the run's own ledger (`fitted`) takes over after its first step, so a prior decides one step, and terms that
the run's batches cannot tell apart. On a CPU core the engine's scheduler and sampler share the core with the model, and
with a small model they are nearly all there is; `OVERHEAD_S` and `SEQUENCE_S` are what they take. A prior without them
would take a step for so short that one actor suffices. An accelerator that the table does not have is taken for the
slowest that it has, for the same reason turned round: a prior that is a thousand times too slow starts every actor.
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
"""Of an iteration of vLLM's CPU engine, all but the model: 6 to 12 ms with 0.5 million parameters, of which nothing is
seen, on one core of a server (fits to the ledger of the bundled demo, 2026-11)."""

SEQUENCE_S = 1.8e-4
"""Of each sequence in it, all but the model: by the same fits 0.2 ms, of which the model's products are 0.02."""

SLOWEST = "l40s"
"""Of the table's accelerators."""


def prior_of(kind: str, shape: ModelShape | None, tensor_parallel: int = 1) -> EngineModel:
    """The prior of an engine on so many devices of a kind. A model of unknown shape is taken for one of no size, behind
    an engine on a core."""
    own = LinearEngine(OVERHEAD_S, SEQUENCE_S, 0.0, 0.0, 0.0)
    if shape is None:
        return own
    devices = load_devices()
    sheet = Roofline(shape, devices.get(kind, devices[SLOWEST]), tensor_parallel)
    if kind != CPU_KIND:
        return sheet
    line = LinearEngine.of(sheet)
    return replace(line, fixed_s=line.fixed_s + own.fixed_s, sequence_s=line.sequence_s + own.sequence_s)
