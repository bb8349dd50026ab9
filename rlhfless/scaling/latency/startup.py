"""Time until an engine can serve: a cold start, and a load of weights. Pure.

Cold starts of vLLM 0.10.1 on one A100 with a warm compile cache, for 0.5 to 14 billion parameters, take 33.7 + 1.95 s
per billion, to within 5.6 s (arXiv 2606.07362, upb-cn/vllm-startup-profiler). They include loading weights at
1.75 GB/s. Without it, the slope is 0.81 s per billion, and weights are counted at the rate of their actual source.
"""

from __future__ import annotations

from rlhfless.records import StartPhase
from rlhfless.scaling.latency.shape import ModelShape

START_S = 33.7
"""Imports, compilation, profiling of KV memory and graph capture, extrapolated to a model of size 0."""

START_S_PER_PARAMETER = 1.95e-9 - 2 / 1.75e9
"""The part that grows with the model, excluding the load of its weights (2 bytes at 1.75 GB/s)."""

GRAPHS_S = 12.0
"""The part of START_S for graph capture. vLLM's source says "usually 5 to 20 seconds"."""

COMPILE_S = 60.0
"""Extra seconds with a cold compile cache on a GPU (START_S assumes a warm one): vLLM logs 30 to 90 s for models of
7 to 32 billion parameters. An assumption until measured on a GPU."""

DISK_BYTES_PER_S = 1.75e9
"""Rate at which an engine reads the model's own weights, from the measurement above, also assumed for loading
others."""


def weight_load_s(shape: ModelShape, bytes_per_s: float) -> float:
    """Return the seconds to read all weights at this rate onto one replica's devices."""
    return shape.total_bytes / bytes_per_s


def start_s(shape: ModelShape) -> float:
    """Return the seconds of an engine's cold start, with a warm compile cache and without the load of its weights."""
    return START_S + START_S_PER_PARAMETER * shape.parameters


def start_phases(shape: ModelShape) -> dict[str, float]:
    """Return the seconds of each StartPhase of a first start on a GPU, up to the first load of the run's weights."""
    return {
        StartPhase.BUILD: start_s(shape) - GRAPHS_S,
        StartPhase.WEIGHTS_DISK: weight_load_s(shape, DISK_BYTES_PER_S),
        StartPhase.COMPILE: COMPILE_S,
        StartPhase.GRAPHS: GRAPHS_S,
    }
