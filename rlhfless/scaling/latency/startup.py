"""The time until an engine can serve: a cold start, and a load of weights. Pure.

Cold starts of vLLM 0.10.1 on one A100 with a warm compile cache, 0.5 to 14 billion parameters: 33.7 + 1.95 s per
billion, to within 5.6 s (arXiv 2606.07362, upb-cn/vllm-startup-profiler). They include loading weights at 1.75 GB/s;
without that part it is 0.81 s per billion, and weights are counted at the rate of their real source.
"""

from __future__ import annotations

from rlhfless.records import StartPhase
from rlhfless.scaling.latency.shape import ModelShape

START_S = 33.7
"""Imports, compilation, profiling of KV memory and graph capture, of a model of no size."""

START_S_PER_PARAMETER = 1.95e-9 - 2 / 1.75e9
"""The part that grows with the model, without the load of its weights (2 bytes at 1.75 GB/s)."""

GRAPHS_S = 12.0
"""The part of START_S for the capture of graphs. vLLM's source has "usually 5 to 20 seconds"."""

COMPILE_S = 60.0
"""What a cold compile cache adds on a GPU, where a warm one is in START_S: vLLM's own log has 30 to 90 s for models of
7 to 32 billion parameters. An assumption until a GPU has been measured."""

DISK_BYTES_PER_S = 1.75e9
"""Rate at which an engine reads the model's own weights, as in the measurement above, and is assumed to load others."""


def weight_load_s(shape: ModelShape, bytes_per_s: float) -> float:
    """Seconds to read all weights at this rate onto one replica's devices."""
    return shape.total_bytes / bytes_per_s


def start_s(shape: ModelShape) -> float:
    """Seconds of a cold start until the engine is up, with a warm compile cache and without the load of its weights."""
    return START_S + START_S_PER_PARAMETER * shape.parameters


def start_phases(shape: ModelShape) -> dict[str, float]:
    """Seconds of each phase of a first start on a GPU, by StartPhase, up to the first load of the run's weights."""
    return {
        StartPhase.BUILD: start_s(shape) - GRAPHS_S,
        StartPhase.WEIGHTS_DISK: weight_load_s(shape, DISK_BYTES_PER_S),
        StartPhase.COMPILE: COMPILE_S,
        StartPhase.GRAPHS: GRAPHS_S,
    }
