"""Engine times from device data sheets, the slower of computing and reading, and the time of an engine's start. Pure.

    decode    max(weights read / bandwidth, 2 active B / peak) + kernel starts + all-reduces, KV / bandwidth per token
    prefill   max(2 active T / peak, weights read / bandwidth) + attention + kernel starts + all-reduces

Each peak is scaled by the share that kernels were measured to reach. Tensor parallelism divides all but the last two
terms, and adds two all-reduces per layer at the measured rate of groups of that size. Data-parallel ranks of one engine
divide the sequences and replicate everything but the experts, which are spread over all devices (expert parallelism):
two exchanges per layer send each token to its experts and back. Experts are assumed to be evenly loaded. A layer with a
window reads the whole window for each sequence in every iteration, an upper bound for shorter sequences. A linear layer
reads and writes the state of each sequence.

A first estimate, accurate to about 30 %, replaced later by a fit to the run's own ledger (`fitted`).

Cold starts of vLLM 0.10.1 on one A100 with a warm compile cache, for 0.5 to 14 billion parameters, take 33.7 + 1.95 s
per billion, to within 5.6 s (arXiv 2606.07362, upb-cn/vllm-startup-profiler). They include loading weights at
1.75 GB/s. Without it, the slope is 0.81 s per billion, and weights are counted at the rate of their actual source.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.records import StartPhase
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import ModelShape

BETWEEN_NODES_S = 60e-6
"""Extra seconds of an all-reduce between nodes compared with one within a node, fitted to published steps of
DeepSeek-V3 and Qwen3-235B-A22B with engines of 16 and 32 H100."""

KERNEL_S = 3e-6
"""Launch time of a kernel: the constant that aiconfigurator adds to each memory operation."""

RUNTIME_S = 0.005
"""Seconds per iteration outside kernels: scheduling, sampling, detokenising, and the runtime's own calls. The median
of 10.0, 16.9 and 20.5 ms per token, measured in RL runs of 7B (TP 1), 14B and 32B (TP 2) on H800, minus the data
sheet's 5.9, 7.9 and 15.5 ms.
"""

KERNELS_PER_LAYER = 8
"""Norm, QKV, rotation, attention, output, norm, and two for the gated MLP: fused as in vLLM."""

ALL_REDUCES_PER_LAYER = 2

EXCHANGES_PER_LAYER = 2

ACTIVATION_BYTES = 2
"""Minimum bytes of an activation: 8-bit weights are multiplied with activations that are reduced in 16 bits."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """An `EngineModel` from a data sheet. Raises UnknownShape for products without a rate on the device."""

    shape: ModelShape
    device: DeviceSheet
    tensor_parallel: int = 1
    """Devices per rank."""
    data_parallel: int = 1
    """Ranks of the engine."""

    def __post_init__(self) -> None:
        if self._peak is None:
            raise UnknownShape(
                f"products of {self.shape.product_bits} bits: the table of devices has no rate of {self.device.kind} "
                "for them"
            )

    @property
    def context_s(self) -> float:
        return self.shape.full_layers * self._layer_token_s

    def iteration_s(self, sequences: int) -> float:
        windows = self.shape.windows
        held = windows.layers * windows.tokens if windows else 0
        states_s = 2 * self.shape.state_bytes / (self.data_parallel * self.tensor_parallel) / self._kv_bytes_per_s
        return self._forward_s(sequences) + sequences * (held * self._layer_token_s + states_s)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        if tokens == 0:
            return 0.0
        attention = self.shape.attention_operations(tokens, context_tokens)
        return self._forward_s(tokens) + attention / self._flops_per_s(self.device.flops_per_s.value)

    @property
    def _layer_token_s(self) -> float:
        """Return the seconds in which one layer reads the KV of a token."""
        share = self.data_parallel * min(self.tensor_parallel, self.shape.kv_heads)
        return self.shape.kv_layer_bytes / share / self._kv_bytes_per_s

    @property
    def _kv_bytes_per_s(self) -> float:
        return self.device.memory_bytes_per_s.value * self.device.attention_efficiency.value

    @property
    def _peak(self) -> float | None:
        device = self.device
        rates = {16: device.flops_per_s, 8: device.fp8_flops_per_s, 4: device.fp4_flops_per_s}
        rate = rates.get(self.shape.product_bits)
        return None if rate is None else rate.value

    def _flops_per_s(self, peak: float) -> float:
        return self.tensor_parallel * self.data_parallel * peak * self.device.matmul_efficiency.value

    def _forward_s(self, tokens: int) -> float:
        shape, ranks = self.shape, self.data_parallel
        bandwidth = self.tensor_parallel * self.device.memory_bytes_per_s.value * self.device.weights_efficiency.value
        copied = shape.read_bytes(0)
        reading_s = (copied + (shape.read_bytes(tokens) - copied) / ranks) / bandwidth
        computing_s = 2 * (shape.active - shape.head) * tokens / self._flops_per_s(self._peak or 0.0)
        computing_s += 2 * shape.head * tokens / self._flops_per_s(self.device.flops_per_s.value)
        starts_s = KERNEL_S * KERNELS_PER_LAYER * shape.layers
        exchanges_s = exchange_s(self.shape, self.device, self.tensor_parallel, self.data_parallel, tokens)
        exchanges_s *= self.shape.layers
        return max(reading_s, computing_s) + starts_s + self._all_reduces_s(tokens / ranks) + exchanges_s

    def _all_reduces_s(self, tokens: float) -> float:
        others = self.tensor_parallel - 1
        if others == 0:
            return 0.0
        size = tokens * self.shape.hidden * max(self.shape.weight_bytes, ACTIVATION_BYTES)
        rate = self.device.all_reduce_bytes_per_s.among(self.tensor_parallel)
        moved_s = 2 * others / self.tensor_parallel * size / rate
        start_s = self.device.all_reduce_s.value
        start_s += BETWEEN_NODES_S if self.tensor_parallel > self.device.linked_devices else 0.0
        return ALL_REDUCES_PER_LAYER * self.shape.layers * (start_s + moved_s)


def exchange_s(shape: ModelShape, device: DeviceSheet, tensor_parallel: int, data_parallel: int, tokens: int) -> float:
    """Return the seconds in which `tokens` tokens reach their experts in one layer and return.

    The exchange uses the links of the engine's devices. 0 if its ranks share no experts.
    """
    if data_parallel == 1 or not shape.experts:
        return 0.0
    devices = tensor_parallel * data_parallel
    sent = tokens / devices * shape.experts_per_token * shape.hidden * ACTIVATION_BYTES
    sent_s = sent * (devices - 1) / devices / device.link_bytes_per_s.value
    return EXCHANGES_PER_LAYER * (device.all_reduce_s.value + sent_s)


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
