"""What an engine is taken to do before anything was measured: the data sheet, or else a nominal processor core. Pure.

A fit to the run's own ledger (`fitted`) takes over after its first step, so a prior decides one step, and terms that the
run's batches cannot tell apart. For a device kind without a data sheet (a CPU core above all, of which no two are alike)
the prior is neutral: a core that reads 10 GB/s and computes 10 GFLOP/s, behind an engine that spends 15 ms on each
iteration whatever the model. So the least that can be said is right: more sequences make an iteration longer, though
not in proportion, and long responses decide when an actor ends.
"""

from __future__ import annotations

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape

OVERHEAD_S = 0.015
"""Of an iteration of vLLM's CPU engine, all but the model: 14 to 18 ms with 0.5 million parameters on one core of a
server (fit to the ledger of the bundled demo, 2026-11)."""

SEQUENCE_S = 1e-4
"""Of each sequence in it, by the same fit; for models whose shape is not known."""

READ_BYTES_PER_S = 10e9
"""Of one core's share of a server's memory bandwidth: 8 to 15 GB/s of 200 to 400."""

FLOPS_PER_S = 10e9
"""Of one core, in fp32 products of small batches: by the same fit 9 GFLOP/s."""


def prior_of(kind: str, shape: ModelShape | None, tensor_parallel: int = 1) -> EngineModel:
    """The prior of an engine on so many devices of a kind. A model of unknown shape is taken for a small one."""
    device = load_devices().get(kind)
    if shape is not None and device is not None:
        return Roofline(shape, device, tensor_parallel)
    if shape is None:
        return LinearEngine(OVERHEAD_S, SEQUENCE_S, 0.0, SEQUENCE_S, 0.0)
    token_s = 2 * shape.active / (FLOPS_PER_S * tensor_parallel)
    return LinearEngine(
        fixed_s=OVERHEAD_S + shape.total_bytes / (READ_BYTES_PER_S * tensor_parallel),
        sequence_s=token_s,
        context_s=shape.kv_bytes / (READ_BYTES_PER_S * tensor_parallel),
        prefill_token_s=token_s,
        prefill_context_s=4 * shape.layers * shape.heads * shape.head_dim / (FLOPS_PER_S * tensor_parallel),
    )
